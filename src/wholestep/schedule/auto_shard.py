"""How a model is cut among ranks, found by trying: the graph of its loss and a mesh in, dimensions of parameters out.

No name of a module or class is known here. Parameters of equal layers are cut alike, so a trial is about a group of them: one is
cut along one dimension, and the writer of ranks' programs (`sharding/`) tells what follows. Where a rank then takes its part of
another parameter, that one is cut there too; where it takes its part of a value that was computed whole, a parameter behind that
value is. A trial is kept once nothing is computed whole and taken apart: it then begins where ranks read one value and ends in a
sum over ranks, as two layers do, one cut by columns and one by rows, or the projections of an attention. What leads to no such
end, or meets an operator that is not followed, stays whole, with the reason.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import fx, nn

from wholestep.errors import BadOption, WholestepError, WholestepWarning
from wholestep.graph.mesh import LAYOUT, PARTIAL, Cut, Mesh
from wholestep.schedule.operators import call_of
from wholestep.schedule.sharding import localise

AXIS = "tp"
LEAST_SHARE = 0.01
"""Of the model's elements: a table that is smaller stays whole, unless a layer that is cut reads it."""
NEAR = 4
"""Groups that are tried to get a value cut that a rank takes apart, the nearest first."""

Dims: TypeAlias = Mapping["Group", int]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Parameters of equal layers: one place of each, and one shape."""

    pattern: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = dataclasses.field(compare=False)

    def fits(self, dim: int, parts: int) -> bool:
        return self.shape[dim] % parts == 0 and self.shape[dim] > 0

    @property
    def elements(self) -> int:
        return len(self.names) * torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What follows from cutting groups."""

    dims: Dims
    apart: int
    """Bytes that are computed, or kept, whole and taken apart by ranks: their gradients have to be gathered."""
    exchanged: int
    """Bytes of all exchanges of the forward pass, and of sums in the backward pass."""
    wanted: tuple[tuple[Group, int | None], ...]
    """What would have to be cut so that less is taken apart, and where that is known the dimension."""
    roles: Mapping[Group, str]
    whole: Mapping[str, str]
    """Parameters that stay whole although their group is cut -> why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """How a model is cut."""

    dims: Dims
    roles: Mapping[Group, str]
    whole: Mapping[str, str]
    """Pattern of a group -> why it stays whole."""


def groups_of(root: nn.Module) -> list[Group]:
    """In the order of the model; a parameter with two names goes by the first."""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    lists = {path for path, module in root.named_modules() if _is_layers(module)}
    for name, parameter in root.named_parameters():
        parts = name.split(".")
        starred = ["*" if ".".join(parts[:i]) in lists else part for i, part in enumerate(parts)]
        found.setdefault((".".join(starred), tuple(parameter.shape)), []).append(name)
    return [Group(pattern, shape, tuple(names)) for (pattern, shape), names in found.items()]


def _is_layers(module: nn.Module) -> bool:
    children = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
    return len({type(child) for child in children}) == 1 and any(list(child.children()) for child in children)


class Search:
    """Trials over one graph of a loss."""

    def __init__(self, root: nn.Module, graph: fx.GraphModule, paths: Mapping[int, str], mesh: Mesh) -> None:
        self.graph, self.paths, self.mesh, self.parts = graph, paths, mesh, mesh.size(AXIS)
        self.groups = groups_of(root)
        self.group_of = {name: group for group in self.groups for name in group.names}
        known = {id(parameter): name for name, parameter in root.named_parameters()}
        places = graph.graph.find_nodes(op="placeholder")
        self.names = {node: known[key] for node in places if (key := id(node.meta["grapharg"].example)) in known}
        self.by_place = {node.name: self.group_of[name] for node, name in self.names.items()}
        self.refusals: dict[Group, list[str]] = {}
        """Why each dimension of a group is not cut."""

    def run(self) -> Found:
        """Layers first, in the order in which they are read; then what there is once, the largest first."""
        dims: dict[Group, int] = {}
        read = list(dict.fromkeys(self.by_place.values()))
        total = sum(group.elements for group in self.groups)
        single = [g for g in read if "*" not in g.pattern and g.elements >= LEAST_SHARE * total]
        seeds = [g for g in read if "*" in g.pattern] + sorted(single, key=lambda g: -g.elements)
        last = None
        for seed in (group for group in seeds if len(group.shape) > 1):
            if seed in dims:
                continue
            ends = [end for dim in range(len(seed.shape)) if (end := self._grown(dims, seed, dim)) is not None]
            if ends:
                last = min(ends, key=lambda trial: trial.exchanged)
                dims = dict(last.dims)
        if last is None:
            return Found({}, {}, self._whole({}))
        whole = {self.group_of[name]: why for name, why in last.whole.items()}
        kept = {group: dims[group] for group in self.groups if group in dims and group not in whole}
        return Found(kept, last.roles, {**self._whole(dims), **{group.pattern: why for group, why in whole.items()}})

    def _refuse(self, group: Group, why: str) -> None:
        self.refusals.setdefault(group, []).append(why)

    def _whole(self, dims: Dims) -> dict[str, str]:
        return {group.pattern: "; ".join(why) for group, why in self.refusals.items() if group not in dims}

    def _grown(self, dims: Dims, seed: Group, dim: int) -> Trial | None:
        """A group cut along one dimension, and all that follows from it; None where that has no end."""
        if not seed.fits(dim, self.parts):
            self._refuse(seed, f"{self.parts} ranks do not divide dimension {dim}, of size {seed.shape[dim]}")
            return None
        found = self._tried({**dims, seed: dim}, seed)
        while found is not None and found.apart:
            better = self._less_apart(found)
            if better is None:
                self._refuse(
                    seed, f"cut along dimension {dim}, ranks would take apart what each of them computes whole"
                )
            found = better
        return found

    def _less_apart(self, trial: Trial) -> Trial | None:
        """The first trial with one group more, or with all parameters that are taken apart, that is better."""
        direct = {group: dim for group, dim in trial.wanted if dim is not None and group.fits(dim, self.parts)}
        options: list[dict[Group, int]] = [direct] if len(direct) > 1 else []
        for group, known in trial.wanted:
            dims = range(len(group.shape)) if known is None else (known,)
            options += [{group: dim} for dim in dims if group.fits(dim, self.parts)]
        for option in options:
            found = self._tried({**trial.dims, **option}, None)
            if found is not None and found.apart < trial.apart:
                return found
        return None

    def _tried(self, dims: Dims, seed: Group | None) -> Trial | None:
        before = self.graph.graph
        cuts = {name: Cut(dim, AXIS) for group, dim in dims.items() for name in group.names}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", WholestepWarning)
                found = localise(self.graph, cuts, self.mesh, names=self.names, paths=self.paths)
            program = self.graph.graph
        except WholestepError as error:
            if seed is not None:
                self._refuse(seed, error.what)
            return None
        finally:
            self.graph.graph = before
        apart, wanted = self._apart(program, dims)
        exchanged = sum(one.bytes for one in found.collectives)
        return Trial(dims, apart, exchanged, tuple(wanted), self._roles(program, dims), found.whole)

    def _apart(self, program: fx.Graph, dims: Dims) -> tuple[int, dict[tuple[Group, int | None], None]]:
        """Parameters, and what learns: a part of a constant costs nothing."""
        total, wanted = 0, dict[tuple[Group, int | None], None]()
        for node in program.find_nodes(op="call_function", target=torch.ops.ws.own_part):
            value = node.args[0]
            assert isinstance(value, fx.Node)
            if value.name not in self.by_place and not value.meta["example_value"].requires_grad:
                continue
            total += value.meta["example_value"].numel() * value.meta["example_value"].element_size()
            if value.name in self.by_place:
                wanted[self.by_place[value.name], int(node.args[1])] = None  # type: ignore[arg-type]
            else:
                near = (group for group in self._behind(value) if group not in dims)
                wanted |= {(group, None): None for group, _ in zip(near, range(NEAR))}
        for node in program.find_nodes(op="call_function", target=torch.ops.ws.all_gather):
            example = node.args[0].meta["example_value"]  # type: ignore[union-attr]
            total += example.numel() * example.element_size() if example.requires_grad else 0
        return total, wanted

    def _behind(self, value: fx.Node) -> Iterator[Group]:
        """Parameters that a value is made of, the nearest first."""
        seen, row = {value}, [value]
        while row:
            row = [one for node in row for one in node.all_input_nodes if one not in seen]
            seen |= set(row)
            yield from dict.fromkeys(self.by_place[node.name] for node in row if node.name in self.by_place)

    def _roles(self, program: fx.Graph, dims: Dims) -> dict[Group, str]:
        """What becomes of what a parameter computes, for people."""
        found: dict[Group, str] = {}
        for place in program.find_nodes(op="placeholder"):
            group = self.by_place.get(place.name)
            if group is not None and group in dims and group not in found:
                found[group] = (
                    "what ranks make of it is summed" if _is_summed(place) else "each rank makes its part of the result"
                )
        return found


def _is_summed(node: fx.Node) -> bool:
    """Whether a call that reads a parameter, or its transpose, gives a partial sum."""
    for user in node.users:
        call = call_of(user)
        if (user.meta.get(LAYOUT) or [None])[0] == PARTIAL:
            return True
        if call is not None and call.name in ("t", "transpose", "permute", "to", "float") and _is_summed(user):
            return True
    return False


def address_of(group: Group, paths: Sequence[str]) -> tuple[list[str], str]:
    """(as few addresses of modules as mean the group, the parameter's name there)."""
    own = [name.rpartition(".")[0] for name in group.names]
    glob, _, param = group.pattern.rpartition(".")
    return ([glob] if list(paths) == own else own), param


def checked(mesh: Mesh) -> None:
    """Raise unless it is a mesh whose parts are found here."""
    if not isinstance(mesh, Mesh):
        raise BadOption(f"mesh={mesh!r}", hint="give a wholestep.Mesh(tp=2)")
    for axis in mesh.to_table():
        if axis != AXIS:
            raise BadOption(
                f"recipes.auto for {mesh}: how ranks of {axis} share the work is not found", hint="use Mesh(tp=...)"
            )
