"""The spine: from a model, its loss and its optimizer to the program that trains them. Every command and every check builds its
program here, so that what is verified, planned, shown and timed is what runs.

    captured    the whole step as one graph                        capture/
    prepared    rewritten by passes that need no plan              passes/, the prepare part
    planned     what is kept, recomputed, in which precision       plan/
    applied     rewritten by passes that carry the plan out        passes/, the apply part
    lowered     code                                               lower/
"""

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
from wholestep.capture import optimizers
from wholestep.capture.batch import flatten
from wholestep.capture.cache import cached_capture
from wholestep.capture.ladder import capture_whole
from wholestep.capture.preflight import refuse_in_parts, refuse_unsupported
from wholestep.capture.reading import Reading
from wholestep.capture.subject import Subject, make_subject, root_of
from wholestep.capture.trace import Capture
from wholestep.errors import BadOption, CaptureRefused, CompilerMissing, NotBuiltYet, WholestepWarning
from wholestep.frames import in_one_piece
from wholestep.graph.mesh import Ranks
from wholestep.graph.notes import Note
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
    tune_calls,
    unmeasured,
    warm_up,
)
from wholestep.options import Options
from wholestep.passes.amp import amp
from wholestep.passes.asked_layouts import layouts_of
from wholestep.passes.channels_last import channels_last
from wholestep.passes.pipeline import Pipeline, default_pipeline, name_of
from wholestep.passes.update_early import update_early
from wholestep.plan.budget import Budget, Fitting, ForSpeed, make_budget
from wholestep.plan.host import fits_beside, refuse_what_cannot_fit
from wholestep.plan.room import refuse_room, room_of
from wholestep.runtime.enforce import Enforced, held_to, make_room
from wholestep.runtime.progress import Progress
from wholestep.schedule import Recipe, Scheduled, recipe_of, resolve
from wholestep.schedule.recipe_file import warn_of_changes
from wholestep.tiers.files import FileStore

FILES_RUN_DIRECTLY = "steps run directly, without a CUDA graph: threads write and read files beside them"
Dims = Sequence[dict[int, str]]
"""Per tensor of the batch: dimension -> the name of its symbol."""


