"""Time against memory: a TrainingGraph and a device in, the plans worth having out, from the fastest to the leanest.

Each point is a plan, the peak it is predicted to have (event by event on the rewritten graph or, quicker, by the planner's sums)
and the time. Peaks fall and times rise along the list, and the choice for a budget is the first that fits: a smaller budget never
takes a plan with a larger peak. The fastest plan is not the one that keeps everything: recomputing a GELU takes less time than
writing and reading it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from wholestep.cost.devices import Device
from wholestep.errors import BudgetTooSmall
from wholestep.graph.bytes import show_bytes
from wholestep.graph.copies import copy_graph
from wholestep.graph.keys import split_key
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.plan.memory import Decision, MemoryPlanner
from wholestep.plan.moves import Room
from wholestep.plan.peak import WORKSPACE, Timeline, timeline
from wholestep.plan.placed import moved, placed, reasons_to_move
from wholestep.plan.problem import Problem, Value, make_problem
from wholestep.plan.seconds import Clock

Apply = Callable[[TrainingGraph, Plan], TrainingGraph]
"""Carries a plan out; it may rewrite the graph it is given."""
TARGETS = 14
CONTEXT_BYTES = 870 << 20
"""What a CUDA context, its kernels and the libraries' handles take, outside the allocator: 614 MiB on an H200 before the first
step, 829 to 850 at step 20 of six kinds of models."""
SLACK = 0.015
"""What the allocator reserves beyond what is allocated at the peak, when its segments grow."""
WORTH = 0.002
"""A point must be leaner than the one before by this share of the memory."""
WORTH_SECONDS = 0.02
"""A plan must be faster than keeping everything by this share of the time to be taken for its speed: predictions are not finer."""
HIDDEN = 0.01
"""A plan that should take at most this share longer than the quickest is as fast: what it moves, the link hides."""
SURELY_HIDDEN = 0.5 * HIDDEN
"""A plan that was predicted at 0.8 % was measured at 1.4 %: copies take a little of the computation's time."""
WORTH_THE_RISK = 0.05
"""The rest of what is granted is taken for so much of the memory."""
FINER, ABOUT = 12, 0.1
"""About a wanted peak, within this share of it, there are so many times as many targets."""
LINK_TAKES = (1.0, 1.2)
"""Times as long as the link should take that plans are made for. Copies that are close behind one another make those that are asked
for sooner wait, which the planner's windows do not see: plans that leave some of the link free are often faster."""
CORRECTIONS = 3
"""Plans that are asked for once more, with what was left over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One plan of the frontier."""

    plan: Plan
    peak_bytes: int
    """Allocated, state included."""
    seconds: float
    breakdown: dict[str, int]
    """At the peak; sums to `peak_bytes`."""
    change: str
    """What is different from the point before."""
    host_bytes: int = 0
    """Of the host's memory and of files: what waits there, and state that lies there."""
    moved_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """`out` and `in`: over the link, per step."""
    waits: float = 0.0
    """Seconds of the step in which the card waits for copies."""


def card_bytes(peak_bytes: int) -> int:
    """What the card shows for an allocated peak: the allocator's slack and the CUDA context added."""
    return int(peak_bytes * (1 + SLACK)) + CONTEXT_BYTES


def peak_for_card(budget_bytes: int) -> int:
    """The allocated peak that a budget of card bytes allows."""
    return int((budget_bytes - CONTEXT_BYTES) / (1 + SLACK))


