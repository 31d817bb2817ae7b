"""Will it fit? A model, sizes and a card in; the memory and time of its best plans out, without a GPU and without weights.

The step is captured dry (`capture/dry.py`), goes through the passes it would go through, and is planned
(`plan/frontier.py`). What is added here is the question itself: the budget, the plan that fits it, the largest batch that
would, and what else would help.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wholestep import compat
from wholestep.capture.dry import dry_capture, no_collection
from wholestep.cost.devices import DEVICES, Device
from wholestep.cost.target import Target
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role, TrainingGraph, tensors_in
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.plan.frontier import Point, card_bytes, frontier
from wholestep.train.dry_job import DryJob, make_dry_job
from wholestep.train.plan_use import made_for

FIXED = ("weights", "buffers", "optimizer state", "gradients")
"""Kinds of memory that do not grow with the batch."""
MOST_BATCH = 1 << 20
MOST_CHECKS = 2
WORTH_CHECKING_SECONDS = 6.0
"""A capture that took less is made again to check the largest batch without being asked."""
CARDS = ("t4", "l4", "rtx4090", "a100-40gb", "a100-80gb", "h100", "h200")
"""Cards that are named as alternatives, smallest first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked."""

    model: str
    sets: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    precision: str | None = None
    target: Target
    budget_bytes: int
    """Of the card."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """How many rows fit, and how that is known."""

    batch: int
    """0 when not even one fits."""
    how: str
    checked: bool
    """The step was captured and planned at this batch, and at one more where that was in doubt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer."""

    question: Question
    name: str
    settings: Mapping[str, Any]
    num_parameters: int
    num_operations: int
    frontier: Sequence[Point]
    cards: Sequence[int]
    """Bytes of the card for every point of the frontier."""
    chosen: int | None
    """Number of the fastest point that fits; None when none does."""
    largest: LargestBatch | None
    notes: Sequence[str]
    seconds: Mapping[str, float]
    """How long each stage took here."""

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    @property
    def shown(self) -> int:
        """The point to describe: the chosen one, else the smallest."""
        return len(self.frontier) - 1 if self.chosen is None else self.chosen

    @property
    def plan(self) -> Plan:
        """The plan of the point that is described, with what it was made for."""
        point = self.frontier[self.shown]
        return dataclasses.replace(
            point.plan, budget_bytes=self.question.budget_bytes, predicted_bytes=point.peak_bytes,
            predicted_seconds=None if self.question.target.times == "relative" else point.seconds,
            made_for=made_for(self.settings, self.question.target.device.name),
        )  # fmt: skip


def will_it_fit(
    question: Question,
    *,
    passes: Pipeline | None = None,
    check_batch: bool | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Answer the question. `check_batch`: capture again at the largest batch; None does so where that is quick."""
    began = time.perf_counter()
    tell("building the model")
    with compat.no_python_code(), no_collection():
        return _answered(question, passes, check_batch, tell, began)


def _answered(
    question: Question, passes: Pipeline | None, check_batch: bool | None, tell: Callable[[str], None], began: float
) -> Fit:
    job = _job(question, question.batch)
    built = time.perf_counter()
    planned = _planned(question, job, passes, tell)
    captured = time.perf_counter() - built
    chosen = next((i for i, card in enumerate(planned.cards) if card <= question.budget_bytes), None)
    wanted = captured < WORTH_CHECKING_SECONDS if check_batch is None else check_batch
    largest = None if job.real else _largest(question, job, planned, passes, tell, check=wanted)
    done = time.perf_counter()
    seconds = {"model": built - began, **planned.seconds, "largest batch": done - built - captured, "all": done - began}
    notes = list(planned.notes)
    if job.real:
        notes.append("the model of your function was built for real; its batch cannot be changed from here")
    return Fit(
        question=question, name=job.name, settings=job.settings, num_parameters=job.num_parameters,
        num_operations=planned.num_operations, frontier=planned.frontier, cards=planned.cards, chosen=chosen, largest=largest,
        notes=notes, seconds=seconds,
    )  # fmt: skip


# ---- capture and plan ----


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    frontier: list[Point]
    cards: list[int]
    num_operations: int
    notes: list[str]
    seconds: dict[str, float]


def _job(question: Question, batch: int | None) -> DryJob:
    return make_dry_job(
        question.model, sets=question.sets, batch=batch, seq=question.seq, precision=question.precision,
        on_gpu=question.target.is_gpu,
    )  # fmt: skip


def _planned(question: Question, job: DryJob, passes: Pipeline | None, tell: Callable[[str], None]) -> _Planned:
    began = time.perf_counter()
    tell("capturing the step without data")
    captured = dry_capture(
        job.model, job.loss_fn, job.optimizer, job.example, device="cuda" if question.target.is_gpu else "cpu",
        **job.compile_options,
    )  # fmt: skip
    (passes or default_pipeline()).run_on(captured)
    traced = time.perf_counter()
    tell("planning")
    device = question.target.device
    points = plans_of(captured.graph, device)
    if captured.update is not None:
        points = _with_state(points, captured.update)
    cards = [on_the_card(point.peak_bytes, question.target) for point in points]
    seconds = {"capture": traced - began, "plan": time.perf_counter() - traced}
    return _Planned(points, cards, sum(1 for _ in captured.graph.operations()), list(captured.notes), seconds)


