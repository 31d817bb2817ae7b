"""What could leave the card: a TrainingGraph, its Timeline and a clock in; moves with the bytes they free, and the windows of the
link out.

A move takes one value of some of the equal layers, the first ones first, or the optimizer state of parameters of one name, to the
host. It frees bytes in the stretches of `problem.py` in which the value is gone (by the places of `passes/trips.py`, so that the
planner counts what the pass does), and puts bytes on the link. The forward pass and the rest are cut into windows: what leaves
from one of them on should be gone when the forward pass is over, and what is asked back until one of them should have had the time
since then; what is more makes the step wait.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import fx

from wholestep.graph.keys import joined_key, layer_ranks, value_keys
from wholestep.graph.layers import layer_pattern, layers_of
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, phase_of
from wholestep.ops import IN_PLACE
from wholestep.passes.stream_state import AT_ONCE, MOST_BYTES
from wholestep.passes.trips import Trip, Trips
from wholestep.plan.peak import Timeline
from wholestep.plan.seconds import Clock

WINDOWS = 8
"""Each of the forward pass and of the rest."""
SHARES = 4
"""Into which the equal layers are cut: a quarter, a half, three quarters or all of them leave."""
WORTH_MOVING = 2e-3
"""Values smaller than this share of what waits for the backward pass, all layers together, do not leave."""
STATE_IN_FLIGHT = AT_ONCE * MOST_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Where values may wait."""

    host_bytes: int
    files: bool = False
    """Whether what does not fit into the host's memory may go to files."""


@dataclasses.dataclass(slots=True)
class Move:
    """One share of a value's layers, or the state of some parameters."""

    name: str
    """As the plan writes it: a key with its layers, or a pattern of parameters."""
    value: str | None
    """Key of the value; None for state."""
    after: int | None = None
    """Number of the move that has to be made too: the share of the layers before."""
    host_bytes: int = 0
    freed: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    """Stretch -> bytes."""
    out: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    """Window -> bytes that begin to leave there."""
    back: dict[int, int] = dataclasses.field(default_factory=lambda: defaultdict(int))
    """Window -> bytes that have to be back there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """All of them."""

    moves: Sequence[Move]
    windows: Sequence[float]
    """Seconds of every window: those of the forward pass, then of the rest, then of updates that stand together at the end."""
    seconds_out: float
    """Per byte that leaves."""
    seconds_in: float
    seconds_shared: float
    """Which a byte that leaves while others come takes from them."""
    room: Room
    in_flight: Sequence[int] = ()
    """Stretches in which parts of the state are on the way to their updates, where any lies on the host."""

    def spans(self) -> Iterator[Span]:
        """Of the forward pass from every window to the end, where all is gone that leaves; of the rest from its beginning to every
        window, until when only so much can have come. State comes and goes in the window of its update."""
        for number in range(WINDOWS):
            until = range(WINDOWS, WINDOWS + number + 1)
            yield Span(range(number, WINDOWS), range(number + 1, WINDOWS), "values")
            yield Span(until, until[:-1], "values")
            yield Span(until, until, "both")
        for number in range(WINDOWS, 2 * WINDOWS + 1):
            yield Span(range(number, number + 1), range(number, number + 1), "state")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Windows whose copies have a time in common."""

    moved: range
    """Those in which they begin to leave, or have to be back."""
    time: range
    """Those whose seconds they surely have."""
    counts: Literal["values", "state", "both"]


def make_moves(
    graph: TrainingGraph, line: Timeline, clock: Clock, stretches: Mapping[fx.Node, int], room: Room
) -> Moves:
    """What could leave this step on the clock's device."""
    return _Builder(graph, line, clock, stretches).build(room)