class Compiler:
    """How one subject's step is made. It is asked again whenever a Step meets something new: another size, another value."""

    def __init__(
        self,
        subject: Subject,
        options: Options,
        *,
        budget: Budget | None = None,
        progress: Progress | None = None,
        scheduled: Scheduled | None = None,
        lock: bool = False,
    ) -> None:
        self.subject, self.options, self.budget = subject, options, budget
        self.scheduled = scheduled
        """What a recipe became for this model."""
        self.lock = lock
        """Whether a plan beside a recipe has to be what became of it."""
        self.progress = progress or Progress(options.verbose)
        self.pipeline = pipeline_for(options, scheduled)
        self.room = room_of(options)
        """Where values may wait outside of the card; None: nowhere."""
        self.code: list[Any] = []
        """Regions that were compiled to measure plans, until one of the plans is lowered."""

    # ---- the stages ----

    def capture(self, reading: Reading | None, batch: Any = None, dims: Dims | None = None) -> Capture:
        """The whole step as it was written; raises CaptureRefused. Without a reading the loss is traced as plain Python."""
        return capture_whole(self.subject, reading, batch, dynamic=dims)

    def prepare(self, made: Capture) -> None:
        made.notes += self.pipeline.prepare(made, dump=self.options.dump)

    @in_one_piece
    def plan(self, prepared: Capture) -> Plan:
        """As asked; or for the budget; or for speed."""
        if self.options.plan is not None:
            if self.scheduled is not None and self.lock:
                return self.scheduled.beside(self.options.plan, prepared.graph)
            return self.options.plan
        device, backend = self.subject.device, self.options.backend
        pipeline = self.settled_pipeline
        if self.budget is None:
            planner: ForSpeed | Fitting = ForSpeed(pipeline, backend, device, self.room)
            planning: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        else:
            planner = Fitting(self.budget, pipeline, backend, device, self.code, self.room)
            planning = self.progress.stage("planning for the memory budget")
        with planning:
            plan = planner.plan(prepared)
        prepared.notes += planner.told
        return plan if self.scheduled is None else self.scheduled.settle(plan, prepared.graph)

    @property
    def settled_pipeline(self) -> Pipeline:
        """Carries out every plan with what the recipe says written over it."""
        return self.pipeline if self.scheduled is None else self.pipeline.settled(self.scheduled.settle)

    def apply(self, prepared: Capture, plan: Plan) -> None:
        prepared.notes += self.pipeline.carry_out_on(prepared, plan, dump=self.options.dump)

    @in_one_piece
    def lower(self, graph: TrainingGraph, backend: str | None = None) -> Any:
        """As it will run: the quicker of compiled and interpreted code, within the budget, as a CUDA graph where that pays."""
        with held_to(self.budget, self.subject.device):
            runner = self._measured(graph, backend or self.options.backend)
        self.code.clear()
        return runner

    # ---- several stages ----

    def program(self, reading: Reading | None, batch: Any = None, dims: Dims | None = None) -> Capture:
        """Captured to applied, or all of that from an earlier process."""
        with (
            self.progress.stage("capturing the step"),
            compat.no_collection(),
            held_to(self.budget, self.subject.device),
        ):
            return cached_capture(
                self.subject, reading, batch, self.finish, finished_by=self._finished_by(), missed=self._warm_up, dynamic=dims,
                enabled=self.options.cache,
            )  # fmt: skip

    def finish(self, made: Capture) -> None:
        """Prepared, planned, applied; refused where a pass cannot do without a size that only data tells."""
        try:
            self._finish(made)
        except compat.SizeFromData as error:
            raise CaptureRefused(compat.about_picked_places(error)) from error

    def _finish(self, made: Capture) -> None:
        self.prepare(made)
        plan = self.plan(made)
        layout = {**plan.layout, **layouts_of(made.graph)}
        made.plan = plan if layout == plan.layout else dataclasses.replace(plan, layout=layout)
        if plan.file and not self.options.folders:
            raise BadOption(f"{plan.file[0]} is to wait in a file", hint="name a folder for it: offload_path=...")
        self.apply(made, made.plan)

    def plan_for(self, captured: Capture) -> tuple[Plan, list[Note]]:
        """The plan that a captured step would get, and what was said on the way; the capture stays as it is."""
        if self.options.plan is not None:
            return self.options.plan, []
        own = captured.copied()
        self.pipeline.prepare(own)
        return self.plan(own), own.notes

    def changed(self, **options: Any) -> Compiler:
        """The same for other options, without a budget."""
        changed = dataclasses.replace(self.options, **options)
        return Compiler(self.subject, changed, progress=self.progress, scheduled=self.scheduled)

    def _warm_up(self) -> None:
        """A graph that is not known yet has code that is not compiled yet; else not even Inductor need be imported."""
        if self.options.backend == "inductor":
            warm_up(self.subject.device.type)

    def _finished_by(self) -> str | None:
        """What the passes and the plan depend on; None where that is more than can be named."""
        options = self.options
        if (
            self.room is not None
            or self.budget is not None
            or options.plan is not None
            or options.dump is not None
            or not options.plain
        ):
            return None
        device = self.subject.device
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        return f"{options.backend}, {card}"

    # ---- lowering ----

    def _measured(self, graph: TrainingGraph, backend: str) -> Any:
        if self.subject.device.type == "cpu":
            refuse_what_cannot_fit(graph, self.subject.optimizer, backend)
        chosen = tune_calls(graph)
        began = time.perf_counter()
        runner = self._compiled(graph) if backend == "inductor" else lower_interpret(graph, store=self.store)
        runner = runner.with_facts(choices={**chosen, **runner.describe().get("choices", {})})
        if self.options.dump is not None:
            self._dump_lowered(runner, backend, time.perf_counter() - began)
        returned = [output for output in graph.outputs if output.kind is not OutputKind.UPDATE]
        gradients = [i for i, output in enumerate(returned) if output.kind is OutputKind.GRADIENT]
        runner = self._within_budget(runner, gradients)
        if self.subject.device.type != "cuda" or self.options.cuda_graph is False or backend == "interpret":
            return runner
        if runner.describe().get("file_bytes"):
            return runner.with_facts(notes=[*runner.describe()["notes"], FILES_RUN_DIRECTLY])
        kind = CudaGraphsByShape if runner.describe().get("symbolic") else AutoCudaGraph
        batch, targets = graph.indices(Role.BATCH), {output.target for output in graph.outputs}
        written = [i for i in batch if i in targets]
        return kind(runner, batch, always=self.options.cuda_graph is True, lent=gradients, written=written)

    def _compiled(self, graph: TrainingGraph) -> Runner:
        try:
            with self.progress.stage("compiling"):
                runner = lower_inductor(graph, progress=self.progress.region, store=self.store)
        except CompilerMissing:
            warnings.warn("no C++ compiler on PATH: the step runs interpreted", WholestepWarning, stacklevel=2)
            return lower_interpret(graph, store=self.store)
        planned = self.budget is not None or "transfers" in runner.describe()
        if self.subject.device.type != "cpu" or planned:  # what was planned for is what runs
            return runner
        if not fits_beside(graph):
            return runner.with_facts(
                choices={"lowering": unmeasured("interpreted code beside it would not fit into memory")}
            )
        return faster_of(graph, runner, lower_interpret(graph))

    def _dump_lowered(self, runner: Runner, backend: str, seconds: float) -> None:
        facts, stages = runner.describe(), len(self.pipeline.passes) + len(self.pipeline.apply)
        effect = (
            f"{facts.get('regions', 0)} regions, {facts.get('unique_regions', 0)} compiled, the rest called directly"
        )
        dump_source(facts["driver"], str(self.options.dump), "lowered", stages + 1, f"lower_{backend}", seconds, effect)

    def _within_budget(self, runner: Runner, gradients: Sequence[int]) -> Runner:
        if self.budget is None or not self.budget.enforced:
            return runner
        give_back()  # what measuring and tuning left cached counts as taken from the card
        if gradients:  # p.grad, and an update of one's own, take memory beside the step, as much as they like
            return runner
        return runner.within(Enforced(self.budget, self.subject.device))

    @functools.cached_property
    def store(self) -> FileStore | None:
        """The files of what leaves the host's memory too."""
        return FileStore(self.options.folders) if self.options.folders else None

    @property
    def make_room(self) -> Callable[..., None] | None:
        """How recordings of other sizes give way; None where nothing is short."""
        if self.budget is None or not self.budget.enforced:
            return None
        return functools.partial(make_room, self.budget, self.subject.device)


