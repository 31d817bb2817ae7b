"""`compile(memory=...)`: a budget in bytes of the card in, the fastest plan that stays within it out, or an error that says what
would. Without one: the plan that takes the least time. `runtime/enforce.py` makes the step keep to it.

The frontier of plans comes from the graph alone (`plan/`). The plan chosen from it is then checked against what the step
really takes: on the device, by compiling its regions and running each distinct one on stand-ins (`lower/footprint`), which
needs a layer's memory and not the step's. Where the two differ, all predictions are corrected by that and the choice is made
again, until the fastest plan that really fits is found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import torch

from wholestep import compat
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.cost.measure import this_device
from wholestep.errors import BadOption, CompilerMissing, one_line
from wholestep.graph.bytes import parse_bytes, show_bytes
from wholestep.graph.copies import copy_graph
from wholestep.graph.counted import counted
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.lower import give_back, tune_calls
from wholestep.lower.footprint.predict import predict_profile
from wholestep.lower.footprint.regions import predict_compiled
from wholestep.lower.footprint.scratch import Scratch, measure_scratch
from wholestep.passes.pipeline import Pipeline
from wholestep.plan.frontier import (
    CONTEXT_BYTES,
    HIDDEN,
    SLACK,
    SURELY_HIDDEN,
    WORTH_THE_RISK,
    Point,
    fastest,
    frontier,
    round_up,
    too_small,
)
from wholestep.plan.moves import Room
from wholestep.plan.rebatch import at_traced_sizes, sized_by_data

LIBRARY_BYTES = 72 << 20
"""cuBLAS's workspaces, taken from the allocator at their first use and kept: 66 to 68 MiB were measured."""
STILL_TO_LOAD = 256 << 20
"""By which the context grows while steps are compiled and checked: from 614 to at most 840 MiB were seen."""
AUTO_MARGIN = 0.04
"""Of the card, left free by `memory="auto"`."""
SLACK_OF_FIXED_SEGMENTS = 0.09
"""Measured on the three large models: what the allocator reserves beyond the peak when its segments do not grow."""
TARGETS = 8
MOST_TRIES = 4
"""Plans that are compiled before the best of them is taken."""
WORTH_TRYING = 0.02
"""Beside a plan that fits, another is compiled only if it should be faster by this share: compiling takes as long as all else."""
MISSED_BY = 0.02
"""Plans that are compiled should fit with this to spare: predictions are off by as much, and a miss is compiled in vain."""
UNMEASURED = 0.03
"""What the leanest plan is expected to take beyond that, where memory did not suffice to measure it: up to 0.02 was seen."""


@dataclasses.dataclass(slots=True)
class Budget:
    """What a step may take, and what stands beside it."""

    card_bytes: int
    context_bytes: int
    """Outside the allocator."""
    others_bytes: int
    """Allocated by this process, not part of the step."""
    slack: float
    said: str
    """For people."""
    enforced: bool = False
    """Whether the allocator can be held to it: where its segments grow, it can give back what lies between live tensors."""

    def takes(self, peak_bytes: float) -> int:
        """Card bytes of a step with this allocated peak."""
        return int((peak_bytes + self.others_bytes) * (1 + self.slack)) + self.context_bytes

    def peak(self) -> int:
        """The allocated peak that takes exactly the budget."""
        return int((self.card_bytes - self.context_bytes) / (1 + self.slack)) - self.others_bytes


def make_budget(memory: str | int, subject: Subject, batch: Any = ()) -> Budget:
    """The budget as asked, or what is free on the card less a margin."""
    on_gpu = subject.device.type == "cuda"
    context = context_bytes(subject.device) if on_gpu else 0
    others = _others(subject, batch) + _holes(subject.device) + LIBRARY_BYTES if on_gpu else 0
    grows = on_gpu and compat.grow_segments()
    slack = (SLACK if grows else SLACK_OF_FIXED_SEGMENTS) if on_gpu else 0.0
    if memory != "auto":
        wanted = parse_bytes(memory)
        return Budget(wanted, context, others, slack, f"{show_bytes(wanted)}", grows)
    if not on_gpu:
        raise BadOption("memory='auto' on a CPU", hint="name an amount, such as memory='8GiB', or leave it out")
    free, total = torch.cuda.mem_get_info(subject.device)
    margin = int(AUTO_MARGIN * total)
    wanted = free + torch.cuda.memory_reserved(subject.device) + context - margin
    said = f"{show_bytes(wanted)} (what is free, less a margin of {show_bytes(margin)})"
    return Budget(wanted, context, others, slack, said, grows)