def frontier(
    graph: TrainingGraph,
    device: Device,
    apply: Apply,
    *,
    targets: int = TARGETS,
    near: int | None = None,
    exact: bool = True,
    room: Room | None = None,
    timed: bool = True,
) -> list[Point]:
    """The plans worth having, from the fastest to the leanest. The graph is left as it is.

    Args:
        targets: how many sizes are looked at between the two.
        near: a peak that somebody asked for: plans about it are looked at more finely.
        exact: carry every plan out and look at it event by event; else the planner's own sums have to do.
        room: where values and state may wait outside of the card; None: nowhere.
        timed: whether the device's speed is known, so that reasons may name milliseconds.
    """
    study = Study(graph, device, apply, room, timed=timed)
    decisions = list(_decisions(study, targets, near, few=exact))
    points = [study.kept, *((study.carried_out if exact else study.summed_up)(one) for one in decisions)]
    if exact and near is not None and room is not None:
        points += _closer(study, list(zip(decisions, points[1:], strict=True)), near)
    if exact and room is not None:
        points += _hidden(study)
    return _worthwhile(study.quickest, points, study.problem)


def fastest(graph: TrainingGraph, device: Device, apply: Apply) -> Plan:
    """The plan that takes the least time: fused results that are quicker to compute than to keep are recomputed."""
    return Study(graph, device, apply).quickest.plan


def leanest(graph: TrainingGraph, device: Device, apply: Apply, room: Room | None = None) -> Point:
    """The plan that takes the least memory."""
    study = Study(graph, device, apply, room)
    return min(study.kept, study.carried_out(study.least), key=lambda point: point.peak_bytes)


class Study:
    """One step on one device: the memory and the time of its plans."""

    def __init__(
        self, graph: TrainingGraph, device: Device, apply: Apply, room: Room | None = None, *, timed: bool = True
    ) -> None:
        self.graph, self.apply, self.clock, self.timed = graph, apply, Clock(device), timed
        self.workspace = WORKSPACE if device.link_bandwidth else 0  # a CPU's libraries hold none
        whole = timeline(apply(copy_graph(graph), Plan()), workspace=self.workspace)
        # what moves, moves between the pieces of layers
        planned = apply(copy_graph(graph), Plan(cut_layers=room is not None))
        self.problem = make_problem(planned, timeline(planned, workspace=self.workspace), self.clock, room)
        moves = self.problem.moves
        slower = [] if moves is None or not moves.moves else [moves.slower(times) for times in LINK_TAKES[1:]]
        self.planner = MemoryPlanner(self.problem)
        others = [MemoryPlanner(dataclasses.replace(self.problem, moves=other)) for other in slower]
        self.planners = [self.planner, *others]
        self.kept = self._point(whole, Plan())
        """Everything kept."""

    @functools.cached_property
    def first(self) -> Decision:
        """The decision of the least time."""
        return self.planner.fastest()

    @functools.cached_property
    def least(self) -> Decision:
        """The decision of the least memory."""
        return self.planner.least()

    @functools.cached_property
    def fastest(self) -> Point:
        return self.carried_out(self.first)

    @property
    def quickest(self) -> Point:
        """The fastest plan; where that is not clearly faster than keeping everything, or takes more memory, everything is kept."""
        clearly = self.fastest.seconds < self.kept.seconds * (1 - WORTH_SECONDS)
        return self.fastest if clearly and self.fastest.peak_bytes <= self.kept.peak_bytes else self.kept

    def carried_out(self, decision: Decision) -> Point:
        """A plan as it really becomes: its graph, event by event."""
        plan = self._plan(decision)
        return self._point(timeline(self.apply(copy_graph(self.graph), plan), workspace=self.workspace), plan, decision)

    def summed_up(self, decision: Decision) -> Point:
        """A plan by how the planner's sums for it differ from those for the fastest; what fills the memory only for the leanest."""
        seconds = self.fastest.seconds + decision.seconds - self.first.seconds
        peak = int(self.fastest.peak_bytes + decision.bytes - self.first.bytes)
        plan = dataclasses.replace(self._plan(decision), predicted_bytes=peak, predicted_seconds=seconds)
        breakdown = self.carried_out(decision).breakdown if decision is self.least else {}
        return Point(plan, peak, seconds, breakdown, "", **moved(self.problem.moves, decision.away))

    def _plan(self, decision: Decision) -> Plan:
        places = placed(self.problem.moves, decision.away)
        return Plan(recompute=decision.again, reasons=_reasons(decision, self.problem, self.timed), **places)

    def _point(self, line: Timeline, plan: Plan, decision: Decision | None = None) -> Point:
        timing = self.clock.step(line.works, line.sizes)
        plan = dataclasses.replace(plan, predicted_bytes=line.peak_bytes, predicted_seconds=timing.seconds)
        moves = moved(self.problem.moves, decision.away) if decision is not None else {}
        point = Point(plan, line.peak_bytes, timing.seconds, line.breakdown(), "", **moves)
        return dataclasses.replace(point, moved_bytes=timing.moved_bytes, waits=timing.waits) if plan.moves else point


