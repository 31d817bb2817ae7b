"""Keep or recompute: what there is to decide about the memory of a step, as sets and numbers.

In: a TrainingGraph, its Timeline, a clock. Out: a Problem, in which equal layers share one decision. A value of the forward
pass that the backward pass reads is kept, or recomputed from what is kept. A value may be recomputed in the backward of its
own layer (`near`), or in that of another which reads it (`far`: what a layer hands to the next). Nothing may be recomputed
far from something that itself is not kept and comes from yet another layer: otherwise the whole forward pass would be
repeated for every layer.

Memory is looked at in every stretch of the backward pass and, last, at the end of the forward pass, where the loss is: what is
kept until then, what is recomputed there, and the rest, which no decision changes. Time is what is recomputed, and for fused
results that are kept, what it takes to write and read them: to compute a GELU twice is quicker than to store it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict

from torch import fx

from wholestep.graph.keys import value_keys
from wholestep.graph.layers import layers_of, parts_of
from wholestep.graph.liveness import flat_numbers, tensor_bytes, with_tensors
from wholestep.graph.segments import backward_segments
from wholestep.graph.training_graph import TrainingGraph, operation_of, phase_of
from wholestep.graph.views import is_cheap_view, is_cheap_view_or_entry
from wholestep.ops.flops import flops
from wholestep.ops.record import may_recompute
from wholestep.plan.fusion import is_fusable
from wholestep.plan.moves import Moves, Room, make_moves
from wholestep.plan.peak import Timeline
from wholestep.plan.seconds import Clock


@dataclasses.dataclass(slots=True)
class Value:
    """What layers call the same value: bytes, and who needs it."""

    key: str
    unit: str
    """Key of the operation that makes it."""
    bytes: int = 0
    count: int = 0
    near: bool = False
    """Read by the backward of its own layer."""
    far: bool = False
    """Read by the backward of another."""
    alive: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    """Stretch of the backward pass -> bytes kept there."""
    stored: bool = False
    """Recomputed it would be written to memory, not only computed inside its readers."""
    holding: float = 0.0
    """Seconds it takes to write it for the backward pass and to read it there."""
    made_from: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(slots=True)
class Unit:
    """One operation of the forward pass, over all equal layers."""

    key: str
    seconds: float = 0.0
    allowed: bool = True
    near_reads: set[str] = dataclasses.field(default_factory=set)
    """Values of its own layer."""
    far_reads: set[str] = dataclasses.field(default_factory=set)
    """Values of another layer, read across the border."""
    free_reads: set[str] = dataclasses.field(default_factory=set)
    """Values made outside all layers (rotary tables, embeddings)."""
    stretches: set[int] = dataclasses.field(default_factory=set)
    """Where it would be recomputed."""


@dataclasses.dataclass(slots=True)
class Problem:
    values: dict[str, Value]
    units: dict[str, Unit]
    rest: list[int]
    """Per stretch of the backward pass, and at the end of the forward pass: bytes that no decision changes, what lasts included."""
    moves: Moves | None = None
    """What could leave the card, where there is room for it."""


def make_problem(graph: TrainingGraph, line: Timeline, clock: Clock, room: Room | None = None) -> Problem:
    """What there is to decide for this step on the clock's device."""
    return _Builder(graph, line, clock).build(room)