def plans_of(graph: TrainingGraph, device: Device) -> list[Point]:
    """The plans worth having, from the fastest to the leanest."""
    return frontier(graph, device, default_pipeline().carry_out)


def on_the_card(peak_bytes: int, target: Target) -> int:
    """What `nvidia-smi` would show for a peak; a CPU has no context and no allocator of ours."""
    return card_bytes(peak_bytes) if target.is_gpu else peak_bytes


def _with_state(points: Sequence[Point], update: TrainingGraph) -> list[Point]:
    """With accumulation the optimizer's state is an input of the update's own graph; it lies there during micro-steps too."""
    state = sum(
        tensor.numel() * tensor.element_size()
        for entry, node in zip(update.inputs, update.placeholders) if entry.role is Role.STATE
        for tensor in tensors_in(node.meta["val"])
    )  # fmt: skip
    return [
        dataclasses.replace(
            point, peak_bytes=point.peak_bytes + state,
            breakdown={**point.breakdown, "optimizer state": point.breakdown.get("optimizer state", 0) + state},
        )
        for point in points
    ]  # fmt: skip


# ---- other batches ----


def _largest(
    question: Question, job: DryJob, planned: _Planned, passes: Pipeline | None, tell: Callable[[str], None], *, check: bool
) -> LargestBatch:
    """The largest batch that fits: scaled from what was captured, then captured again and corrected where that is asked for."""
    accumulate = job.settings["accumulate"]
    rows = job.settings["batch"] // accumulate
    known = {rows: planned}
    batch = scaled_batch(planned, rows, question)
    for _ in range(MOST_CHECKS if check else 0):
        if batch in known or not 1 <= batch < MOST_BATCH:
            break
        tell(f"capturing again at batch {batch * accumulate}")
        known[batch] = _planned(question, _job(question, batch * accumulate), passes, tell)
        batch = _between(known, question)
    fitting = [size for size, answer in known.items() if min(answer.cards) <= question.budget_bytes]
    if check and fitting:
        batch = batch if batch in fitting else max(fitting)
    told = f"captured and planned at {' and '.join(str(size * accumulate) for size in sorted(known))}"
    if not check or len(known) == 1:
        told += ", scaled: activations grow with the batch, weights and optimizer state do not"
    return LargestBatch(batch=batch * accumulate, how=told, checked=batch in known)


def scaled_batch(planned: Any, rows: int, question: Question) -> int:
    """The largest number of rows for which any of the plans fits, when what is not fixed grows with the rows."""

    def fits(batch: int) -> bool:
        target, budget = question.target, question.budget_bytes
        return any(on_the_card(_scaled(point, batch / rows), target) <= budget for point in planned.frontier)

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST_BATCH and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _scaled(point: Point, factor: float) -> int:
    fixed = sum(count for kind, count in point.breakdown.items() if kind in FIXED)
    return round(fixed + factor * (point.peak_bytes - fixed))


def _between(known: Mapping[int, _Planned], question: Question) -> int:
    """A better guess from two batches that were planned: their smallest plans lie on a line."""
    (first, one), (second, other) = sorted(known.items())[-2:]
    slope = (min(other.cards) - min(one.cards)) / (second - first)
    if slope <= 0:
        return second
    return max(int(second + (question.budget_bytes - min(other.cards)) // slope), 0)


# ---- what would help ----


def remedies(fit: Fit) -> list[str]:
    """What would make it fit, most useful first; empty when it does."""
    if fit.fits:
        return []
    found = []
    least, settings = min(fit.cards), fit.settings
    batch, accumulate = settings.get("batch"), settings.get("accumulate", 1)
    if fit.largest is not None and fit.largest.batch >= 1 and batch is not None:
        most = fit.largest.batch // accumulate
        parts = next((k for k in range(accumulate, batch + 1) if batch % k == 0 and batch // k <= most), None)
        if parts is not None and parts > accumulate:
            found.append(f"--set accumulate={parts}: the same batch in {parts} parts of {batch // parts}")
        found.append(f"--batch {fit.largest.batch}")
    elif fit.largest is not None and settings.get("seq"):
        found.append(f"a shorter --seq than {settings['seq']}: not even one row fits")
    if settings.get("precision") == "fp32" and fit.question.target.is_gpu:
        found.append("--precision bf16")
    larger = next((name for name in CARDS if DEVICES[name].memory_bytes >= least), None)
    if larger is not None and DEVICES[larger].memory_bytes > fit.question.budget_bytes:
        found.append(f"--device {larger} ({DEVICES[larger].memory_bytes / 2**30:.0f} GiB)")
    return found