def _decisions(study: Study, targets: int, near: int | None, *, few: bool) -> Iterable[Decision]:
    """From the second fastest to the leanest. Which targets there are does not depend on `near`, only which of them are
    looked at: two budgets choose from one and the same list."""
    first, least = study.first, study.least
    seen = {((), ()), first.choice, least.choice}
    most = min(first.bytes, study.quickest.peak_bytes)
    finest = (most - least.bytes) / (targets * FINER)
    low, high = (
        (0.0, 0.0) if near is None else (near - 2 * finest, near) if few else (near * (1 - ABOUT), near * (1 + ABOUT))
    )
    for step in range(1, targets * FINER):
        target = most - step * finest
        if step % FINER == 0 or low < target <= high:
            for planner in study.planners:
                decision = planner.within(target)
                if decision is not None and decision.choice not in seen:
                    seen.add(decision.choice)
                    yield decision
    yield least


def _closer(study: Study, known: list[tuple[Decision, Point]], near: int) -> list[Point]:
    """Plans that take what the fastest one that fits leaves over. The planner's sums differ from the peak of the rewritten graph;
    what leaves the card is cut finely enough, and costs enough, for that to matter."""
    found: list[Point] = []
    for _ in range(CORRECTIONS):
        fitting = [pair for pair in known if pair[1].peak_bytes <= near]
        if not fitting:
            break
        decision, point = min(fitting, key=lambda pair: pair[1].seconds)
        again = study.planner.within(decision.bytes + near - point.peak_bytes)
        if again is None or any(again.choice == one.choice for one, _ in known):
            break
        known.append((again, study.carried_out(again)))
        found.append(known[-1][1])
    return found


def _hidden(study: Study) -> list[Point]:
    """The leanest plans that are as fast as the quickest. The planner's sums differ from the seconds of the rewritten graph, so it
    is asked anew with what that was too much, or left over."""
    found: dict[Any, Point] = {}
    for planner, share in itertools.product(study.planners, (SURELY_HIDDEN, HIDDEN)):
        most = (1 + share) * study.quickest.seconds
        allowed = most - study.kept.seconds
        for _ in range(CORRECTIONS):
            decision = planner.least_in(allowed)
            if decision is None or decision.choice in found:
                break
            point = found[decision.choice] = study.carried_out(decision)
            allowed = decision.seconds + (most - point.seconds) - 1e-4 * most
    return list(found.values())


def _worthwhile(quickest: Point, others: Sequence[Point], problem: Problem) -> list[Point]:
    """The quickest, then strictly leaner and not faster each; a point that another beats in both is dropped. The leanest of
    all is always there."""
    found, points = [quickest], [quickest, *(_not_faster(point, quickest) for point in others)]
    for point in sorted(points, key=lambda p: (p.seconds, p.peak_bytes)):
        if point.peak_bytes < found[-1].peak_bytes * (1 - WORTH):
            found.append(point)
    leanest = min(points, key=lambda p: (p.peak_bytes, not p.breakdown))  # of two, the one that is known in detail
    if leanest is not found[-1] and len(found) > 1:
        found[-1] = leanest
    elif leanest.peak_bytes < found[-1].peak_bytes:
        found.append(leanest)
    return [_told(point, found[i - 1] if i else None, problem) for i, point in enumerate(found)]