class _Builder:
    def __init__(self, graph: TrainingGraph, line: Timeline, clock: Clock) -> None:
        self.graph, self.line, self.clock = graph, line, clock
        self.keys = value_keys(graph)
        self.layers = layers_of(graph.graph.nodes)
        self.numbers = line.numbers
        self.maker: dict[int, fx.Node] = {}
        """Storage made in the forward pass -> the node that stands for it (a selection, where there are several)."""
        self.values: dict[str, Value] = {}
        self.units: dict[str, Unit] = {}

    def build(self, room: Room | None) -> Problem:
        self._makers()
        segments = backward_segments(self.graph)
        stretches = _stretches(segments)
        self._units(segments, stretches)
        self._needs(segments, stretches)
        self._holding()
        moves = None if room is None else make_moves(self.graph, self.line, self.clock, stretches, room)
        return Problem(self.values, self.units, self._rest(stretches), moves)

    def _makers(self) -> None:
        for node in self.graph.operations():
            if phase_of(node) != "forward" or is_cheap_view(node):
                continue
            several = isinstance(node.meta.get("val"), list | tuple)
            if several or (node.target is operator.getitem and is_cheap_view(node.args[0])):  # type: ignore[arg-type]
                continue
            for storage in flat_numbers(self.numbers.get(node)):
                self.maker.setdefault(storage, node)
        for storage, node in self.maker.items():
            if node.op != "call_function":
                continue
            key, unit = self.keys[node], self.keys[operation_of(node)]
            value = self.values.setdefault(key, Value(key, unit))
            size = self._size(storage)
            value.bytes += size
            value.count += 1

    def _size(self, storage: int) -> int:
        node = self.maker[storage]
        return next(tensor_bytes(t) for s, t in with_tensors(self.numbers[node], node.meta["val"]) if s == storage)

    def _units(self, segments: list[tuple[str, fx.Node]], stretches: dict[fx.Node, int]) -> None:
        where: dict[str, set[int]] = defaultdict(set)
        for segment, node in segments:
            where[segment].add(stretches[node])
        for node in self.graph.operations():
            if phase_of(node) != "forward" or is_cheap_view_or_entry(node):
                continue
            unit = self.units.setdefault(self.keys[node], Unit(self.keys[node]))
            unit.allowed = unit.allowed and may_recompute(node)
            unit.stretches |= where[self.layers.get(node, "")]
            made = [self.maker[s] for s in flat_numbers(self.numbers[node]) if s in self.maker]
            unit.seconds += self._seconds(node, made)
            for storage in self._read(node):
                source = self.maker[storage]
                mine, its = self.layers.get(node), self.layers.get(source)
                reads = unit.near_reads if mine == its else unit.free_reads if its is None else unit.far_reads
                reads.add(self.keys[source])
                for value in made:
                    self.values[self.keys[value]].made_from.add(self.keys[source])

    def _read(self, node: fx.Node) -> set[int]:
        """Storages of forward values that a node reads; of a list of results a selection reads only its own."""
        read = [node] if node.target is operator.getitem else node.all_input_nodes
        return {s for entry in read for s in flat_numbers(self.numbers.get(entry)) if s in self.maker}

    def _seconds(self, node: fx.Node, made: list[fx.Node]) -> float:
        """Of a second call: a library call in full; fused work what it writes for library calls to read."""
        if not is_fusable(node):
            for value in made:
                self.values[self.keys[value]].stored = True
            return self.clock.library_call(node)
        total = 0.0
        for value in made:
            stored = any(not is_fusable(user) for user in _readers(value))
            self.values[self.keys[value]].stored |= stored
            size = sum(tensor_bytes(t) for _, t in with_tensors(self.numbers[value], value.meta["val"]))
            total += self.clock.moving(size * (2.0 if stored else 0.2))
        return total

    def _needs(self, segments: list[tuple[str, fx.Node]], stretches: dict[fx.Node, int]) -> None:
        ends: dict[str, int] = {}
        for segment, node in segments:
            ends[segment] = stretches[node]
        until: dict[int, int] = {s: ends.get(self.layers.get(node, "\0"), -1) for s, node in self.maker.items()}
        for segment, node in segments:
            for storage in self._read(node):
                value = self.values[self.keys[self.maker[storage]]]
                near = self.layers.get(self.maker[storage], "") == segment
                value.near, value.far = value.near or near, value.far or not near
                until[storage] = max(until[storage], stretches[node])
        for storage, node in self.maker.items():
            size = self._size(storage)
            for stretch in range(until[storage] + 1):
                self.values[self.keys[node]].alive[stretch] += size
        end_of_forward = max(stretches.values(), default=-1) + 1
        for value in self.values.values():
            value.alive[end_of_forward] = value.alive.get(0, 0)

    def _holding(self) -> None:
        """A fused result that no other part of the forward pass reads is written only to be kept.

        On a CPU arithmetic is not free beside memory, so there keeping counts as nothing."""
        if not self.clock.device.link_bandwidth:
            return
        parts = parts_of(self.graph.graph.nodes)
        for storage, node in self.maker.items():
            operation = operation_of(node)
            if not is_fusable(operation):
                continue  # a library writes its results anyway
            readers = _readers(node)
            forward = [r for r in readers if phase_of(r) == "forward"]
            written = flops(operation).kind == "reduction" or any(
                not is_fusable(r) or parts[r] != parts[operation] for r in forward
            )
            read = any(is_fusable(r) for r in readers if phase_of(r) == "backward")
            size = self._size(storage)
            self.values[self.keys[node]].holding += self.clock.moving(size * (int(not written) + int(read)))

    def _rest(self, stretches: dict[fx.Node, int]) -> list[int]:
        """At its fullest instant, what is alive in a stretch besides values of the forward pass that wait for the backward."""
        line = self.line
        backward = [phase_of(work.node) != "forward" for work in line.works]
        waiting = [0] * (len(line.works) + 1)
        for storage, size in line.sizes.items():
            if storage in self.maker and backward[line.last[storage]]:
                waiting[line.born[storage]] += size
                waiting[line.last[storage] + 1] -= size
        lasting = line.peak_bytes - (line.alive[line.peak_at] if line.alive else 0)
        rest: dict[int, int] = defaultdict(int)
        held = 0
        for index, work in enumerate(line.works):
            held += waiting[index]
            if work.node in stretches:
                rest[stretches[work.node]] = max(rest[stretches[work.node]], line.alive[index] - held)
        fullest = max((alive for alive, later in zip(line.alive, backward, strict=True) if not later), default=0)
        waits = sum(size for s, size in line.sizes.items() if s in self.maker and backward[line.last[s]])
        in_backward = [lasting + max(0, rest[i]) for i in range(max(stretches.values(), default=-1) + 1)]
        return [*in_backward, lasting + max(0, fullest - waits)]


def _stretches(segments: list[tuple[str, fx.Node]]) -> dict[fx.Node, int]:
    """Backward node -> number of the stretch of one layer's nodes it stands in."""
    found: dict[fx.Node, int] = {}
    number, previous = -1, None
    for segment, node in segments:
        if segment != previous:
            number, previous = number + 1, segment
        found[node] = number
    return found


def _readers(value: fx.Node) -> list[fx.Node]:
    """The operations that read a value, through views."""
    found: list[fx.Node] = []
    for user in value.users:
        if user.op == "output":
            continue
        found += _readers(user) if is_cheap_view_or_entry(user) else [user]
    return found