class _Builder:
    def __init__(self, graph: TrainingGraph, line: Timeline, clock: Clock, stretches: Mapping[fx.Node, int]) -> None:
        self.graph, self.line, self.clock = graph, line, clock
        self.trips = Trips(graph)
        self.position = self.trips.position
        places = sorted((self.position[node], number) for node, number in stretches.items())
        self.starts = [place for place, _ in places]
        self.numbers = [number for _, number in places]
        self.end_of_forward = max(stretches.values(), default=-1) + 1
        self.at_end = self._end()
        self._windows()

    def _windows(self) -> None:
        """Equal seconds of the forward pass, and of the rest; one for updates that stand together at the end."""
        seconds = {"forward": 0.0, "rest": 0.0, "end": 0.0}
        ends: dict[str, list[tuple[int, float]]] = {"forward": [], "rest": [], "end": []}
        for work, took in self.clock.each(self.line.works, self.line.sizes):
            place = self.position[work.node]
            late = self.at_end is not None and place >= self.at_end
            span = "forward" if phase_of(work.node) == "forward" else "end" if late else "rest"
            seconds[span] += took
            ends[span].append((place, seconds[span]))
        self.ends, self.whole = ends, seconds
        self.windows = [seconds[span] / WINDOWS for span in ("forward", "rest") for _ in range(WINDOWS)]
        self.windows.append(seconds["end"])

    def _end(self) -> int | None:
        """Where updates begin, if all of them stand behind the backward pass."""
        updates = [self.position[node] for node in self.graph.operations() if node.target in IN_PLACE]
        backward = [self.position[node] for node in self.graph.operations() if phase_of(node) == "backward"]
        if not updates or not backward or min(updates) < backward[-1]:
            return None
        return backward[-1] + 1

    def _window(self, node: fx.Node, *, forward: bool) -> int:
        if not forward and self.at_end is not None and self.position[node] >= self.at_end:
            return 2 * WINDOWS
        ends = self.ends["forward" if forward else "rest"]
        at = bisect.bisect_left(ends, (self.position[node], 0.0))
        passed = ends[min(at, len(ends) - 1)][1] if ends else 0.0
        share = min(WINDOWS - 1, int(WINDOWS * passed / (self.whole["forward" if forward else "rest"] or 1.0)))
        return share if forward else WINDOWS + share

    def build(self, room: Room) -> Moves:
        alone, both = self.clock.device.link_alone, self.clock.device.link_both
        if not alone:  # the host's memory is the device's own
            return Moves((), (), 0.0, 0.0, 0.0, room)
        moves = [*self._values(), *self._states()]
        return Moves(
            moves, self.windows, 1 / alone, 1 / alone, (1 / both) * (1 - both / alone), room, self._in_flight()
        )

    def _in_flight(self) -> list[int]:
        """From the station before the first update on; behind the backward pass, where they all stand there."""
        updates = [self.position[node] for node in self.graph.operations() if node.target in IN_PLACE]
        stations = [place for place in self.trips.places if place <= min(updates, default=0)]
        first = self.at_end if self.at_end is not None else stations[-2] if len(stations) > 1 else 0
        ends = dict(zip(self.numbers, self.starts, strict=True))  # the last node of every stretch
        return [number for number, end in ends.items() if end >= first]

    def _values(self) -> list[Move]:
        keys, layers = value_keys(self.graph), layers_of(self.graph.graph.nodes)
        ranks = layer_ranks(keys, layers)
        trips: dict[str, dict[int, list[tuple[fx.Node, Trip]]]] = defaultdict(lambda: defaultdict(list))
        for node, key in keys.items():
            trip = self.trips.of(node)
            if trip is not None:
                trips[key][ranks[key][layers.get(node)]].append((node, trip))
        waits = sum(
            size
            for s, size in self.line.sizes.items()
            if phase_of(self.line.works[self.line.last[s]].node) != "forward"
        )
        found: list[Move] = []
        for key, by_rank in trips.items():
            whole = sum(tensor_bytes(node.meta["val"]) for pairs in by_rank.values() for node, _ in pairs)
            if whole < WORTH_MOVING * waits:
                continue
            found += self._shares(key, by_rank, len(ranks[key]), len(found))
        return found

    def _shares(
        self, key: str, by_rank: Mapping[int, list[tuple[fx.Node, Trip]]], layers: int, number: int
    ) -> list[Move]:
        """The first quarter of the layers, the second, ...; as many as there are layers to tell apart."""
        able = sorted(by_rank)
        shares = min(SHARES, len(able))
        found: list[Move] = []
        for share in range(shares):
            mine = able[len(able) * share // shares : len(able) * (share + 1) // shares]
            reach = layers if share == shares - 1 else mine[-1] + 1
            move = Move(joined_key(key, range(reach), layers), key, after=number + share - 1 if share else None)
            for rank in mine:
                for node, trip in by_rank[rank]:
                    self._add(move, node, trip)
            found.append(move)
        return found

    def _add(self, move: Move, node: fx.Node, trip: Trip) -> None:
        size = tensor_bytes(node.meta["val"])
        move.host_bytes += size
        at = bisect.bisect_left(self.starts, self.position[trip.back])
        returns = self.numbers[at] if at < len(self.numbers) else self.end_of_forward
        for stretch in (*range(returns), self.end_of_forward):
            move.freed[stretch] += size
        move.out[self._window(trip.out, forward=True)] += size
        move.back[self._window(trip.back_done, forward=False)] += size

    def _states(self) -> list[Move]:
        """Optimizer state by the names of parameters, a share of the layers at a time."""
        if not any(node.target in IN_PLACE for node in self.graph.operations()):
            return []
        found: dict[str, dict[str, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
        for entry, node in zip(self.graph.inputs, self.graph.placeholders, strict=True):
            if entry.role is Role.STATE and node.meta["val"].dim() and len(node.users) == 1:
                parameter = entry.name.rpartition("/")[0]
                found[layer_pattern(parameter)][parameter].append(node)
        moves: list[Move] = []
        for pattern, parameters in found.items():
            names = list(parameters)
            shares = min(SHARES, len(names))
            for share in range(shares):
                mine = names[len(names) * share // shares : len(names) * (share + 1) // shares]
                moves.append(Move(pattern if shares == 1 else ",".join(mine), None))
                for name in mine:
                    self._add_state(moves[-1], parameters[name])
        return [move for move in moves if move.host_bytes >= MOST_BYTES / 4]

    def _add_state(self, move: Move, states: Sequence[fx.Node]) -> None:
        """What is updated in one piece is on the card as a whole then, so it frees nothing there if it is more than the parts that
        are in flight anyway."""
        size = sum(tensor_bytes(node.meta["val"]) for node in states)
        move.host_bytes += size
        update = next(iter(states[0].users))
        window = self._window(update, forward=False)
        move.out[window] += size
        move.back[window] += size
        at = min(bisect.bisect_left(self.starts, self.position[update]), len(self.numbers) - 1)
        for stretch in range(self.end_of_forward + 1):
            if size <= STATE_IN_FLIGHT or stretch != self.numbers[at]:
                move.freed[stretch] += size