def _not_faster(point: Point, quickest: Point) -> Point:
    """Faster than the quickest plan by less than predictions can tell: as fast."""
    seconds = max(point.seconds, quickest.seconds)
    return dataclasses.replace(point, seconds=seconds, plan=dataclasses.replace(point.plan, predicted_seconds=seconds))


def _told(point: Point, before: Point | None, problem: Problem) -> Point:
    if before is None:
        return dataclasses.replace(
            point, change="everything kept" if not point.plan.recompute else _names(point, problem, Plan())
        )
    more = _names(point, problem, before.plan)
    return dataclasses.replace(point, change=f"{more}: -{show_bytes(before.peak_bytes - point.peak_bytes)}")


def _names(point: Point, problem: Problem, before: Plan) -> str:
    """The largest values that are newly recomputed or moved, in words."""
    plan = point.plan
    again = [problem.values[key] for key in plan.recompute if key not in before.recompute and problem.values[key].near]
    away = [
        problem.values[split_key(key)[0]] for key in (*plan.host, *plan.file) if key not in (*before.host, *before.file)
    ]
    told = [f"{word} {_few(new)}" for word, new in (("recompute", again), ("move", away)) if new]
    state = [pattern for pattern in plan.state if pattern not in before.state]
    told += [f"state of {len(state)} kinds of parameters on the host"] if state else []
    return "; ".join(told) or "recompute the same from less"


def _few(values: Sequence[Value]) -> str:
    largest = [short(value.key) for value in sorted(values, key=lambda v: -v.bytes)[:3]]
    rest = len(values) - len(largest)
    return ", ".join(largest) + (f" and {rest} more" if rest > 0 else "")


def short(key: str) -> str:
    """`model.layers.*.mlp.up_proj/mm` -> `mlp.up_proj mm`."""
    path, _, name = key.partition("/")
    return f"{path.rpartition('*.')[2] or path} {name}".strip()


def _reasons(decision: Decision, problem: Problem, timed: bool) -> dict[str, str]:
    """Why each value is recomputed, for those that the backward pass reads."""
    found: dict[str, str] = {}
    for key in decision.again:
        value = problem.values[key]
        if not (value.near or value.far):
            continue
        unit = problem.units[value.unit]
        sources = ", ".join(sorted(short(s) for s in value.made_from)[:3]) or "parameters and the batch"
        cost = f" in {1e3 * unit.seconds:.2f} ms" if timed else ""
        found[key] = f"frees {show_bytes(value.bytes)}; recomputed from {sources}{cost}"
    return found | reasons_to_move(problem.moves, decision.away)


def too_small(least: Point, smallest_bytes: int, budget_bytes: int) -> BudgetTooSmall:
    """The error for a budget that not even the leanest plan fits in."""
    smallest = round_up(smallest_bytes)
    takes = f"{show_bytes(smallest)} of the card{_largest(least)}"
    return BudgetTooSmall(
        f"memory={show_bytes(budget_bytes)} is not enough: the leanest plan takes {takes}",
        smallest_bytes=smallest,
        hint=f"ask for {show_bytes(smallest)}, or make micro-batches with accumulate=2",
    )


def round_up(count: int) -> int:
    """To what `show_bytes` can print without losing anything, so that the printed number can be asked for."""
    for size in (2**30, 2**20, 2**10):
        if count >= 99.95 * size:
            return -(-count // size) * size
        if count >= size:
            return -(-count * 10 // size) * size // 10
    return count


def _largest(point: Point) -> str:
    parts = sorted(point.breakdown.items(), key=lambda item: -item[1])[:3]
    return f" ({', '.join(f'{name} {show_bytes(size)}' for name, size in parts)})" if parts else ""
