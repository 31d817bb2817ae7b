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
from wholestep.capture.dry import capture_dry
from wholestep.capture.trace import Capture
from wholestep.compiler import compiler_for
from wholestep.cost.target import Card, refuse_units
from wholestep.graph.mesh import Mesh
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.options import Options
from wholestep.passes.pipeline import Pipeline
from wholestep.plan.budget import state_bytes
from wholestep.plan.frontier import TARGETS, Point, card_bytes, frontier, leanest, peak_for_card
from wholestep.plan.moves import Room
from wholestep.plan.rebatch import rebatched
from wholestep.train.dry_job import DryJob, make_dry_job
from wholestep.train.plan_use import made_for

MOST_BATCH = 1 << 20
MOST_PLANNINGS = 5
"""Other batches that are planned to find the largest."""
WORTH_CHECKING_SECONDS = 6.0
"""A capture that took less is repeated to check the largest batch without being asked."""
LARGE, LEAST_TARGETS = 3500, 7
"""Beyond so many nodes fewer plans are made: each is carried out and counted, a second or two for a Llama of 8B."""
SHORTENINGS = 2
"""Lengths that are captured to find one of which a row fits."""
UNHELD = (
    "each layer is updated behind its backward, as wholestep.compile does it; wholestep train holds updates until all gradients "
    "are known to be finite, unless --nonfinite allow"
)
"""Of a step without clipping."""
LASTING = ("weights", "buffers", "optimizer state")
"""What a step holds whatever its batch is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked."""

    model: str
    sets: tuple[str, ...] = ()
    batch: int | None = None
    seq: int | None = None
    precision: str | None = None
    target: Card
    budget_bytes: int
    """Of the card."""
    recipe: Any = None
    """A Recipe, or the file of one: what it says is part of every plan."""
    room: Room | None = None
    """Where values and optimizer state may wait outside of the card."""
    mesh: Mesh | None = None
    """The ranks that run the step; memory and times are those of one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """How many rows fit, and how that is known."""

    batch: int
    """0 when not even one fits."""
    how: str
    certain: bool
    """One row more was planned and does not fit."""
    row_bytes: int | None = None
    """What one row takes on the card, where that is more than there is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fit:
    """The answer. Printed it reads as `wholestep plan` does; `plan` goes to `wholestep.compile`, `to_json` to programs."""

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
    shorter: int | None
    """Where not even one row fits: a length of which one does, if one was found."""
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

    def __str__(self) -> str:
        from wholestep.train.fit_text import fit_lines

        return "\n".join(fit_lines(self))

    def __repr__(self) -> str:
        from wholestep.train.fit_text import verdict

        return f"<{verdict(self)}>"

    def _repr_html_(self) -> str:
        from wholestep.train.fit_text import fit_html

        return fit_html(self)

    def to_json(self) -> dict[str, Any]:
        from wholestep.train.fit_text import fit_json

        return fit_json(self)

    @property
    def lasting_bytes(self) -> int:
        """What the card shows of weights and optimizer state alone."""
        return lasting_bytes(self.frontier[-1], self.question.target)

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
    step: CapturedStep | None = None,
    passes: Pipeline | None = None,
    find_batch: bool = True,
    check_batch: bool | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Fit:
    """Answer the question.

    Args:
        step: what `captured_step` gave for the same model and sizes (several cards may be asked about one step).
        passes: instead of the default ones.
        find_batch: look for the largest batch that fits.
        check_batch: capture again at the largest batch that was found; None does so where that is quick.
        tell: is told what is being done.
    """
    began = time.perf_counter()
    with compat.no_collection():
        step = step or captured_step(question, passes=passes, tell=tell)
        tell("planning")
        planned = _planned(question, step)
        quick = sum(step.seconds.values()) + planned.seconds < WORTH_CHECKING_SECONDS
        guessing = time.perf_counter()
        wanted = quick if check_batch is None else check_batch
        look = find_batch and not step.job.real
        largest = _largest(question, step, planned, passes, tell, check=wanted) if look else None
        shorter = None if largest is None or largest.batch else _shorter(question, step, planned, largest, passes, tell)
    done = time.perf_counter()
    seconds = {**step.seconds, "plan": planned.seconds, "largest batch": done - guessing, "all": done - began}
    notes: list[str] = [*step.captured.notes]
    if step.job.compile_options.get("clip_norm") is None and step.captured.update is None:
        notes.append(UNHELD)
    if step.job.real:
        notes.append("the model of your function was built for real; its batch cannot be changed from here")
    return Fit(
        question=question, name=step.job.name, settings=step.job.settings, num_parameters=step.job.num_parameters,
        num_operations=sum(1 for _ in step.captured.graph.operations()), frontier=planned.frontier, cards=planned.cards,
        chosen=next((i for i, card in enumerate(planned.cards) if card <= question.budget_bytes), None), largest=largest,
        shorter=shorter, notes=notes, seconds=seconds,
    )  # fmt: skip


