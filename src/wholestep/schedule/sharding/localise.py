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
from wholestep.graph.mesh import Mesh
from wholestep.schedule.modules import inside
from wholestep.schedule.sharding import rules
from wholestep.schedule.sharding.layout import Cut, Sharding
from wholestep.schedule.sharding.program import Collective, Program, Recut
from wholestep.schedule.sharding.values import Value

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


@dataclasses.dataclass(frozen=True, slots=True)
class Localised:
    """What became of a graph."""

    collectives: tuple[Collective, ...] = ()
    """In the order of the program; `enter` stands for an all_reduce of the backward pass."""
    shardings: Mapping[str, Sharding] = dataclasses.field(default_factory=dict)
    """How the parameters of the graph are cut in the end, with the blocks that were found."""
    whole: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Parameters that stay whole although they were to be cut -> why."""

    def __str__(self) -> str:
        lines = [str(collective) for collective in self.collectives]
        return "\n".join([*lines, *(f"{name}: stays whole, {why}" for name, why in self.whole.items())])


def localise(
    module: fx.GraphModule, shardings: Mapping[str, Sharding | tuple[int, str]], mesh: Mesh, *,
    names: Mapping[fx.Node, str] | None = None, paths: Mapping[int, str] | None = None, syncs: Sequence[Sync] = (),
) -> Localised:  # fmt: skip
    """Rewrite Dynamo's graph of a loss, in place, into the program of one rank.

    Args:
        module: the graph, torch-level calls, with global shapes in node.meta["example_value"].
        shardings: parameter -> how it is cut; a tied parameter under every name it has.
        mesh: how many ranks an axis has. One axis is cut over at a time.
        names: which placeholder is which parameter; read off Dynamo's sources unless given.
        paths: id of a module -> its path, for errors and for the list of collectives.
        syncs: explicit `sync` lines: gathers and scatters are carried out, sums are checked against what follows from layouts.
    """
    wanted = {name: one if isinstance(one, Sharding) else Sharding(*one) for name, one in shardings.items()}
    wanted = {name: one for name, one in wanted.items() if mesh.size(one.axis) > 1}
    axes = {one.axis for one in wanted.values()}
    if len(axes) > 1:
        raise BadOption(f"parameters are cut over {' and '.join(sorted(axes))}", hint="cut them over one mesh axis")
    if not axes:
        return Localised()
    axis = axes.pop()
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
            _change(found, wanted, whole, cut)
    borders.check(program)
    graph.lint()
    module.graph = graph
    module.recompile()
    for name, why in whole.items():
        warnings.warn(f"{name} stays whole: {why}", WholestepWarning, stacklevel=2)
    used = {name: wanted[name] for name, _ in cut.values()}
    order = [program.collectives[node] for node in graph.nodes if node in program.collectives]
    return Localised(tuple(order), used, whole)


def _change(
    found: Recut, wanted: dict[str, Sharding], whole: dict[str, str], cut: Mapping[fx.Node, tuple[str, Sharding]]
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
        elif shapes[name][how.dim] == sum(found.blocks) and len(how.blocks) < len(found.blocks):
            wanted[name] = dataclasses.replace(how, blocks=found.blocks)
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
    """What `sync` lines do to values that leave their module, and whether the others are as was asked."""

    def __init__(self, syncs: Sequence[Sync]) -> None:
        self.syncs, self.done = syncs, set[int]()
        self.seen: dict[int, str] = {}

    def __call__(self, program: Program, node: fx.Node, result: Any) -> Any:
        commands = [sync for sync in self.syncs if sync.operation != "all_reduce" and inside(program.path, sync.module)]
        for sync in commands:
            leaves = any(not inside(program._path_of(user.meta), sync.module) for user in node.users)
            if isinstance(result, Value) and leaves and sync.when == "forward" and isinstance(sync.axis, int):
                result = self._exchanged(program, sync, result)
        return result

    def _exchanged(self, program: Program, sync: Sync, value: Value) -> Value:
        assert sync.axis is not None
        if not -value.dim <= sync.axis < value.dim:
            return value
        dim = sync.axis % value.dim
        self.seen[id(sync)] = f"{value.layout} at its border"
        if sync.operation == "all_gather" and value.cut is not None and value.cut.dim == dim:
            self.done.add(id(sync))
            return program.gathered(value, sync.line or "asked for by sync")
        if sync.operation == "reduce_scatter" and value.is_partial and value.shape[dim] % program.parts == 0:
            self.done.add(id(sync))
            return program.scattered(value, dim)
        if sync.operation == "scatter" and value.is_whole and value.shape[dim] % program.parts == 0 and value.is_float:
            self.done.add(id(sync))
            return program.part(value, Cut(dim, (value.shape[dim],)))
        return value

    def check(self, program: Program) -> None:
        """Every line was carried out, or follows from the layouts."""
        found = list(program.collectives.values())
        for sync in self.syncs:
            if sync.operation != "all_reduce":
                fine = id(sync) in self.done
            elif sync.when == "backward":
                fine = any(one.name == "enter" and any(inside(at, sync.module) for at in one.readers) for one in found)
            else:
                fine = any(one.name == "all_reduce" and inside(one.module, sync.module) for one in found)
            if not fine:
                here = sorted({one.name for one in found if inside(one.module, sync.module)})
                follows = f"{' and '.join(here)} follow there from the lines of shard" if here else "nothing follows there from the lines of shard"
                seen = f"; its output is {self.seen[id(sync)]}" if id(sync) in self.seen else ""
                asked = sync.line or f"sync {sync.module} {sync.operation}"
                raise BadOption(f"{asked}: {sync.operation} is asked for, and {follows}{seen}", hint="leave the line out, or cut the parameter that asks for it")
