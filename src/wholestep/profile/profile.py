"""`profile_job`: a Job in, everything there is to say about one of its training steps out, as a Profile.

The step is compiled, warmed up and sampled; a few more steps run with a clock or a profiler around every call; then the
memory of a step is followed, in eager PyTorch too; predictions are laid beside what was measured; and the step is verified. A
Profile is plain data: the page and the terminal show what `to_json` holds, nothing else.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wholestep import api
from wholestep.capture.batch import split_batch
from wholestep.capture.subject import Subject, make_subject
from wholestep.cost.devices import Device
from wholestep.cost.measure import measure_device, this_device
from wholestep.cost.node_costs import NodeCost, node_costs
from wholestep.cost.roofline import Fp32Units, fp32_units_here, roofline
from wholestep.cost.utilisation import utilisation
from wholestep.disk import json_ready
from wholestep.errors import BadOption, WholestepError, one_line
from wholestep.graph.bytes import show_bytes
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.footprint.blocks import MemoryProfile
from wholestep.lower.footprint.cuda import wait
from wholestep.lower.footprint.predict import predict_profile
from wholestep.lower.footprint.regions import predict_compiled
from wholestep.lower.footprint.scratch import measure_scratch
from wholestep.profile import actions, facts, text
from wholestep.profile.measure import calls as watching
from wholestep.profile.measure import kernels, rows
from wholestep.profile.measure.calls import TimedCall
from wholestep.profile.measure.eager_calls import watch_eager
from wholestep.profile.measure.timing import BUSY, Timing, time_steps
from wholestep.profile.measure.work import sum_of
from wholestep.profile.memory.budget_fix import Fix, budget_fix
from wholestep.profile.memory.profile import SYSTEMS, memory_profile
from wholestep.report.page import write_report
from wholestep.runtime.eager import eager_step
from wholestep.runtime.step import Step
from wholestep.runtime.variant import Variant
from wholestep.train.job import Job
from wholestep.verify.verify import verify

FORMAT = "wholestep profile 1"
WATCHED_STEPS = 3
SCALED_SILENTLY = 0.1
SLOWER = 0.1
"""Of the step: what a memory budget that is suggested may cost."""
VERIFY_UP_TO = 2.0
"""Seconds of a step beyond which it is not verified unasked: the float64 reference takes many times as long."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """One training step, measured. Milliseconds and bytes are per step. Printed it reads as `wholestep profile` does."""

    name: str
    command: tuple[str, ...]
    """The words that made it on the command line; empty when it was made from Python."""
    system: str
    backend: str
    """What ran; `asked_backend` may have lost against it."""
    asked_backend: str
    device: dict[str, Any]
    settings: dict[str, Any]
    unit: str
    units: int
    """Tokens or samples of one step."""
    step_ms: dict[str, Any]
    """median, lowest, highest, all; compiling and the first step; how warm-up went; what the batch cost."""
    rows: tuple[rows.EqualCalls, ...]
    phases: dict[str, float]
    modules: dict[str, dict[str, float]]
    waterfall: tuple[tuple[str, float], ...]
    floor_ms: float | None
    unattributed: float
    """Share of the step's time of which it is not known what it computed."""
    shares: dict[str, float | None]
    """gpu_busy, data_wait, between_calls."""
    utilisation: dict[str, Any] | None
    busy: str | None
    """Why times are less certain than usual: other programs ran beside the step."""
    memory: MemoryProfile | None
    eager_memory: MemoryProfile | None
    predicted_memory: MemoryProfile | None
    budget_bytes: int | None
    copies: dict[str, Any] | None
    """Between card and host: moved_bytes, rates beside those of the link, waits, arena; None where nothing moves."""
    predictions: tuple[dict[str, Any], ...]
    """name, predicted, measured, unit."""
    verified: dict[str, Any] | None
    actions: tuple[dict[str, Any], ...]
    environment: dict[str, Any]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(text.summary_lines(self))

    def __repr__(self) -> str:
        return f"<{text.summary_lines(self)[0]}>"

    def _repr_html_(self) -> str:
        return text.framed_page(self)

    def write(self, path: str | Path) -> Path:
        """Write the page, and beside it the numbers as JSON, whose path is returned."""
        return write_report(self.to_json(), Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN and infinity become None."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["rows"] = [dataclasses.asdict(row) for row in self.rows]
        for name in ("memory", "eager_memory", "predicted_memory"):
            fields[name] = None if fields[name] is None else fields[name].to_json()
        return json_ready({"format": FORMAT} | fields)


def profile_job(
    job: Job,
    *,
    system: str = "wholestep",
    backend: str = "inductor",
    steps: int = 20,
    memory: bool = True,
    budget: str | int | None = None,
    host_memory: str | int | None = None,
    offload_path: Sequence[str | Path] | None = None,
    plan: Plan | None = None,
    verified: bool = True,
    passes: Any = None,
    command: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a step of `job`; it trains while it is measured.

    `memory`: whether the memory of a step is followed; `budget`: what it may take, as `wholestep.compile(memory=...)`;
    `host_memory`, `offload_path`, `plan`: where values may wait, as there;
    `command`: the words on the command line, for advice to be copied from; `tell` hears what is being done.
    """
    if system not in SYSTEMS:
        raise BadOption(f"system={system!r}", hint=f"use {', '.join(SYSTEMS)}")
    if budget is not None and system != "wholestep":
        raise BadOption(f"a memory budget for system={system!r}", hint="only Wholestep's own step is planned for one")
    places = {"host_memory": host_memory, "offload_path": offload_path or None, "plan": plan}
    places = {name: value for name, value in places.items() if value is not None}
    if places and system != "wholestep":
        raise BadOption(f"{next(iter(places))} for system={system!r}", hint="only Wholestep's own step is planned")
    return _Session(job, system, backend, steps, passes, budget, tuple(command), tell, places).measure(memory, verified)


class _Session:
    """One profile in the making."""

    def __init__(
        self, job: Job, system: str, backend: str, steps: int, passes: Any,
        budget: str | int | None, command: tuple[str, ...], tell: Callable[[str], None],
        places: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.places = places
        self.command, self.compile_seconds, self.busy = command, 0.0, ""
        self.job, self.system, self.wanted, self.samples = job, system, backend, steps
        self.passes, self.budget, self.tell, self.notes = passes, budget, tell, list[str]()
        options = job.compile_options
        self.subject = make_subject(
            job.model, job.loss_fn, job.optimizer, precision=options.get("precision", "fp32"),
            accumulate=options.get("accumulate", 1), clip_norm=options.get("clip_norm"),
        )  # fmt: skip
        self.place = self.subject.device
        self.batch = job.batches.batch(0)
        self.fp32 = fp32_units_here() if self.place.type == "cuda" else Fp32Units()

    def measure(self, memory: bool, verified: bool) -> Profile:
        self.tell("compiling" if self.system != "eager" else "making the step")
        step, call = self._step()
        self.tell("looking up the device")
        device = this_device(self.place.type)
        timing = self._timing(call)
        variant = step.variant_for(self.batch) if step is not None and self.system == "wholestep" else None
        calls, device = self._calls(step, call, variant, device, timing)
        copies = self._copies(step, variant, device, timing)
        busy = self._busy(call)
        graph = step.graph if step is not None else None
        used = None if graph is None else node_costs(graph)
        remembered = self._memory(call, variant, graph) if memory else (None, None, None)
        checked = self._verify(variant, timing) if verified and self.system == "wholestep" else None
        found = self._profile(timing, calls, device, used, busy, variant, remembered, checked)
        found = dataclasses.replace(found, copies=copies)
        return dataclasses.replace(found, actions=tuple(actions.actions_of(found, self._budget_fix(found, variant))))

    # ---- the step ----

    def _step(self) -> tuple[Step | None, Callable[[Any], Any]]:
        """(the captured step, which also says what the step computes; what is called and timed)."""
        job, ours, began = self.job, self.system == "wholestep", time.perf_counter()
        step = api.compile(
            job.model, job.loss_fn, job.optimizer, self.batch, backend=self.wanted if ours else "interpret", check="off",
            passes=self.passes, memory=self.budget, seed=job.settings.get("seed", 0), verbose=False, **self.places,
            **job.compile_options,
        )  # fmt: skip
        self.compile_seconds = time.perf_counter() - began if ours else 0.0
        if step.graph is None:
            reasons = "; ".join(str(fall) for fall in step.falls)
            self.notes.append(f"nothing was captured, so what the step computes is counted while it runs: {reasons}")
        self.notes += [note for note in step.notes if note.kind == "memory"]
        if ours:
            return step, step
        subject = self.subject
        if self.system == "compile":
            loss_fn = subject.loss_fn
            subject = dataclasses.replace(subject, loss_fn=torch.compile(lambda model, batch: loss_fn(model, batch)))
        return step, lambda batch: _plain_step(subject, batch)

    def _timing(self, call: Callable[[Any], Any]) -> Timing:
        """Sampled steps; sampled again where other programs seem to have run beside them."""
        self.tell("timing steps")
        timing = time_steps(call, self.job.batches.batch, self.place, samples=self.samples)
        if timing.spread > BUSY:
            self.tell("timing steps again: the machine is busy")
            again = time_steps(call, self.job.batches.batch, self.place, samples=self.samples)
            again = dataclasses.replace(again, first_step=timing.first_step)
            timing = min(timing, again, key=lambda found: found.spread)
        if timing.spread > BUSY:
            middle = f"the middle half of the steps lies {timing.spread:.0%} of their median apart"
            self.busy = f"the machine was busy: {middle}, twice; times are less certain than usual"
        return timing

    def _calls(
        self, step: Step | None, call: Any, variant: Variant | None, device: Device, timing: Timing
    ) -> tuple[list[TimedCall], Device]:
        """The calls of a step below the roof; what looks disturbed is measured again first."""
        self.tell("timing every call of a step")
        watched = self._watched(step, call, variant, device)
        if statistics.median(seconds for seconds, _ in watched) > (1 + BUSY) * timing.median:
            watched += self._watched(step, call, variant, device)
            watched = sorted(watched, key=lambda entry: entry[0])[:WATCHED_STEPS]
        calls, factor = self._fitted(watched, timing, variant)
        if device.measured and rows.beats_the_peak(calls):
            self.tell("measuring the device again: calls were faster than its peak")
            device = measure_device(self.place.type, fresh=True)
            calls, factor = self._fitted(self._watched(step, call, variant, device), timing, variant)
        if rows.beats_the_peak(calls):
            faster = "calls were faster than the peak that was measured, twice"
            self.busy = self.busy or f"the machine was busy: {faster}; such calls count as losing nothing"
        if abs(factor - 1) > SCALED_SILENTLY:
            longer = f"the steps whose calls were timed took {1 / factor:.2f} times as long as the sampled ones"
            self.notes.append(f"{longer}; the times of calls are scaled to the latter")
        return rows.below_the_roof(calls), device

    def _watched(
        self, step: Step | None, call: Any, variant: Variant | None, device: Device
    ) -> list[tuple[float, list[TimedCall]]]:
        batches = [self.job.batches.batch(number) for number in range(WATCHED_STEPS)]
        if variant is not None and step is not None:
            if hasattr(variant.runner, "runner"):
                self.notes.append("calls were timed without the CUDA graph that the step itself runs as")
            return watching.watch_step(step, variant, batches, device, self.fp32)
        if self.system == "compile":
            self.notes.append("what torch.compile's code computes is not known call by call: it is listed by name")
            return watching.watch_names(call, batches, self.place)
        root, optimizer = self.subject.root, self.subject.optimizer
        return watch_eager(call, root, optimizer, batches, self.place, device, self.fp32)

    def _fitted(
        self, watched: list[tuple[float, list[TimedCall]]], timing: Timing, variant: Variant | None
    ) -> tuple[list[TimedCall], float]:
        """The calls as part of the sampled step, and the factor that made them so."""
        eager = variant is None and self.system != "compile"
        # kernels have times of their own; a dispatch mode around eager operators costs time between them, none inside
        by_share = self.place.type != "cuda" and not eager
        whole = None if not by_share else statistics.median(seconds for seconds, _ in watched)
        return rows.fitted(rows.median_calls([calls for _, calls in watched]), whole, timing.median)

    def _busy(self, call: Callable[[Any], Any]) -> float | None:
        """The share of a step, as it really runs, during which the GPU has work."""
        if self.place.type != "cuda":
            return None
        wait(self.place)
        with kernels.recorded(self.place) as activities:
            began = time.perf_counter()
            call(self.batch)
            wait(self.place)
            taken = time.perf_counter() - began
        return min(kernels.busy_seconds(activities) / taken, 1.0)

    def _copies(
        self, step: Step | None, variant: Variant | None, device: Device, timing: Timing
    ) -> dict[str, Any] | None:
        if step is None or variant is None:
            return None
        self.tell("timing copies between card and host")
        batches = [self.job.batches.batch(number) for number in range(WATCHED_STEPS)]
        return watching.watch_copies(step, variant, batches, device, self.fp32, timing.median)

    # ---- memory and verification ----

    def _memory(
        self, call: Callable[[Any], Any], variant: Variant | None, graph: TrainingGraph | None
    ) -> tuple[MemoryProfile | None, MemoryProfile | None, MemoryProfile | None]:
        """(of the step, of eager PyTorch, predicted)."""
        job = self.job
        about: dict[str, Any] = {
            "model": job.model,
            "optimizer": job.optimizer,
            "batch": self.batch,
            "device": self.place,
        }
        self.tell("following the memory of a step")
        mine = memory_profile(call, system=self.system, settle=1, **about)
        if mine.elsewhere_bytes:
            text = f"beside the step the process holds {show_bytes(mine.elsewhere_bytes)}: data, caches, other models"
            self.notes.append(f"{text}; the figures are the step's own")
        eager = None
        if self.system != "eager":
            self.tell("following the memory of a step in eager PyTorch")
            eager = memory_profile(lambda batch: _plain_step(self.subject, batch), system="eager", settle=1, **about)
        predicted = None
        if variant is not None and graph is not None and self.subject.accumulate == 1:
            self.tell("predicting the memory of a step")
            predicted = self._predicted(graph, watching.backend_of(variant))
        return mine.of_step(), None if eager is None else eager.of_step(), predicted

    def _budget_fix(self, found: Profile, variant: Variant | None) -> Fix | None:
        """What a memory budget would give this step, by the planner itself."""
        if variant is None or found.memory is None or self.subject.accumulate > 1:
            return None
        self.tell("asking the planner for a leaner step")
        return budget_fix(variant.capture.graph, found.memory.peak_bytes, slower=SLOWER)

    def _predicted(self, graph: TrainingGraph, backend: str) -> MemoryProfile | None:
        try:
            return (
                predict_compiled(graph)
                if backend == "inductor"
                else predict_profile(graph, scratch=measure_scratch(graph))
            )
        except (RuntimeError, TypeError, KeyError) as error:  # the rest of the report is worth having without it
            self.notes.append(f"memory could not be predicted: {one_line(error)}")
            return None

    def _verify(self, variant: Variant | None, timing: Timing) -> dict[str, Any] | None:
        if variant is None:
            return None
        if timing.median > VERIFY_UP_TO:
            self.notes.append(f"not verified: a step takes more than {VERIFY_UP_TO:.0f} s; run `wholestep verify`")
            return None
        self.tell("verifying against eager PyTorch")
        report = verify(
            self.job.model, self.job.loss_fn, self.job.optimizer, [self.batch], steps=1, backend=watching.backend_of(variant),
            passes=self.passes, plan=variant.capture.plan, seed=self.job.settings.get("seed", 0), eval_too=False,
            **self.job.compile_options,
        )  # fmt: skip
        departure = None if report.first_departure is None else str(report.first_departure)
        return {
            "ok": report.ok, "bitwise": report.bitwise, "rung": report.rung, "departure": departure,
            "rows": [
                {"kind": r.kind, "name": r.name, "badness": r.badness, "bitwise": r.bitwise, "ok": r.ok} for r in report.rows
            ],
        }  # fmt: skip

    # ---- putting it together ----

    def _profile(
        self, timing: Timing, calls: list[TimedCall], device: Device, costs: tuple[NodeCost, ...] | None, busy: float | None,
        variant: Variant | None, remembered: tuple[Any, Any, Any], checked: dict[str, Any] | None,
    ) -> Profile:  # fmt: skip
        step, spent = timing.median, sum(call.seconds for call in calls)
        known = [call.work for call in calls if call.work is not None]
        floor = 1e3 * sum_of(known).floor_seconds if known else self._graph_floor(costs, device)
        foreign = sum(call.seconds for call in calls if call.work is None)
        falls = rows.waterfall(calls, step) if known else []
        memory, eager, predicted = remembered
        backend = self.system if variant is None else watching.backend_of(variant)
        wait_share = timing.data_median / (timing.data_median + step)
        if not timing.settled:
            self.notes.append(f"step times had not settled after {timing.warm_up_steps} steps of warm-up")
        if memory is not None:
            self.notes += [f"memory: {note}" for note in memory.notes]
        if variant is not None and backend != self.wanted:
            self.notes += variant.runner.describe()["notes"]  # why
        return Profile(
            name=self.job.name, command=self.command, system=self.system, backend=backend,
            asked_backend=self.wanted if self.system == "wholestep" else backend, device=facts.device_facts(device),
            settings=self.job.settings, unit=self.job.batches.unit, units=self.job.batches.units,
            step_ms=facts.times(timing, self.job.batches.units) | {"compile": 1e3 * self.compile_seconds},
            rows=tuple(rows.rows_of(calls, step)), phases=rows.by_phase(calls, step), modules=rows.by_module(calls),
            waterfall=tuple(falls), floor_ms=floor, unattributed=foreign / step,
            shares={"gpu_busy": busy, "data_wait": wait_share, "between_calls": max(step - spent, 0.0) / step},
            utilisation=self._utilisation(costs, step, device), busy=self.busy or None, memory=memory,
            eager_memory=eager, predicted_memory=predicted,
            budget_bytes=_budget_of(variant), copies=None,
            predictions=tuple(facts.predictions(memory, predicted, floor, 1e3 * step)),
            verified=checked, actions=(), environment=facts.environment(self.place), notes=tuple(dict.fromkeys(self.notes)),
        )  # fmt: skip

    def _graph_floor(self, costs: tuple[NodeCost, ...] | None, device: Device) -> float | None:
        if costs is None:
            return None
        seconds = roofline(costs, device, fp32=self.fp32).total.seconds
        return 1e3 * float(seconds) if isinstance(seconds, int | float) else None

    def _utilisation(self, costs: tuple[NodeCost, ...] | None, seconds: float, device: Device) -> dict[str, Any] | None:
        if costs is None:
            return None
        try:
            found = utilisation(costs, seconds, device, fp32=self.fp32, repeats=self.subject.accumulate)
        except WholestepError as error:
            self.notes.append(f"no MFU: {error}")
            return None
        return {
            "mfu": found.mfu, "hfu": found.hfu, "model_flops": found.model_flops, "executed_flops": found.executed_flops,
            "seconds": found.seconds, "peak": found.peak, "format": found.number_format, "lines": list(found.lines()),
        }  # fmt: skip


def _budget_of(variant: Variant | None) -> int | None:
    """Of the card, where one was asked for; on a CPU, of tensors."""
    return None if variant is None or variant.capture.plan is None else variant.capture.plan.budget_bytes


def _plain_step(subject: Subject, batch: Any) -> torch.Tensor:
    """Forward, backward, clip and update in plain PyTorch."""
    micro = [batch] if subject.accumulate == 1 else split_batch(batch, subject.accumulate)
    return eager_step(subject, micro)[0][0]