def compiler_for(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    options: Options,
    batch: Any,
    *,
    dry: str | None = None,
) -> Compiler:
    """A Compiler for what a user hands over. `batch`: all that lies on the device beside the model, for a budget; `dry`: see
    `capture/dry.py`."""
    scheduled = None
    if dry is None:
        options.refuse_to_run()
    if options.recipe is not None:
        options, scheduled = with_recipe(options, recipe_of(options.recipe), root_of(model))
    _refuse_without_recipe(options.plan, scheduled)
    by_module = precisions_of(options, scheduled)  # captured in fp32, then mixed by the pass
    subject = make_subject(
        model, loss_fn, optimizer, precision="fp32" if by_module else options.precision, accumulate=options.accumulate,
        clip_norm=options.clip_norm, nonfinite=options.nonfinite, chunked_loss=options.chunks_loss, dry=dry,
    )  # fmt: skip
    if scheduled is not None:
        subject.edits, subject.ranks = scheduled.edits, scheduled.ranks
    elif options.mesh is not None:
        subject.ranks = Ranks(options.mesh)
    if subject.ranks.several and not subject.ranks.cuts:
        hint = 'every rank computes the whole step; cut some: sch["layers.*.up"].shard("weight", 0)'
        warnings.warn(f"{options.mesh}: no line of a recipe cuts a parameter: {hint}", WholestepWarning, stacklevel=3)
    refuse_in_parts(subject)
    optimizer = subject.optimizer
    if options.clip_scope != "global" and (optimizer is None or optimizers.supported(optimizer) is not None):
        raise BadOption("clip_scope='layer' without a captured update", hint="clip p.grad yourself")
    if dry is None:
        refuse_room(options, subject.device)
        with contextlib.suppress(CaptureRefused):  # a refusal is for the ladder to tell; an error is better early
            refuse_unsupported(subject)
    budget = None if options.memory is None else make_budget(options.memory, subject, flatten(batch)[0])
    if budget is not None:
        options = dataclasses.replace(options, dynamic=False)  # every size gets its own plan within the same budget
    return Compiler(subject, options, budget=budget, scheduled=scheduled, lock=True)