def context_bytes(device: torch.device) -> int:
    """What this process holds of the card beyond the allocator, or will when its kernels are loaded.

    It may be gigabytes: kernels that spill registers make the driver keep memory for every thread that could run. Where the
    driver does not tell for this process alone, others on the card would be counted too; hence the limit there.
    """
    return max(_context_now(device), CONTEXT_BYTES)


def _context_now(device: torch.device) -> int:
    mine, reserved = compat.bytes_on_card(device), torch.cuda.memory_reserved(device)
    if mine is not None:
        return mine - reserved
    free, total = torch.cuda.mem_get_info(device)
    found = total - free - reserved
    return found if found < 3 * CONTEXT_BYTES else CONTEXT_BYTES


def _others(subject: Subject, batch: Any) -> int:
    """Allocated bytes that are neither parameters, buffers, optimizer state nor the batch."""
    tensors = [*subject.parameters.values(), *subject.buffers.values(), *batch]
    if subject.optimizer is not None:
        tensors += [
            t for state in subject.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
        ]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.is_cuda}
    return max(0, torch.cuda.memory_allocated(subject.device) - sum(storages.values()))


def _holes(device: torch.device) -> int:
    """What the allocator holds and cannot give back: the free parts of segments in which something lives.

    Large where training began before the budget was asked for, in segments that do not grow.
    """
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Fitting:
    """Plans one captured step for a budget and carries the plan out."""

    def __init__(
        self, budget: Budget, pipeline: Pipeline, backend: str, device: torch.device, code: list[Any] | None = None,
        room: Room | None = None,
    ) -> None:  # fmt: skip
        """`code`: where compiled regions are held until the plan that was chosen is lowered."""
        self.budget, self.pipeline, self.backend, self.room = budget, pipeline, backend, room
        self.code: list[Any] = [] if code is None else code
        self.compiled = backend == "inductor"
        """Whether a plan has to be compiled to be measured; else it costs nothing to try."""
        self.ratio, self.offset = 1.0, 0.0
        """By which predictions were off, measured on the last plan."""
        self.place, self.device = device, this_device(device.type)
        self.prepared: TrainingGraph | None = None
        self.points: list[Point] = []
        self.state_bytes = 0
        self.scratch: dict[str, Scratch] = {}
        """What calls of the plans so far were measured to take."""
        self.tries = 0
        """Plans that were compiled to know what they really take."""
        self.told: list[Note] = []
        """About the latest plan."""

    def plan(self, prepared: Capture) -> Plan:
        """The fastest that fits; raises BudgetTooSmall with the least that would do."""
        self.state_bytes, self.prepared = state_bytes(prepared.update), prepared.graph
        self.points = self._frontier(prepared.graph)
        began = time.perf_counter()
        best = self._fit()
        tried = f"memory: {self.tries} of {len(self.points)} plans tried in {time.perf_counter() - began:.1f} s"
        self.told = [Note("memory", tried), self._told(best)]
        return best

    def _takes(self, peak_bytes: float) -> int:
        return self.budget.takes(peak_bytes + self.state_bytes)

    def _frontier(self, graph: TrainingGraph) -> list[Point]:
        try:
            peak = self.budget.peak() - self.state_bytes
            sized = at_traced_sizes(graph) if sized_by_data(graph) else graph
            # sums know where copies stand, not how they wait for one another
            exact = self.room is not None
            return frontier(
                sized, self.device, self.pipeline.carry_out, targets=TARGETS, near=peak, exact=exact, room=self.room
            )
        except ValueError as error:
            raise BadOption(f"memory= with symbolic sizes: {error}", hint="use dynamic=False") from error

    def _carried_out(self, index: int) -> TrainingGraph:
        assert self.prepared is not None
        return self.pipeline.carry_out(copy_graph(self.prepared), self.points[index].plan)

    def _expected(self, index: int) -> float:
        """The peak of a plan by what was learnt from the last one. Some of what compiled code takes beside its tensors is the same
        in lean plans as in others, so of the two ways to correct a prediction the one counts that gives more."""
        peak = self.points[index].peak_bytes
        return (1 + MISSED_BY) * max(self.ratio * peak, peak + self.offset) if self.compiled else self.ratio * peak

    def _choice(self, failed: set[int]) -> int:
        """The fastest point that should fit, the leanest when none does. What takes more than one that failed would fail too."""
        for index in range(max(failed, default=-1) + 1, len(self.points)):
            if self._takes(self._expected(index)) <= self.budget.card_bytes:
                return index if len(failed) < 2 or not self.compiled else (index + len(self.points) - 1) // 2
        return len(self.points) - 1

    def _fit(self) -> Plan:
        """Measure, correct, choose again: ends at a plan that was measured to fit, when no much faster one should fit as well."""
        measured: dict[int, int] = {}
        index = self._choice(set())
        while True:
            self._measure(index, measured)
            self.tries = len(measured)
            failed = {i for i, peak in measured.items() if self._takes(peak) > self.budget.card_bytes}
            fits = sorted(set(measured) - failed)
            following = self._choice(failed)
            if (
                following in measured
                or len(measured) >= MOST_TRIES
                or (fits and not self._much_faster(following, fits[0]))
            ):
                following = fits[0] if fits else len(self.points) - 1
                if following in measured:
                    break
            index = following
        if not fits:  # the planner's sums may name the wrong plan for the leanest
            for index in self._really_lean(set(range(len(self.points))) - set(measured)):
                self._measure(index, measured)
            fits = sorted(i for i, peak in measured.items() if self._takes(peak) <= self.budget.card_bytes)
        if not fits:
            least = min(measured, key=measured.__getitem__)
            raise too_small(self.points[least], self._takes(measured[least]), self.budget.card_bytes)
        predicted = measured[fits[0]] + self.state_bytes
        return dataclasses.replace(
            self.points[fits[0]].plan, budget_bytes=self.budget.card_bytes, predicted_bytes=predicted
        )

    def _really_lean(self, others: set[int]) -> list[int]:
        """Of plans that were not measured, by their rewritten graphs: the fastest that should fit, and the leanest."""
        peaks = {index: self._rewritten_peak(self._carried_out(index)) for index in sorted(others)}
        fitting = [index for index, peak in peaks.items() if self._takes(peak) <= self.budget.card_bytes]
        return list(dict.fromkeys([*fitting[:1], *sorted(peaks, key=peaks.__getitem__)[:1]]))

    def _rewritten_peak(self, graph: TrainingGraph) -> int:
        return predict_profile(at_traced_sizes(graph) if sized_by_data(graph) else graph).peak_bytes

    def _measure(self, index: int, measured: dict[int, int]) -> None:
        predicted = self.points[index].peak_bytes
        with contextlib.suppress(torch.OutOfMemoryError):
            measured[index] = self.exact_peak(self._carried_out(index))
            self.ratio, self.offset = measured[index] / predicted, measured[index] - predicted
        if index not in measured:  # one of its regions alone takes more than the budget leaves
            measured[index] = self._unmeasured(index)
            give_back()

    def _unmeasured(self, index: int) -> int:
        """The peak of a plan that memory did not suffice to measure: more than there is; of the leanest, which is the last hope,
        what is expected."""
        expected = int(self._expected(index))
        if index == len(self.points) - 1:
            return int((1 + UNMEASURED) * expected)
        return max(expected, self.budget.peak() - self.state_bytes + 1)

    def _much_faster(self, one: int, other: int) -> bool:
        """Whether a plan is worth being compiled where another is known to fit."""
        share = WORTH_TRYING if self.compiled else 0.0
        return one < other and self.points[one].seconds <= (1 - share) * self.points[other].seconds

    def exact_peak(self, graph: TrainingGraph) -> int:
        """Allocated bytes at the peak, by what was really measured of its parts."""
        if self.place.type == "cuda" and limit_now(self.budget, self.place) <= torch.cuda.memory_allocated(self.place):
            raise torch.OutOfMemoryError(
                "more is allocated already than the budget allows"
            )  # so nothing is compiled in vain
        tune_calls(graph)  # which kernels run decides what they take
        if sized_by_data(graph):  # compiled code cannot be asked for the most it may take
            return predict_profile(at_traced_sizes(graph)).peak_bytes
        if self.backend == "inductor":
            with contextlib.suppress(CompilerMissing):
                return predict_compiled(graph, code=self.code, strict=True).peak_bytes
        return predict_profile(graph, scratch=measure_scratch(graph, self.scratch)).peak_bytes

    def _told(self, plan: Plan) -> Note:
        takes = self.budget.takes(plan.predicted_bytes or 0)
        first = f"memory: {self.budget.said} of the card allowed, {show_bytes(round_up(takes))} predicted"
        fastest = self.points[0].seconds
        if plan.moves:
            point = next(
                point for point in self.points if (point.plan.host, point.plan.state) == (plan.host, plan.state)
            )
            first += f"; {show_bytes(point.host_bytes)} wait on the host, {show_bytes(point.moved_bytes['out'])} leave per step"
        if not plan.recompute:
            return Note("memory", f"{first}; nothing is recomputed")
        cost = 100 * ((plan.predicted_seconds or fastest) / fastest - 1)
        values = counted(len(plan.recompute), "value is", "values are")
        again = f"{values} recomputed in the backward pass, about +{cost:.1f} % time"
        return Note("memory", f"{first}; {again}")


