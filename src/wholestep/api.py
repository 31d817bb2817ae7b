"""The public calls. They read as a table of contents: what happens, in order, and which folder does it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep import compat
from wholestep.budget import (
    Budget,
    Enforced,
    Fitting,
    ForSpeed,
    held_to,
    make_budget,
    make_room,
    planner_of,
)
from wholestep.budget_check import check_within
from wholestep.capture import optimizers
from wholestep.capture.batch import flatten
from wholestep.capture.cache import cached_capture
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.reading import Reading
from wholestep.capture.subject import Subject, make_subject
from wholestep.capture.trace import Capture
from wholestep.errors import BadBatch, BadOption, CaptureRefused, CompilerMissing, WholestepWarning
from wholestep.graph.bytes import parse_bytes
from wholestep.graph.plan import Plan
from wholestep.graph.printer import dump_source
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph
from wholestep.lower import (
    AutoCudaGraph,
    CudaGraphsByShape,
    Runner,
    faster_of,
    give_back,
    lower_inductor,
    lower_interpret,
    warm_up,
)
from wholestep.plan.host import fits_beside, refuse_what_cannot_fit
from wholestep.passes.amp import amp
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.passes.update_early import update_early
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.progress import Progress
from wholestep.runtime.step import Settings, Step
from wholestep.verify.check import check_first_step, only_before
from wholestep.verify.report import Report
from wholestep.verify.verify import verify as verify_step

_BACKENDS = ("inductor", "interpret")
_PRECISIONS = ("fp32", "bf16", "fp16")
_CHECKS = ("first", "off")
_GUARDS = ("dynamo", "off")


def compile(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    example_batch: Any,
    *,
    memory: str | int | None = None,
    plan: Plan | None = None,
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_scope: str = "global",
    nonfinite: str = "allow",
    chunked_loss: bool | None = None,
    backend: str = "inductor",
    dynamic: bool | None = None,
    check: str = "first",
    guards: str = "dynamo",
    passes: Pipeline | Sequence[Callable[[TrainingGraph], TrainingGraph]] | None = None,
    early_update: bool | None = None,
    cuda_graph: bool | None = None,
    cache: bool = True,
    dump: str | None = None,
    seed: int | None = None,
    verbose: bool | None = None,
) -> Step:
    """Capture the whole training step of `model` and make it run fast.

    Args:
        model: a Module, or a dict or tuple of all Modules the loss reads.
        loss_fn: `loss_fn(model, batch) -> loss` or `(loss, aux)`; None means `model(**batch).loss`.
        optimizer: what is differentiated is exactly its parameters; None fills `p.grad` and leaves the update to you.
        example_batch: one batch, as the loader gives it (with `accumulate=n`: one micro-batch, or n of them in a list,
            or a batch to be cut into n).
        memory: a budget in bytes of the card ("26GiB", "auto" for what is free): values of the forward pass are made again in
            the backward pass where that is needed, as fast as possible; or an error names the smallest budget there is.
        plan: decisions made earlier (`wholestep plan`), instead of a budget. Without either, a GPU makes again what it computes
            more quickly than it stores it; `plan=Plan()` keeps everything.
        precision: "fp32"; "bf16" (autocast); or "fp16" (autocast with dynamic loss scaling, as torch's GradScaler does it, on
            the device: a step whose gradients overflow changes nothing but the scale).
        accumulate: micro-batches per update.
        clip_norm: clip gradients by their global norm.
        clip_scope: "global", as torch does; "layer" clips every layer's gradients by their own norm, another training, in
            which gradients die young all the same.
        nonfinite: "allow" updates as torch does whatever the gradients are; "skip" leaves parameters, optimizer state and
            buffers as they were when the gradients are not finite, decided on the device (the step counts all the same).
        chunked_loss: cross-entropy over the output of a linear layer in chunks of rows, so that the logits are never whole:
            None where they would take 256 MiB or more, True wherever it is recognised, False never. It rounds differently.
        backend: "inductor" compiles; "interpret" runs the graph operator by operator, bit for bit as eager does.
        dynamic: None decides by the sizes seen; True makes all batch sizes symbolic at once; False compiles every shape.
        check: "first" compares the first live step with eager PyTorch; "off" does not.
        guards: "dynamo": the step is captured anew when something changes that the loss read; "off" traces the loss once as
            plain Python, with every value that it read fixed, for code that Dynamo cannot take.
        passes: a Pipeline, or passes to run after the default ones.
        early_update: None updates every layer behind its backward where that is exact, so that its gradients die (not with
            clip_norm or nonfinite="skip", which need all gradients first); False updates at the end of the step.
        cuda_graph: None records one when it measures faster; True or False decides.
        cache: reuse captured graphs from earlier processes.
        dump: a folder; the graph is written there after every stage, as Python.
        seed: for dropout and random numbers; None takes torch's seed.
        verbose: progress on stderr; None shows it on a terminal.
    """
    _check_options(memory, plan, precision, backend, check, dynamic, guards)
    if plan is not None and chunked_loss is None:
        chunked_loss = plan.chunked_loss
    _check_update_options(early_update, clip_scope, clip_norm, nonfinite, accumulate, optimizer, precision)
    subject = make_subject(
        model, loss_fn, optimizer, precision="fp32" if plan is not None and plan.precision else precision, accumulate=accumulate,
        clip_norm=clip_norm, nonfinite=nonfinite, chunked_loss=chunked_loss,
    )  # fmt: skip
    with contextlib.suppress(CaptureRefused):  # a refusal is for the ladder to tell; an error is better early
        refuse_unsupported(subject)
    if compat.untested_version() is not None:
        warnings.warn(str(compat.untested_version()), WholestepWarning, stacklevel=2)
    progress = Progress(verbose)
    _warn_about_optimizer(optimizer, clip_norm)
    pipeline = _pipeline(passes, plan, precision, clip_scope, early_update)
    budget = None if memory is None else make_budget(memory, subject, flatten(example_batch)[0])
    if budget is not None:
        dynamic = False  # a plan is for one size; every size gets its own within the same budget
    plain = passes is None and clip_scope == "global" and early_update is None
    stages = _Stages(subject, pipeline, progress, dump, cache, cuda_graph, backend, plan, budget, plain)
    first = _first_check(clip_scope, budget) if check == "first" else None
    settings = Settings(stages.capture, stages.lower, backend, dynamic, first, stages.room, guards)
    step = Step(subject, settings, seed=seed)
    with compat.no_collection():
        step.prepare(_example_micro_batch(step, example_batch))
    if step.graph is None and budget is not None:
        text = f"memory={budget.said} is not honoured: the step was not captured, so it cannot be planned"
        warnings.warn(text, WholestepWarning, stacklevel=2)
    progress.finish(step.explain())
    return step


def _pipeline(passes: Any, plan: Plan | None, precision: str, clip_scope: str, early_update: bool | None) -> Pipeline:
    """The passes asked for, as the other options change them."""
    pipeline = passes if isinstance(passes, Pipeline) else default_pipeline(extra=passes or ())
    if plan is not None and plan.precision:
        # told apart by module only once the graph is there: captured in fp32, then mixed by the pass
        pipeline = pipeline.insert_before(
            "fold_constants", functools.partial(amp, precision=precision, modules=plan.precision)
        )
    if clip_scope == "layer":
        pipeline = pipeline.replaced("update_early", functools.partial(update_early, clip="layer", min_bytes=1))
    return pipeline.without("update_early") if early_update is False else pipeline


@dataclasses.dataclass(frozen=True, slots=True)
class _Stages:
    """What a Step calls when it meets something new: capture and passes, then lowering."""

    subject: Subject
    pipeline: Pipeline
    progress: Progress
    dump: str | None
    cache: bool
    cuda_graph: bool | None
    backend: str
    plan: Plan | None
    budget: Budget | None
    plain: bool
    """Whether the passes are the default ones."""
    code: list[Any] = dataclasses.field(default_factory=list)
    """Regions that were compiled to measure plans, until one of the plans is lowered."""

    def capture(self, subject: Subject, reading: Reading | None, batch: Any, *, dynamic: Any = None) -> Capture:
        with (
            self.progress.stage("capturing the step"),
            compat.no_collection(),
            held_to(self.budget, self.subject.device),
        ):
            return cached_capture(
                subject, reading, batch, self._finish, finished_by=self._finished_by(), missed=self._warm_up, dynamic=dynamic,
                enabled=self.cache,
            )  # fmt: skip

    def _warm_up(self) -> None:
        """A graph that is not known yet has code that is not compiled yet; else not even Inductor need be imported."""
        if self.backend == "inductor":
            warm_up(self.subject.device.type)

    def _finish(self, made: Capture) -> None:
        """The passes, and a plan for them."""
        if self.budget is not None:
            with self.progress.stage("planning for the memory budget"):
                fitting = Fitting(self.budget, self.pipeline, self.backend, self.subject.device, self.code)
                made.notes += fitting.run_on(made, dump=self.dump)
        elif self.plan is None:
            planning = ForSpeed(self.pipeline, self.backend, self.subject.device)
            made.notes += planning.run_on(made, dump=self.dump)
        else:
            made.notes += self.pipeline.bound(self.plan).run_on(made, dump=self.dump)
            made.plan = self.plan

    def _finished_by(self) -> str | None:
        """What the passes and the plan depend on; None where that is more than can be named."""
        if self.budget is not None or self.plan is not None or self.dump is not None or not self.plain:
            return None
        device = self.subject.device
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return f"{self.backend}, {card}"

    def lower(self, graph: TrainingGraph, backend: str) -> Any:
        with held_to(self.budget, self.subject.device):
            runner = self._lowered(graph, backend)
        self.code.clear()
        return runner

    def _lowered(self, graph: TrainingGraph, backend: str) -> Any:
        if self.subject.device.type == "cpu":
            refuse_what_cannot_fit(graph, self.subject.optimizer, backend)
        began = time.perf_counter()
        runner = self._compiled(graph) if backend == "inductor" else lower_interpret(graph)
        if self.dump is not None:
            facts = runner.describe()
            effect = f"{facts.get('regions', 0)} regions, {facts.get('unique_regions', 0)} compiled, the rest called directly"
            seconds, stages = time.perf_counter() - began, len(self.pipeline.passes) + len(self.pipeline.apply)
            dump_source(facts["driver"], self.dump, "lowered", stages + 1, f"lower_{backend}", seconds, effect)
        returned = [output for output in graph.outputs if output.kind is not OutputKind.UPDATE]
        gradients = [i for i, output in enumerate(returned) if output.kind is OutputKind.GRADIENT]
        runner = self._within_budget(runner, gradients)
        if self.subject.device.type != "cuda" or self.cuda_graph is False or backend == "interpret":
            return runner
        kind = CudaGraphsByShape if runner.describe().get("symbolic") else AutoCudaGraph
        batch, targets = graph.indices(Role.BATCH), {output.target for output in graph.outputs}
        written = [i for i in batch if i in targets]
        return kind(runner, batch, always=self.cuda_graph is True, lent=gradients, written=written)

    @property
    def room(self) -> Any:
        """How recordings of other sizes give way; None where nothing is short."""
        if self.budget is None or not self.budget.enforced:
            return None
        return functools.partial(make_room, self.budget, self.subject.device)

    def _within_budget(self, runner: Runner, gradients: Sequence[int]) -> Runner:
        if self.budget is None or not self.budget.enforced:
            return runner
        give_back()  # what measuring and tuning left cached counts as taken from the card
        if gradients:  # p.grad, and an update of one's own, take memory beside the step, as much as they like
            return runner
        return runner.within(Enforced(self.budget, self.subject.device))

    def _compiled(self, graph: TrainingGraph) -> Runner:
        try:
            with self.progress.stage("compiling"):
                runner = lower_inductor(graph, progress=self.progress.region)
        except CompilerMissing:
            warnings.warn("no C++ compiler on PATH: the step runs interpreted", WholestepWarning, stacklevel=2)
            return lower_interpret(graph)
        if self.subject.device.type != "cpu" or self.budget is not None:  # what was planned for is what runs
            return runner
        if not fits_beside(graph):
            return runner.with_facts(measured="not measured against interpreted code: that would not fit into memory")
        return faster_of(graph, runner, lower_interpret(graph))


def verify(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    batches: Any,
    *,
    steps: int = 5,
    edge_batches: Sequence[Any] = (),
    memory: str | int | None = None,
    plan: Plan | None = None,
    precision: str = "fp32",
    clip_norm: float | None = None,
    accumulate: int = 1,
    chunked_loss: bool | None = None,
    backend: str = "inductor",
    passes: Pipeline | Sequence[Callable[[TrainingGraph], TrainingGraph]] | None = None,
    seed: int | None = None,
    eval_too: bool = True,
) -> Report:
    """Train a few steps beside eager PyTorch, and compare losses, aux, gradients, buffers and updates.

    Args:
        model, loss_fn, optimizer, memory, plan, precision, clip_norm, accumulate, chunked_loss, backend, passes: as for
            `compile`; the step is planned for the budget as `compile` would, and the references beside it take what they need.
        batches, steps, edge_batches, seed, eval_too: see `wholestep.verify.verify.verify`.

    Model, optimizer and random generators are as before when it returns.
    """
    _check_options(memory, plan, precision, backend, "off", None)
    planner: Any = plan
    if plan is None:
        subject = make_subject(
            model, loss_fn, optimizer, precision=precision, accumulate=accumulate, clip_norm=clip_norm
        )
        pipeline = passes if isinstance(passes, Pipeline) else default_pipeline(extra=passes or ())
        planner = planner_of(ForSpeed(pipeline, backend, subject.device))
        if memory is not None:
            budget = make_budget(memory, subject, flatten([batches, list(edge_batches)])[0])
            planner = planner_of(Fitting(budget, pipeline, backend, subject.device))
    return verify_step(
        model, loss_fn, optimizer, batches, steps=steps, edge_batches=edge_batches, plan=planner, precision=precision,
        clip_norm=clip_norm, accumulate=accumulate, chunked_loss=chunked_loss, backend=backend, passes=passes, seed=seed,
        eval_too=eval_too,
    )  # fmt: skip


def _example_micro_batch(step: Step, example: Any) -> Any:
    """The first micro-batch; an example that cannot be cut is one already."""
    try:
        return step._micro_batches(example)[0]
    except BadBatch:
        return example


def _check_options(
    memory: Any, plan: Any, precision: str, backend: str, check: str, dynamic: Any, guards: str = "dynamo"
) -> None:
    if memory is not None and memory != "auto":
        parse_bytes(memory)
    if plan is not None and not isinstance(plan, Plan):
        raise BadOption(f"plan={plan!r}", hint="give a wholestep.Plan")
    if plan is not None and plan.precision and precision == "fp16":
        raise BadOption("a plan with precisions of modules and precision='fp16'", hint="use precision='bf16'")
    if memory is not None and (plan is not None or dynamic is True):
        other = "plan=..." if plan is not None else "dynamic=True"
        raise BadOption(
            f"memory={memory!r} together with {other}", hint="a budget makes its own plan for every size: give one"
        )
    for name, value, known in (
        ("precision", precision, _PRECISIONS), ("backend", backend, _BACKENDS), ("check", check, _CHECKS),
        ("guards", guards, _GUARDS),
    ):  # fmt: skip
        if value not in known:
            raise BadOption(f"{name}={value!r}", hint=f"use one of {', '.join(map(repr, known))}")


def _first_check(clip_scope: str, budget: Budget | None) -> Any:
    """The comparison of the first live step with eager PyTorch, as far as the options leave it."""
    check, reason = _where_it_fits(check_first_step), None
    if clip_scope != "global":
        reason = f"clip_scope={clip_scope!r} is not torch's clipping"
        check = only_before(check, reason)
    return check if budget is None else check_within(budget, check, whole_only=reason)


def _where_it_fits(check: Callable[..., Any]) -> Callable[..., Any]:
    """The first step's check, left out where a CPU has no memory for it: it takes an eager step beside copies of the state."""

    def checked(run: OneStep, variant: Any, *rest: Any, **options: Any) -> Any:
        if variant.subject.device.type == "cpu" and not fits_beside(variant.capture.graph):
            run.step._note(
                "check: left out: the first step was not checked against eager: that would not fit into memory"
            )
            return None
        return check(run, variant, *rest, **options)

    return checked


