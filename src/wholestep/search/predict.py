"""What a point takes before it runs: its bytes and seconds, as `wholestep plan` predicts them, without weights or data.

Points that differ only in what a plan decides (what is recomputed, which kernel, the budget) share one capture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from wholestep import compat
from wholestep.capture.subject import root_of
from wholestep.cost.target import Card
from wholestep.errors import BadOption, NoSuchKernel, WholestepError
from wholestep.graph.bytes import parse_bytes, show_bytes
from wholestep.graph.plan import Plan
from wholestep.graph.printer import fingerprint
from wholestep.plan.budget import state_bytes
from wholestep.plan.frontier import Point as Planned
from wholestep.plan.frontier import Study
from wholestep.plan.peak import timeline
from wholestep.plan.seconds import Clock
from wholestep.schedule import Recipe, resolve
from wholestep.schedule.modules import Modules
from wholestep.search.space import Point
from wholestep.train.dry_job import make_dry_job
from wholestep.train.fit import CapturedStep, Question, captured_step, on_the_card, will_it_fit
from wholestep.train.loader import rows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one point. Without seconds where the step cannot be made at all."""

    reason: str = ""
    """Why it is not worth running: it does not fit, or cannot be made."""
    fits: bool = False
    peak_bytes: int = 0
    """Allocated at the peak."""
    card_bytes: int = 0
    """Of the card; on a CPU the same."""
    seconds: float = 0.0
    units: int = 0
    """Tokens or samples of a step."""
    unit: str = "samples"
    program: str = ""
    """A hash of the captured step: what is measured stands for this program only."""
    planned: str = ""
    """A hash of the program and its plan: of points that share it one is measured. A budget that does not bind is such a case."""

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.units / self.seconds if self.seconds else 0.0


class Predictor:
    """Predictions for one device."""

    def __init__(self, target: Card) -> None:
        self.target = target
        self.captures: dict[str, CapturedStep | WholestepError] = {}

    def of(self, point: Point, tell: Callable[[str], None] = lambda text: None) -> Prediction:
        """A line that does not fit the model is an error; a step that cannot be made is a prediction that says so."""
        question = Question(
            model=point.model, sets=point.sets, batch=point.settings.get("batch"), seq=point.settings.get("seq"),
            precision=point.settings.get("precision"), target=self.target, budget_bytes=self._budget(point), recipe=point.recipe,
        )  # fmt: skip
        with compat.no_collection():
            step = self._captured(point, question, tell)
            if isinstance(step, WholestepError):
                return Prediction(reason=str(step))
            try:
                return self._predicted(point, question, step)
            except NoSuchKernel:
                raise
            except WholestepError as error:
                return Prediction(reason=str(error))

    def _budget(self, point: Point) -> int:
        memory, has = point.settings.get("memory"), self.target.device.memory_bytes
        if memory == "auto" and not self.target.is_gpu:
            raise BadOption('memory = "auto": there is no GPU here', hint="name an amount, or leave it out")
        return has if memory in (None, "auto") else min(parse_bytes(memory), has)

    def _captured(self, point: Point, question: Question, tell: Callable[[str], None]) -> CapturedStep | WholestepError:
        """The captured step with the point's own recipe."""
        plain = [line for line in point.recipe if not _only_planned(line)]
        settings = {name: value for name, value in point.settings.items() if name not in ("memory", "backend", "data")}
        key = json.dumps([settings, [line.to_table() for line in plain]], sort_keys=True)
        if key not in self.captures:
            base = Recipe(tuple(plain), point.expects, point.source) if plain else None
            self.captures[key] = _attempt(dataclasses.replace(question, recipe=base), point.recipe, tell)
        step = self.captures[key]
        if isinstance(step, WholestepError):
            return step
        root = root_of(step.job.model)
        point.recipe.check(Modules(root))
        if not len(point.recipe):
            return step
        try:
            settle = resolve(point.recipe, root).settle
        except WholestepError as error:
            return error
        return dataclasses.replace(step, passes=step.passes.settled(settle), settle=settle)

    def _predicted(self, point: Point, question: Question, step: CapturedStep) -> Prediction:
        device, settings = self.target.device, step.job.settings
        if point.settings.get("memory") is not None:
            fit = will_it_fit(question, step=step, find_batch=False)
            best: Planned = fit.frontier[fit.shown]
            peak = best.peak_bytes
        else:
            study = Study(step.captured.graph, device, step.passes.carry_out)
            compiled = point.settings.get("backend", "inductor") == "inductor"
            best = study.quickest if compiled and self.target.is_gpu else study.kept  # as plan/budget.py: ForSpeed
            peak = best.peak_bytes + state_bytes(step.captured.update)
        seconds, parts = best.seconds, settings["accumulate"]
        if step.captured.update is not None:
            update = timeline(step.captured.update, workspace=0)
            seconds = parts * seconds + Clock(device).step(update.works, update.sizes).seconds
        card = on_the_card(peak, self.target)
        fits = card <= question.budget_bytes
        told = f"takes {show_bytes(card)} of {show_bytes(question.budget_bytes)}"
        units, unit = _units(settings, step)
        program = fingerprint(step.captured.graph)
        return Prediction(
            reason="" if fits else told, fits=fits, peak_bytes=peak, card_bytes=card, seconds=seconds, units=units, unit=unit,
            program=program, planned=_planned(point, program, step.settle(best.plan, step.captured.graph)),
        )  # fmt: skip


def _attempt(question: Question, recipe: Recipe, tell: Callable[[str], None]) -> CapturedStep | WholestepError:
    """The captured step, or why there is none. That a line names nothing of the model is the recipe's mistake, and raised."""
    try:
        return captured_step(question, tell=tell)
    except WholestepError as error:
        try:
            job = make_dry_job(
                question.model, sets=question.sets, batch=question.batch, seq=question.seq, precision=question.precision,
                on_gpu=question.target.is_gpu,
            )  # fmt: skip
        except WholestepError:  # no model, no places
            return error
        recipe.check(Modules(root_of(job.model)))
        return error


def _only_planned(line: Any) -> bool:
    """Whether a line is about the plan alone: the captured step is the same without it."""
    return line.name == "kernel" or (line.name == "recompute" and line.pattern is None)


def _planned(point: Point, program: str, plan: Plan) -> str:
    """Lines that are no part of the plan, or choose kernels by measuring, and settings but the budget count as they stand."""
    lines = [line.to_table() for line in point.recipe if line.name != "recompute"]
    settings = {name: value for name, value in point.settings.items() if name != "memory"}
    told = json.dumps([program, sorted(plan.recompute), lines, settings], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _units(settings: Mapping[str, Any], step: CapturedStep) -> tuple[int, str]:
    """What a step trains on, as the batches of the real job count it."""
    if settings.get("seq") and settings.get("batch"):
        return settings["batch"] * settings["seq"], "tokens"
    return settings.get("batch") or rows(step.job.example), "samples"