class ForSpeed:
    """Without a budget: plans one captured step so that what is quicker to compute than to keep is recomputed.

    On a GPU and compiled, that is; a step that is interpreted, or runs on a CPU, keeps everything.
    """

    def __init__(self, pipeline: Pipeline, backend: str, device: torch.device, room: Room | None = None) -> None:
        self.pipeline, self.room = pipeline, room
        self.worth_planning = backend == "inductor" and device.type == "cuda"
        self.told: list[Note] = []
        """About the latest plan."""

    def plan(self, prepared: Capture) -> Plan:
        """The quickest, or one that keeps everything."""
        self.told = []
        if not self.worth_planning:
            return Plan()
        try:
            graph, device = at_traced_sizes(prepared.graph), this_device("cuda")
            if self.room is not None:
                return self._hidden(frontier(graph, device, self.pipeline.carry_out, targets=TARGETS, room=self.room))
            plan = fastest(graph, device, self.pipeline.carry_out)
        except Exception as error:  # nobody asked for a plan, so a step must not fail for want of one
            reason = f"planning failed ({one_line(error)})"
            self.told = [Note("plan", f"everything is kept for the backward pass: {reason}"[:300])]
            return Plan()
        if plan.recompute:
            count = len(plan.recompute)
            values = counted(count, "value is", "values are")
            quicker = f"{values} quicker to recompute than to keep (plan=wholestep.Plan() keeps them)"
            self.told = [Note("plan", quicker)]
        return plan

    def _hidden(self, points: list[Point]) -> Plan:
        """The leanest that is as fast as the fastest: what the link hides waits on the host."""
        best = hidden(points)
        if best.plan.moves:
            out = show_bytes(best.moved_bytes["out"])
            text = f"{out} wait on the host: {show_bytes(points[0].peak_bytes - best.peak_bytes)} less of the card"
            self.told = [Note("plan", f"{text}, about +{100 * (best.seconds / points[0].seconds - 1):.1f} % time")]
        return best.plan


def hidden(points: list[Point]) -> Point:
    """The leanest of the points that are as fast as the fastest: surely so, or by prediction where that is much leaner."""
    sure, granted = (
        min((p for p in points if p.seconds <= (1 + share) * points[0].seconds), key=lambda point: point.peak_bytes)
        for share in (SURELY_HIDDEN, HIDDEN)
    )
    return granted if granted.peak_bytes <= (1 - WORTH_THE_RISK) * sure.peak_bytes else sure


def state_bytes(update: TrainingGraph | None) -> int:
    """With accumulation the optimizer's state is an input of the update's own graph, and lies there during micro-steps too."""
    if update is None:
        return 0
    inputs = zip(update.inputs, update.placeholders, strict=True)
    return sum(tensor_bytes(node.meta["val"]) for entry, node in inputs if entry.role is Role.STATE)


def limit_now(budget: Budget, device: torch.device) -> int:
    """What the allocator may reserve before the step runs: the context will have grown by then."""
    return budget.card_bytes - max(budget.context_bytes, _context_now(device) + STILL_TO_LOAD)