def _check_update_options(
    early: Any, scope: str, clip_norm: Any, nonfinite: str, accumulate: int, optimizer: Any, precision: str
) -> None:
    """What can be updated layer by layer, and what clipping by layer goes with."""
    if early and scope == "global" and (clip_norm is not None or nonfinite == "skip"):
        option = f"clip_norm={clip_norm!r}" if clip_norm is not None else f"nonfinite={nonfinite!r}"
        hint = "all gradients are needed before the first update then: leave early_update out"
        raise BadOption(f"early_update=True with {option}", hint=hint)
    if scope == "global":
        return
    if scope != "layer":
        raise BadOption(f"clip_scope={scope!r}", hint="use 'global' or 'layer'")
    if optimizer is None or optimizers.supported(optimizer) is not None:
        raise BadOption("clip_scope='layer' without a captured update", hint="clip p.grad yourself")
    others = {
        "no clip_norm": clip_norm is None, f"nonfinite={nonfinite!r}": nonfinite == "skip", "precision='fp16'": precision == "fp16",
        f"accumulate={accumulate}": accumulate > 1, "early_update=False": early is False,
    }  # fmt: skip
    for name, given in others.items():
        if given:
            raise BadOption(f"clip_scope='layer' with {name}", hint="leave one of the two out")


def _warn_about_optimizer(optimizer: Optimizer | None, clip_norm: float | None) -> None:
    if optimizer is None and clip_norm is not None:
        text = f"clip_norm={clip_norm!r} is left to you without an optimizer: clip p.grad before your update"
        warnings.warn(text, WholestepWarning, stacklevel=3)
    reason = None if optimizer is None else optimizers.supported(optimizer)
    if reason is not None:
        warnings.warn(
            f"forward and backward are captured, the update runs in eager PyTorch: {reason}",
            WholestepWarning,
            stacklevel=3,
        )


__all__ = ["compile", "verify"]
