"""localise: the graph of a loss in, the program of one rank out, before autodiff.

Cut parameters enter as their local part; sizes are local ones; collectives stand where layouts ask for them. Where a dimension
turns out to be several side by side (one weight for q, k and v), the parameter is cut in as many blocks and the graph is followed
anew; where keys or values have fewer heads than there are ranks, their parameter stays whole.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from wholestep.errors import BadOption, WholestepError, WholestepWarning
from wholestep.graph.layers import layer_pattern
from wholestep.graph.mesh import Cut, Mesh
from wholestep.schedule.modules import inside
from wholestep.schedule.sharding import layout, rules
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.values import Value
from wholestep.schedule.sharding.writer import Collective, Recut

assert rules


@dataclasses.dataclass(frozen=True, slots=True)
class Sync:
    """What a `sync` line asks of one module."""

    module: str
    operation: str
    when: str = "forward"
    axis: int | None = None
    line: str = ""
    """For people."""
    over: str = "tp"
    """The mesh axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class Localised:
    """What became of a graph."""

    collectives: tuple[Collective, ...] = ()
    """In the order of the program; `enter` stands for an all_reduce of the backward pass."""
    cuts: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    """How parameters are cut in the end, with the blocks that were found."""
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parameters that stay whole although they were to be cut -> why."""

    def __str__(self) -> str:
        lines = [str(collective) for collective in self.collectives]
        return "\n".join([*lines, *(f"{name}: stays whole, {why}" for name, why in self.whole.items())])


def localise(
    module: fx.GraphModule, cuts: Mapping[str, Cut | tuple[int, str]], mesh: Mesh, *,
    names: Mapping[fx.Node, str] | None = None, paths: Mapping[int, str] | None = None, syncs: Sequence[Sync] = (),
) -> Localised:  # fmt: skip
    """Rewrite Dynamo's graph of a loss, in place, into the program of one rank.

    Args:
        module: the graph, torch-level calls, with global shapes in node.meta["example_value"].
        cuts: parameter -> how it is cut, by the names that `names` gives.
        mesh: how many ranks an axis has. One axis is cut over at a time.
        names: which placeholder is which parameter; read off Dynamo's sources unless given.
        paths: id of a module -> its path, for errors and for the list of collectives.
        syncs: explicit `sync` lines: gathers and scatters are carried out, sums are checked against what follows from layouts.
    """
    wanted = {name: one if isinstance(one, Cut) else Cut(*one) for name, one in cuts.items()}
    wanted = {name: one for name, one in wanted.items() if mesh.size(one.axis) > 1}
    axes = {one.axis for one in wanted.values()}
    if len(axes) > 1:
        raise BadOption(f"parameters are cut over {' and '.join(sorted(axes))}", hint="cut them over one mesh axis")
    if not axes:
        if syncs:
            raise BadOption(f"{syncs[0].line}: nothing is cut", hint="shard a parameter, or leave the line out")
        return Localised()
    axis = axes.pop()
    for sync in syncs:
        if sync.over != axis:
            raise BadOption(
                f"{sync.line}: over={sync.over!r}, and parameters are cut over {axis!r}", hint=f"say over={axis!r}"
            )
    named = dict(names) if names is not None else parameter_names(module)
    whole: dict[str, str] = {}
    while True:
        borders = _Borders(syncs)
        cut = {node: (name, wanted[name]) for node, name in named.items() if name in wanted}
        kept = {node: name for node, name in named.items() if name in whole}
        program = Program(module, axis, mesh.size(axis), cut, kept, paths or {}, borders)
        try:
            graph = program.write()
            break
        except Recut as found:
            _change(found, wanted, whole, cut, mesh.size(axis))
    order = [program.collectives[node] for node in graph.nodes if node in program.collectives]
    borders.check(order)
    graph.lint()
    module.graph = graph
    module.recompile()
    for name, why in whole.items():
        warnings.warn(f"{name} stays whole: {why}", WholestepWarning, stacklevel=2)
    return Localised(tuple(order), wanted, whole)


def _change(
    found: Recut, wanted: dict[str, Cut], whole: dict[str, str], cut: Mapping[fx.Node, tuple[str, Cut]], parts: int
) -> None:
    """Cut parameters as a rule needs them, and with them those of equal layers; the same twice would never end."""
    shapes = {name: tuple(node.meta["example_value"].shape) for node, (name, _) in cut.items()}
    asked = {(layer_pattern(name), shapes[name]) for name in found.names & shapes.keys()}
    changed = False
    for name in [name for name, shape in shapes.items() if (layer_pattern(name), shape) in asked]:
        how = wanted[name]
        if found.blocks is None:
            whole[name] = _reason(found.why)
            del wanted[name]
            changed = True
            continue
        sizes = found.blocks
        if isinstance(sizes, int):
            each = shapes[name][how.dim] // sizes
            sizes = (each,) * sizes if each % parts == 0 else ()
        if shapes[name][how.dim] == sum(sizes) and len(how.sizes) * how.times < len(sizes):
            blocks = layout.cut_of(how.dim, sizes)
            wanted[name] = dataclasses.replace(how, sizes=blocks.sizes, times=blocks.times)
            changed = True
    if not changed:
        raise found.why


def _reason(error: WholestepError) -> str:
    return error.what.partition(": ")[2] or error.what


_STEP = re.compile(r"\['([^']+)'\]|\[(\d+)\]")


def parameter_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """Placeholder -> the name of the model's parameter, as Dynamo's source says: `L['model']._modules['a']._parameters['w']`."""
    found: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        source = getattr(node.meta.get("grapharg"), "source", None) if node.op == "placeholder" else None
        if source is None:
            continue
        text = source.name() if callable(source.name) else source.name
        if text.startswith("L['model']") and "_parameters[" in text:
            found[node] = ".".join(a or b for a, b in _STEP.findall(text.removeprefix("L['model']")))
    return found


class _Borders:
    """What `sync` lines do to values at the borders of their modules, and whether the others are as was asked."""

    def __init__(self, syncs: Sequence[Sync]) -> None:
        self.syncs = syncs
        self.commands = [sync for sync in syncs if sync.operation != "all_reduce"]
        self.done: set[Sync] = set()
        self.seen: dict[Sync, str] = {}
        self.entered: dict[tuple[fx.Node, Sync], Any] = {}

    def leaving(self, program: Program, node: fx.Node, result: Any) -> Any:
        """A result of a module, as its readers outside get it."""
        for sync in self.commands:
            if isinstance(result, Value) and self._leaves(program, node, sync):
                result = self._exchanged(program, sync, result)
        return result

    def summed(self, program: Program, value: Value) -> Value:
        """A sum that is due inside of the call at hand, before a bias is added to it."""
        for sync in self.commands:
            if sync.operation == "reduce_scatter" and self._leaves(program, program.at, sync):
                value = self._exchanged(program, sync, value)
        return value

    def _leaves(self, program: Program, node: fx.Node, sync: Sync) -> bool:
        if sync.when != "forward" or not inside(program.path, sync.module):
            return False
        return any(not inside(program.path_of(user), sync.module) for user in node.users)

    def entering(self, program: Program, node: fx.Node, value: Any) -> Any:
        """An argument of a call, as the call's module gets it."""
        for sync in self.commands:
            comes = node.op != "placeholder" and not inside(program.path_of(node), sync.module)
            if (
                sync.when == "forward_input"
                and comes
                and inside(program.path, sync.module)
                and isinstance(value, Value)
            ):
                if (node, sync) not in self.entered:
                    self.entered[node, sync] = self._exchanged(program, sync, value)
                value = self.entered[node, sync]
        return value

    def _exchanged(self, program: Program, sync: Sync, value: Value) -> Value:
        """What is asked for, where the value is such that it can be."""
        if sync.axis is None or not -value.dim <= sync.axis < value.dim or not value.is_float:
            return value
        dim = sync.axis % value.dim
        self.seen[sync] = str(value.layout)
        fits = value.shape[dim] % program.parts == 0
        if sync.operation == "all_gather" and value.cut is not None and value.cut.dim == dim:
            value = program.gathered(value, sync.line)
        elif sync.operation == "reduce_scatter" and value.is_partial and fits:
            value = program.scattered(value, dim)
        elif sync.operation == "scatter" and value.is_whole and fits:
            value = program.part(value, layout.Cut(dim, (value.shape[dim],)))
        else:
            return value
        self.done.add(sync)
        return value

    def check(self, found: Sequence[Collective]) -> None:
        """Every line was carried out, or follows from the layouts."""
        for sync in self.syncs:
            here = [one for one in found if inside(one.module, sync.module)]
            if sync.operation != "all_reduce":
                fine = sync in self.done
            elif sync.when == "backward":
                fine = any(one.name == "enter" and any(inside(at, sync.module) for at in one.readers) for one in found)
            else:
                fine = any(one.name == "all_reduce" for one in here)
            if not fine:
                names = sorted({one.name for one in here})
                follows = f"{' and '.join(names)} there" if names else "no exchange there"
                seen = f", where a value is {self.seen[sync]}" if sync in self.seen else ""
                hint = "leave the line out, or cut the parameter that it is about"
                raise BadOption(f"{sync.line}: from the lines of shard follows {follows}{seen}", hint=hint)
