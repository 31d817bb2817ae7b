"""Ranks side by side: the N ranks of one graph run node by node in this process, and a collective is a function over their values.

In goes a TrainingGraph of several ranks, out comes a Runner that takes the user's own tensors, whole. Every rank gets its part of
what is cut, and a copy of what it writes. After the step the copies of what must be the same everywhere are compared bit for bit:
ranks that drifted apart train another model, and the reason is a collective that is missing in the forward or in the backward
pass. Then all that was written goes to the user's own tensors; after an error they are as they were.

There is no process group, no thread and no order of arrival, so a run can be repeated bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.errors import WholestepError
from wholestep.graph.mesh import LAYOUT, PARTIAL, Cut
from wholestep.graph.training_graph import Input, OutputKind, Role, TrainingGraph, phase_of
from wholestep.lower.in_place import ImperativeGraph, write_state_in_place
from wholestep.lower.interpret import constants_of, facts_of
from wholestep.lower.runner import Runner
from wholestep.lower.statements import statement_of
from wholestep.ops.record import arguments_of, record_of


class RanksDiffer(WholestepError):
    """What must be the same on every rank is not: a collective is missing."""

    def __init__(self, what: str, name: str, *, hint: str) -> None:
        self.name = name
        """Of the parameter, buffer or output."""
        super().__init__(what, hint=hint)


def lower_lockstep(graph: TrainingGraph, *, watch: Sequence[str] = ()) -> Runner:
    """A Runner over all ranks; watched values and gradients are returned whole."""
    started = time.perf_counter()
    program = Lockstep(graph, write_state_in_place(graph, watch), watch)
    facts = {
        "backend": "lockstep", "ranks": graph.ranks.mesh.num_ranks, "calls": len(program.calls), "driver": "",
    }  # fmt: skip
    return Runner(program, len(graph.inputs), facts_of(program.imperative, started) | facts)


class Lockstep:
    """The program of all ranks."""

    def __init__(self, graph: TrainingGraph, imperative: ImperativeGraph, watch: Sequence[str]) -> None:
        self.graph, self.imperative, self.mesh = graph, imperative, graph.ranks.mesh
        self.constants = constants_of(imperative.graph, imperative.owner)
        self.calls = [node for node in imperative.graph.nodes if node.op == "call_function"]
        self.functions = {node: statement_of(node).function for node in self.calls}
        self.dying = _last_uses(self.calls, {n for n in imperative.results if isinstance(n, fx.Node)})
        self.written = {entry.target for entry in graph.outputs if entry.target is not None}
        placeholders = graph.placeholders
        self.cuts = [self._cut(entry, node) for entry, node in zip(graph.inputs, placeholders, strict=True)]
        cut_of, owners = graph.ranks.cuts, {node: name for name, node in graph.gradients.items()}
        returned = [entry for entry in graph.outputs if entry.kind is not OutputKind.UPDATE]
        self.names: list[str | None] = [*(entry.name for entry in returned), *(owners.get(name) for name in watch)]
        """Of results: outputs, then gradients that are watched, by parameter; None for other values."""
        self.layouts: list[Any] = [
            _layout(cut_of.get(entry.name)) if entry.kind is OutputKind.GRADIENT else None for entry in returned
        ]
        """How each result is spread over the ranks; None where all have the same."""
        for name in watch:
            facts = graph.node(name).meta.get("custom") or {}
            self.layouts.append(_layout(cut_of.get(owners[name])) if name in owners else facts.get(LAYOUT))

    def _cut(self, entry: Input, placeholder: fx.Node) -> Cut | None:
        """How an input is cut; optimizer state that has not the shape of its parameter is the same everywhere."""
        if entry.role not in (Role.PARAMETER, Role.STATE, Role.GRADIENT):
            return None
        name = entry.name.rpartition("/")[0] if entry.role is Role.STATE else entry.name
        cut = self.graph.ranks.cuts.get(name)
        return cut if cut is not None and placeholder.meta["val"].dim() > cut.dim else None

    # ---- a step ----

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        given = [self._inputs_of(rank, inputs) for rank in range(self.mesh.num_ranks)]
        placeholders = self.imperative.placeholders
        values: list[dict[fx.Node, Any]] = [
            {**self.constants, **dict(zip(placeholders, own, strict=True))} for own in given
        ]
        for node in self.calls:
            for own, value in zip(values, self._called(node, values), strict=True):
                own[node] = value
                for dead in self.dying.get(node, ()):
                    del own[dead]
        found = [fx.map_arg(self.imperative.results, own.__getitem__) for own in values]
        self._compare_state(given)
        self._compare_results(found)
        for rank, tensors in enumerate(given):
            for i in self.written:
                if self._first(rank, i) == rank:
                    self._put(inputs[i], rank, self.cuts[i], tensors[i])
        return tuple(self._whole([of[i] for of in found], self.layouts[i]) for i in range(len(found[0])))

    def _inputs_of(self, rank: int, inputs: list[Any]) -> list[Any]:
        pairs = enumerate(zip(inputs, self.cuts, strict=True))
        return [
            cut.own(tensor, *self._place(rank, cut))
            if cut is not None
            else tensor.clone()
            if i in self.written
            else tensor
            for i, (tensor, cut) in pairs
        ]

    def _put(self, tensor: torch.Tensor, rank: int, cut: Cut | None, own: torch.Tensor) -> None:
        """What a rank has written, into the user's tensor."""
        if cut is None:
            tensor.copy_(own)
        else:
            cut.put(tensor, *self._place(rank, cut), own)

    def _place(self, rank: int, cut: Cut) -> tuple[int, int]:
        return self.mesh.coordinates(rank)[cut.axis], self.mesh.size(cut.axis)

    def _first(self, rank: int, i: int) -> int:
        """The first rank that must have the same of an input."""
        cut = self.cuts[i]
        return 0 if cut is None else next(
            r for r in range(rank + 1) if self.mesh.coordinates(r)[cut.axis] == self.mesh.coordinates(rank)[cut.axis]
        )  # fmt: skip

    def _called(self, node: fx.Node, values: list[dict[fx.Node, Any]]) -> list[Any]:
        calls = [fx.map_arg((node.args, node.kwargs), own.__getitem__) for own in values]
        across = record_of(node).across
        if across is None:
            return [self.functions[node](*args, **kwargs) for args, kwargs in calls]
        named = [arguments_of(node.target, args, kwargs) for args, kwargs in calls]  # type: ignore[arg-type]
        return self._together(across, named)

    def _together(self, across: Callable[..., list[Any]], named: list[dict[str, Any]]) -> list[Any]:
        """A collective, by each group of ranks along its axis."""
        xs = [given.pop("x", None) for given in named]
        found: list[Any] = [None] * len(xs)
        for group in self.mesh.groups(named[0]["axis"]):
            for rank, value in zip(group, across([xs[r] for r in group], **named[0]), strict=True):
                found[rank] = value
        return found

    def _whole(self, parts: list[Any], layout: Sequence[Any] | None) -> Any:
        """One value from those of all ranks."""
        if not layout or not isinstance(parts[0], torch.Tensor):
            return parts[0]
        own = [parts[rank] for rank in next(self.mesh.groups(layout[1]))]
        if layout[0] == PARTIAL:
            return sum(own[1:], start=own[0])
        dim, axis, sizes, times = layout
        return Cut(dim, axis, tuple(sizes), times).whole(own)

    # ---- whether ranks agree ----

    def _compare_state(self, given: list[list[Any]]) -> None:
        odd: dict[Input, list[int]] = {}
        for i in sorted(self.written):
            ranks = [r for r in range(1, len(given)) if not _same_bits(given[self._first(r, i)][i], given[r][i])]
            if ranks:
                odd[self.graph.inputs[i]] = ranks
        if odd:
            self._differ(odd)

    def _compare_results(self, found: list[Any]) -> None:
        odd: dict[Input, list[int]] = {}
        for i, name in enumerate(self.names):
            if name is not None and self.layouts[i] is None:
                ranks = [r for r in range(1, len(found)) if not _same_bits(found[0][i], found[r][i])]
                if ranks:
                    odd[Input(Role.GRADIENT, name)] = ranks
        if odd:
            self._differ(odd)

    def _differ(self, odd: dict[Input, list[int]]) -> None:
        """One error about the one that the backward computes first, and the nearest line of the recipe."""
        place = {node.name: i for i, node in enumerate(self.graph.graph.nodes)}

        def computed(entry: Input) -> int:
            return place.get(self.graph.gradients.get(_owner(entry), ""), len(place))

        first = min(odd, key=computed)
        name, ranks = _owner(first), odd[first]
        backward = name in self.graph.gradients
        what = "a missing backward sync" if backward else "a missing sync"
        about = "the gradient of" if backward else "the value of"
        near = nearest_cut(self.graph, name) if backward else None
        said = "" if near is None or not near.line else f"; the next cut is {near.line}"
        raise RanksDiffer(
            f"{what}: {about} {name} differs between rank 0 and rank {', '.join(map(str, ranks))}{said}", name,
            hint="ranks use it differently, and no collective adds up their gradients" if backward else "gather or reduce it",
        )  # fmt: skip