# ---- capture and plan ----


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedStep:
    """A step that was captured dry and went through the passes; it knows of no card."""

    job: DryJob
    captured: Capture
    passes: Pipeline
    """Those of its apply part carry a plan out."""
    seconds: dict[str, float]
    settle: Callable[[Plan, TrainingGraph], Plan] = lambda plan, graph: plan
    """A plan -> that plan with what a recipe says written over it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Planned:
    frontier: list[Point]
    cards: list[int]
    seconds: float


def captured_step(
    question: Question,
    *,
    batch: int | None = None,
    seq: int | None = None,
    job: DryJob | None = None,
    passes: Pipeline | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> CapturedStep:
    """The step of the question, or with another `batch` or `seq`, or of `job`; its card only says whether it is a GPU."""
    began = time.perf_counter()
    on_gpu = question.target.is_gpu
    tell("building the model")
    job = job or make_dry_job(
        question.model, sets=question.sets, batch=batch or question.batch, seq=seq or question.seq, precision=question.precision,
        on_gpu=on_gpu,
    )  # fmt: skip
    refuse_units(question.target.device, job.settings["precision"])
    built = time.perf_counter()
    tell(f"capturing the step{f' at batch {batch}' if batch else ''}, without data")
    options = Options(passes=passes, recipe=question.recipe, mesh=question.mesh, **job.compile_options)
    with compat.no_collection():
        compiler = compiler_for(
            job.model, job.loss_fn, job.optimizer, options, job.example, dry="cuda" if on_gpu else "cpu"
        )
        captured = capture_dry(compiler.subject, job.example)
        compiler.prepare(captured)
    took = {"model": built - began, "capture": time.perf_counter() - built}
    if compiler.scheduled is None:
        return CapturedStep(job, captured, compiler.pipeline, took)
    return CapturedStep(job, captured, compiler.settled_pipeline, took, compiler.scheduled.settle)


def _planned(question: Question, step: CapturedStep) -> _Planned:
    began = time.perf_counter()
    nodes = len(step.captured.graph.graph.nodes)
    targets = min(max(TARGETS * LARGE // nodes, LEAST_TARGETS), TARGETS)
    allowed = peak_for_card(question.budget_bytes) if question.target.is_gpu else question.budget_bytes
    near = allowed - state_bytes(step.captured.update)
    timed = question.target.times != "relative"
    points = frontier(
        step.captured.graph, question.target.device, step.passes.carry_out, targets=targets, near=near, timed=timed,
        room=question.room,
    )  # fmt: skip
    points = [_settled(point, step) for point in points]
    if step.captured.update is not None:
        points = _with_state(points, step.captured.update)
    cards = [on_the_card(point.peak_bytes, question.target) for point in points]
    return _Planned(points, cards, time.perf_counter() - began)


def _settled(point: Point, step: CapturedStep) -> Point:
    """A point whose plan says what the recipe says."""
    plan = step.settle(point.plan, step.captured.graph)
    beside = "" if plan.recompute == point.plan.recompute else "; the recipe decides about the rest"
    return dataclasses.replace(point, plan=plan, change=point.change + beside)


def on_the_card(peak_bytes: int, target: Card) -> int:
    """What `nvidia-smi` would show for a peak; a CPU has no context and no allocator of ours."""
    return card_bytes(peak_bytes) if target.is_gpu else peak_bytes


def lasting_bytes(point: Point, target: Card) -> int:
    """What the card shows of all that stays from step to step."""
    return on_the_card(sum(point.breakdown.get(kind, 0) for kind in LASTING), target)


def _with_state(points: Sequence[Point], update: TrainingGraph) -> list[Point]:
    state = state_bytes(update)
    return [
        dataclasses.replace(
            point, peak_bytes=point.peak_bytes + state,
            breakdown={**point.breakdown, "optimizer state": point.breakdown.get("optimizer state", 0) + state},
        )
        for point in points
    ]  # fmt: skip


# ---- other batches ----


def _largest(
    question: Question,
    step: CapturedStep,
    planned: _Planned,
    passes: Pipeline | None,
    tell: Callable[[str], None],
    *,
    check: bool,
) -> LargestBatch:
    """The largest batch whose leanest plan fits: planned with scaled sizes, and where asked captured again there."""
    parts = step.job.settings["accumulate"]
    rows = step.job.settings["batch"] // parts
    state = state_bytes(step.captured.update)

    def least(wanted: int) -> int:
        tell(f"planning batch {wanted * parts}")
        graph = rebatched(step.captured.graph, wanted / rows)
        point = leanest(graph, question.target.device, step.passes.carry_out, question.room)
        return on_the_card(point.peak_bytes + state, question.target)

    found, known, certain = largest_fitting(least, {rows: min(planned.cards)}, question.budget_bytes)
    tried = " and ".join(str(size * parts) for size in sorted(known) if size != rows)
    how = f"captured at {rows * parts}" + (f", planned with sizes scaled to {tried}" if tried else "")
    while check and found > rows:
        there = min(_planned(question, captured_step(question, batch=found * parts, passes=passes, tell=tell)).cards)
        if there <= question.budget_bytes:
            return LargestBatch(
                batch=found * parts, how=f"{how}; captured again at {found * parts}: it fits", certain=certain
            )
        found -= 1
    return LargestBatch(batch=found * parts, how=how, certain=certain, row_bytes=None if found else known.get(1))


def _shorter(
    question: Question,
    step: CapturedStep,
    planned: _Planned,
    largest: LargestBatch,
    passes: Pipeline | None,
    tell: Callable[[str], None],
) -> int | None:
    """A length of which one row fits: where the line from what lasts leads to, captured there; None where none is found."""
    settings, lasting = step.job.settings, lasting_bytes(planned.frontier[-1], question.target)
    row, seq = largest.row_bytes, settings.get("seq")
    if row is None or not seq or lasting >= question.budget_bytes:
        return None
    estimate = int(seq * (question.budget_bytes - lasting) / (row - lasting))
    length = 1 << max(estimate.bit_length() - 1, 0)
    for _ in range(SHORTENINGS):
        if length < 2:
            return None
        tell(f"planning --seq {length}")
        there = captured_step(question, batch=settings["accumulate"], seq=length, passes=passes, tell=tell)
        if min(_planned(question, there).cards) <= question.budget_bytes:
            return length
        length //= 2
    return None


def largest_fitting(
    least: Callable[[int], int], known: dict[int, int], budget: int
) -> tuple[int, dict[int, int], bool]:
    """(the most rows whose `least` bytes fit, what was asked for, whether one more row is known not to fit).

    Bytes grow with the rows along a line with a few corners: two points tell where to look, a third mends it.
    """
    known = dict(known)
    for _ in range(MOST_PLANNINGS):
        low, high = _bracket(known, budget)
        if high - low <= 1:
            break
        size = min(max(_on_the_line(known, budget), low + 1), high - 1)
        known[size] = least(size)
    low, high = _bracket(known, budget)
    return low, known, high - low <= 1


def _bracket(known: Mapping[int, int], budget: int) -> tuple[int, int]:
    """(the most rows known to fit, the fewest known not to)."""
    low = max((size for size, count in known.items() if count <= budget), default=0)
    return low, min((size for size, count in known.items() if count > budget), default=MOST_BATCH)


def _on_the_line(known: Mapping[int, int], budget: int) -> int:
    """Where the line through the two points around the budget (or nearest to it) meets it."""
    low, high = _bracket(known, budget)
    sizes = sorted(known)
    if low and high < MOST_BATCH:
        first, second = low, high
    elif len(sizes) == 1:
        return 2 * low if low else high // 2
    else:
        first, second = sizes[-2:] if low else sizes[:2]
    slope = (known[second] - known[first]) / (second - first)
    if slope <= 0:  # a flat stretch: something that does not grow with the batch is the largest
        return 4 * second
    return int(first + (budget - known[first]) // slope)