def with_recipe(options: Options, recipe: Recipe, root: torch.nn.Module) -> tuple[Options, Scheduled]:
    """What a recipe says about the whole step becomes options; what contradicts one that was given is an error that names both."""
    warn_of_changes(recipe, root)
    scheduled = resolve(recipe, root, options.mesh)
    if options.guards == "off" and (scheduled.edits.changes or scheduled.edits.rewrites):
        raise BadOption(f"guards='off' with {recipe.source}, which changes the forward pass", hint="leave guards out")
    found: dict[str, Any] = {}
    asked = {"precision": (scheduled.whole_precision, "fp32"), "cuda_graph": (scheduled.cuda_graph, None)}
    for name, (wish, default) in asked.items():
        given = getattr(options, name)
        if wish is not None and given not in (default, wish):
            line = next(
                line for line in recipe if line.name == ("cudagraph" if name == "cuda_graph" else name) and not line.at
            )
            raise BadOption(f"{name}={given!r} contradicts {recipe.place(line)}", hint="give one of them")
        found |= {} if wish is None else {name: wish}
    if scheduled.precision and found.get("precision", options.precision) == "fp16":
        raise BadOption("precisions of modules and fp16 for the whole step", hint="use bf16")
    cached = options.cache and not scheduled.by_function
    return dataclasses.replace(options, recipe=recipe, cache=cached, **found), scheduled


def precisions_of(options: Options, scheduled: Scheduled | None) -> dict[str, str]:
    """Module or pattern -> its precision, as a plan or a recipe says."""
    return {
        **({} if options.plan is None else options.plan.precision),
        **({} if scheduled is None else scheduled.precision),
    }


def _refuse_without_recipe(plan: Plan | None, scheduled: Scheduled | None) -> None:
    """A plan that was made with a recipe is of no use without it."""
    if plan is not None and plan.stages:
        raise NotBuiltYet("a plan with stages: pipelines are not part of this version", hint="take [stages] out of it")
    lost = [] if plan is None or scheduled is not None else [*plan.replace, *plan.shard]
    if lost:
        verb = "replaces" if plan is not None and lost[0] in plan.replace else "cuts"
        raise BadOption(
            f"the plan was made with a recipe that {verb} {lost[0]}", hint="give the recipe too: recipe=..."
        )


def pipeline_for(options: Options, scheduled: Scheduled | None = None) -> Pipeline:
    """The passes asked for, as the other options change them."""
    passes, plan = options.passes, options.plan
    pipeline = passes if isinstance(passes, Pipeline) else default_pipeline(extra=passes or ())
    precisions = precisions_of(options, scheduled)
    if precisions:
        mixed = functools.partial(amp, precision=options.precision, modules=precisions)
        pipeline = pipeline.at_the_place_of("fold_constants", mixed)
    if plan is not None and plan.layout:
        pipeline = pipeline.replaced("channels_last", functools.partial(channels_last, asked=plan.layout))
    if options.clip_scope == "layer":
        pipeline = pipeline.replaced("update_early", functools.partial(update_early, clip="layer", min_bytes=1))
    early = "update_early" in [*map(name_of, pipeline.passes), *map(name_of, pipeline.apply)]
    return pipeline.without("update_early") if early and options.early_update is False else pipeline