def nearest_cut(graph: TrainingGraph, name: str) -> Cut | None:
    """The cut parameter that the forward pass meets next after a parameter: what is computed there needs a sync before it."""
    placeholders = dict(zip(graph.inputs, graph.placeholders, strict=True))
    cut = {placeholders[e]: graph.ranks.cuts[e.name] for e in placeholders if e.name in graph.ranks.cuts
           and e.role is Role.PARAMETER}  # fmt: skip
    start = placeholders.get(Input(Role.PARAMETER, name))
    seen: set[fx.Node] = set() if start is None else {start}
    for node in graph.graph.nodes:
        if node.op != "call_function" or phase_of(node) != "forward" or not seen.intersection(node.all_input_nodes):
            continue
        seen.add(node)
        met = [entry for entry in _roots(node) if entry in cut]
        if met:
            return cut[max(met, key=lambda entry: entry.meta["val"].numel())]
    return None


def _roots(node: fx.Node) -> list[fx.Node]:
    """The inputs of the graph that a call reads, itself or through calls of that one input alone: a transposed weight."""
    found = []
    for entry in node.all_input_nodes:
        while entry.op == "call_function" and len(entry.all_input_nodes) == 1:
            entry = entry.all_input_nodes[0]
        found.append(entry)
    return found


def _owner(entry: Input) -> str:
    return entry.name.rpartition("/")[0] if entry.role is Role.STATE else entry.name


def _layout(cut: Cut | None) -> list[Any] | None:
    return None if cut is None else cut.fact()


def _last_uses(calls: Sequence[fx.Node], kept: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Call -> the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in calls:
        for entry in (node, *node.all_input_nodes):
            if entry.op == "call_function":
                last[entry] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for entry, node in last.items():
        if entry not in kept:
            found.setdefault(node, []).append(entry)
    return found


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or a is b:
        return True
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(torch.equal(a, b) or ((a == b) | (a.isnan() & b.isnan())).all())
