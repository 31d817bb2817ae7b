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
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import fx

from wholestep.graph.keys import joined_key, layer_ranks, value_keys
from wholestep.graph.layers import layer_pattern, layers_of
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, phase_of
from wholestep.ops import IN_PLACE
from wholestep.passes.stream_state import AT_ONCE, MOST_BYTES, round_trips
from wholestep.passes.trips import Trip, Trips
from wholestep.plan.peak import Timeline
from wholestep.plan.seconds import Clock

WINDOWS = 16
"""Of the forward pass; and of the rest, where no updates divide it."""
SHARES = 4
"""Into which the equal layers are cut: a quarter, a half, three quarters or all of them leave."""
WORTH_MOVING = 2e-3
"""Values smaller than this share of what waits for the backward pass, all layers together, do not leave."""
STATE_IN_FLIGHT = AT_ONCE * MOST_BYTES
"""Of state that all updates stand at the end of the step for: what comes and what leaves."""


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
    """Seconds of every window: those of the forward pass; those of the rest, each until a round of updates where there are several;
    what follows the last of them, or the updates that stand together at the end."""
    seconds_out: float
    """Per byte that leaves."""
    seconds_in: float
    seconds_shared: float
    """Which a byte that leaves while others come takes from them."""
    room: Room
    by_rounds: bool = False
    """Whether windows of the rest lie between rounds of updates."""
    window_of: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Stretch -> the window in which most of it runs: what is recomputed there gives the link more time."""
    in_flight: Sequence[int] = ()
    """Stretches in which parts of the state are on the way to their updates, where any lies on the host."""

    def slower(self, times: float) -> Moves:
        """The same over a link that takes so many times as long."""
        out, back, shared = (times * seconds for seconds in (self.seconds_out, self.seconds_in, self.seconds_shared))
        return dataclasses.replace(self, seconds_out=out, seconds_in=back, seconds_shared=shared)

    def spans(self) -> Iterator[Span]:
        """Of the forward pass from every window to the end, where all is gone that leaves; of the rest from its beginning to every
        window, until when only so much can have come. State comes in the window before its update and goes in the next."""
        for number in range(WINDOWS):
            yield Span(range(number, WINDOWS), range(number + 1, WINDOWS), "values")
        for number in range(WINDOWS, len(self.windows) - 1):
            until = range(WINDOWS, number + 1)
            yield Span(until, until if self.by_rounds else until[:-1], "values")
            yield Span(until, until, "both")
        if any(move.value is None for move in self.moves):
            for number in range(WINDOWS, len(self.windows)):
                yield Span(range(number, number + 1), range(number, number + 1), "both" if self.by_rounds else "state")


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
        nodes = list(graph.graph.nodes)
        trips = [
            (self.position[comes], updates, self.position[leaves]) for comes, updates, leaves in round_trips(nodes)
        ]
        self.rounds = trips if len(trips) > 1 else []
        """(where its state begins to come, its updates, where it has left), where there are several."""
        self.at_end = self._end()
        self._windows()

    def _windows(self) -> None:
        """Equal seconds of the forward pass; of the rest what lies between rounds of updates, or equal seconds as well."""
        ends: dict[str, list[tuple[int, float]]] = {"forward": [], "rest": [], "end": []}
        for work, took in self.clock.each(self.line.works, self.line.sizes):
            if (span := self._span(place := self.position[work.node])) is not None:
                ends[span].append((place, took + (ends[span][-1][1] if ends[span] else 0.0)))
        self.ends = ends
        """Of each span: (place, seconds until then)."""
        self.borders = [self.position[updates[0]] for _, updates, _ in self.rounds]
        """Places at which the next window of the rest begins."""
        whole = {span: entries[-1][1] if entries else 0.0 for span, entries in ends.items()}
        rest = [whole["rest"] / WINDOWS] * WINDOWS + [whole["end"]]
        if self.rounds:
            passed = [self._passed(border, "rest") for border in self.borders]
            rest = [until - since for since, until in itertools.pairwise([0.0, *passed, whole["rest"]])]
        self.windows = [whole["forward"] / WINDOWS] * WINDOWS + rest

    def _passed(self, place: int, span: str) -> float:
        """Seconds of a span before a place."""
        at = bisect.bisect_left(self.ends[span], (place, 0.0))
        return self.ends[span][at - 1][1] if at else 0.0

    def _span(self, place: int) -> str | None:
        """Of a place; None in the loss: what leaves is gone by then, and nothing comes back before it is over."""
        turn, places = self.trips.turn, self.trips.places
        if not places or place < places[turn]:
            return "forward"
        if turn + 1 < len(places) and place < places[turn + 1]:
            return None
        return "end" if self.at_end is not None and place >= self.at_end else "rest"

    def _end(self) -> int | None:
        """Where updates begin, if all of them stand behind the backward pass."""
        updates = [self.position[node] for node in self.graph.operations() if node.target in IN_PLACE]
        backward = [self.position[node] for node in self.graph.operations() if phase_of(node) == "backward"]
        if not updates or not backward or min(updates) < backward[-1]:
            return None
        return backward[-1] + 1

    def _window(self, place: int, span: str) -> int:
        if span == "end":
            return len(self.windows) - 1
        if span == "rest" and self.rounds:
            return WINDOWS + bisect.bisect_right(self.borders, place)
        whole = self.ends[span][-1][1] if self.ends[span] else 1.0
        share = min(WINDOWS - 1, int(WINDOWS * self._passed(place, span) / (whole or 1.0)))
        return share if span == "forward" else WINDOWS + share

    def build(self, room: Room) -> Moves:
        alone, both = self.clock.device.link_alone, self.clock.device.link_both
        if not alone:  # the host's memory is the device's own
            return Moves((), (), 0.0, 0.0, 0.0, room)
        moves = [*self._values(), *self._states()]
        return Moves(
            moves,
            self.windows,
            1 / alone,
            1 / alone,
            (1 / both) * (1 - both / alone),
            room,
            bool(self.rounds),
            self._window_of(),
            self._in_flight(),
        )

    def _window_of(self) -> dict[int, int]:
        places: dict[int, list[int]] = defaultdict(list)
        for number, start in zip(self.numbers, self.starts, strict=True):
            places[number].append(start)
        middles = {number: starts[len(starts) // 2] for number, starts in places.items()}
        return {
            n: self._window(place, span)
            for n, place in middles.items()
            if (span := self._span(place)) in ("rest", "end")
        }

    def _in_flight(self) -> list[int]:
        """Stretches behind the backward pass, where all updates stand there."""
        ends = dict(zip(self.numbers, self.starts, strict=True))  # the last node of every stretch
        return [number for number, end in ends.items() if self.at_end is not None and end >= self.at_end]

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
        move.out[self._window(self.position[trip.out], "forward")] += size
        asked = self._window(self.position[trip.back_done], "rest")
        move.back[max(WINDOWS, asked - 1) if self.rounds else asked] += size

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
        """It is on the card from where it begins to come until it has left. At the end of the step it comes in portions: what is
        updated in one piece frees nothing there if it is more than the parts that are in flight anyway."""
        size = sum(tensor_bytes(node.meta["val"]) for node in states)
        move.host_bytes += size
        update = next(iter(states[0].users))
        here: set[int] = set()
        number = next((number for number, (_, updates, _) in enumerate(self.rounds) if update in updates), None)
        if number is not None:
            comes, _, leaves = self.rounds[number]
            first, last = (bisect.bisect_left(self.starts, place) for place in (comes, leaves))
            here = set(self.numbers[first:last])
            move.back[WINDOWS + number] += size
            move.out[WINDOWS + number + 1] += size
        else:
            window = self._window(self.position[update], "rest" if self.at_end is None else "end")
            move.out[window] += size
            move.back[window] += size
            at = min(bisect.bisect_left(self.starts, self.position[update]), len(self.numbers) - 1)
            here = {self.numbers[at]} if size > STATE_IN_FLIGHT else set()
        for stretch in range(self.end_of_forward + 1):
            if stretch not in here:
                move.freed[stretch] += size
