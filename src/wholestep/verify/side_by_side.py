"""One training step beside its references: captured and lowered as `compile` does it, eager, and eager in float64.

In goes a batch; the captured step runs on the live state, the references on the state before it; out come the rows of
the report. The captured graph is kept as it was before any pass, so that a failed step can be run again with fewer of
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from wholestep.capture.batch import flatten
from wholestep.capture.front import Front, LossGraph
from wholestep.capture.front.loss_graph import AUX, LOSS
from wholestep.capture.ladder import WHOLE, Fall
from wholestep.capture.preflight import autocast_for
from wholestep.capture.reading import Reading, read
from wholestep.capture.trace import Capture
from wholestep.capture.tracer import ACCUMULATED_WEIGHT
from wholestep.capture.undo import RandomStates
from wholestep.compiler import Compiler
from wholestep.errors import CaptureRefused, CompilerMissing
from wholestep.graph.copies import without_updates
from wholestep.graph.plan import Plan
from wholestep.graph.printer import fingerprint
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.lower import lower_inductor, lower_interpret
from wholestep.passes.pipeline import Pipeline
from wholestep.runtime import shapes as shape_rules
from wholestep.runtime.eager import combine
from wholestep.runtime.random import chosen_seed, seeded_generator
from wholestep.runtime.variant import Variant
from wholestep.verify.blame import departing_boundary, departure, guilty_pass
from wholestep.verify.optimizer_check import optimizer_rows
from wholestep.verify.reference import (
    Reference,
    own_batch,
)
from wholestep.verify.report import Departure, Report, TensorRow
from wholestep.verify.state import StateCopy
from wholestep.verify.truth import VALUES, Batch, References, Truth

BOUNDARY_SLACK = {"interpret": 1.0, "inductor": 8.0}


@dataclasses.dataclass(slots=True)
class Made:
    """A captured step, ready to run."""

    captured: Capture
    """Before any pass."""
    reading: Reading | None
    """None where the loss was traced as plain Python."""
    pipeline: Pipeline
    """All passes, bound to the plan for this step."""
    variant: Variant
    watched: Watched
    args: Sequence[Any] = ()
    numbers: Sequence[Any] = ()
    """Of the latest run."""


class Watched:
    """A runner that keeps the watched values of its latest call."""

    def __init__(self, runner: Any, num_outputs: int, names: Sequence[str], copies: bool) -> None:
        self.runner, self.num_outputs, self.names, self.copies = runner, num_outputs, tuple(names), copies
        self.values: dict[str, torch.Tensor] = {}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        results = self.runner(inputs)
        values = results[self.num_outputs :]
        self.values = dict(zip(self.names, [v.clone() for v in values] if self.copies else values, strict=True))
        return results[: self.num_outputs]


def lower_watched(graph: TrainingGraph, backend: str, watch: dict[str, str], *, copies: bool = False) -> Watched:
    """`watch` maps names of ours to nodes; `copies` where the caller of the step changes what it returns."""
    lower = lower_interpret if backend == "interpret" else lower_inductor
    num_outputs = sum(1 for entry in graph.outputs if entry.target is None)
    return Watched(lower(graph, watch=list(watch.values())), num_outputs, list(watch), copies)


class SideBySide:
    """Runs steps of one subject and compares each with its references."""

    def __init__(self, compiler: Compiler, report: Report) -> None:
        self.compiler, self.subject, self.report = compiler, compiler.subject, report
        self.backend, self.seed = compiler.options.backend, chosen_seed(compiler.options.seed)
        self.references = References(self.subject, self.seed, report)
        self.plan = Plan()
        """The latest one made."""
        self.front = Front(self.subject, dynamic=True if compiler.options.dynamic is True else None)
        self.gradients: dict[str, torch.Tensor] = {}
        """Where micro-batches add up; the second may run another graph than the first, in which the model set something."""
        self.made: dict[tuple, Made] = {}
        """By graph of the loss and shapes of what a call brings."""

    # ---- capture and lowering ----

    def make(self, batch: Batch) -> Made | None:
        """Capture for this batch, nothing runs; None when only lower rungs are left."""
        micro = batch.micro[0]
        for attempt in range(3):
            try:
                if self.compiler.options.guards == "off":
                    return self._traced(micro)
                return self.front.look(micro, lambda graph, args: self._made(graph, args, micro))
            except CaptureRefused as refused:
                if self.front.specialise(refused):
                    continue
                if refused.curable and attempt == 0:  # as `compile` does: one real run of the loss, then again
                    self._run_eagerly(micro)
                    continue
                fall = Fall(WHOLE, refused.reason, refused.where)
                self.report.falls += () if fall in self.report.falls else (fall,)
                return None
        return None

    def _traced(self, micro: Any) -> Made:
        """With guards="off": the user's Python as it ran once."""
        tensors, spec = flatten(micro)
        key = (spec, tuple(t.shape for t in tensors), self.subject.root.training)
        if key not in self.made:
            self.made[key] = self._planned(None, micro)
            self.made[key].variant.brought = list(range(len(tensors)))
        return self.made[key]

    def _run_eagerly(self, micro: Any) -> None:
        randomness = RandomStates()
        with autocast_for(self.subject), torch.enable_grad():
            self.subject.loss_fn(self.subject.model, micro)
        randomness.restore()

    def _made(self, graph: LossGraph, args: tuple, micro: Any) -> Made:
        reading = read(self.subject, graph, args, micro)
        shapes = [arg.shape for arg, place in zip(args, reading.places, strict=True) if place is not None]
        key = (graph, reading.places, tuple(shapes))
        if key not in self.made:
            self.made[key] = self._planned(reading, micro)
        return self.made[key]

    def _planned(self, reading: Reading | None, micro: Any) -> Made:
        captured = self._captured(reading, micro, self._dims(reading))
        self.plan, told = self.compiler.plan_for(captured)
        pipeline = self.compiler.pipeline.bound(self.plan)
        for line in told:
            self.report.note(line)
        try:
            made = self.lowered(captured, reading, pipeline, self.backend, dump=self.compiler.options.dump)
        except CompilerMissing as missing:
            self.report.note(f"checked on backend 'interpret': {missing.what}")
            self.backend = self.report.backend = "interpret"
            made = self.lowered(captured, reading, pipeline, self.backend)
        self.report.programs.append(fingerprint(made.variant.capture.graph))
        return made

    def _captured(self, reading: Reading | None, micro: Any, dims: Any) -> Capture:
        try:
            return self.compiler.capture(reading, micro, dims)
        except CaptureRefused as refused:
            if dims is None:
                raise
            self.report.note(f"sizes stay static: {refused}")
        return self.compiler.capture(reading, micro)

    def _dims(self, reading: Reading | None) -> Any:
        if self.compiler.options.dynamic is not True or reading is None:
            return None
        shapes = tuple(tuple(tensor.shape) for tensor in reading.tensors(Role.BATCH))
        dims = shape_rules.all_symbolic(shapes)
        return dims if shape_rules.may_vary(shapes, dims) else None

    def lowered(
        self, captured: Capture, reading: Reading | None, pipeline: Pipeline, backend: str, *, dump: str | None = None
    ) -> Made:
        capture = captured.copied()
        pipeline.run_on(capture, dump=dump)
        graph = capture.graph
        made: list[Watched] = []

        def lower(each: TrainingGraph) -> Watched:
            watch = graph.gradients if each is graph else {}
            made.append(lower_watched(each, backend, watch, copies=not captured.plans))
            return made[-1]

        variant = Variant(self.subject, capture, reading, lower, gradients=self.gradients)
        return Made(captured, reading, pipeline, variant, made[0])

    # ---- one step ----

    def step(self, made: Made, batch: Batch, truth: Truth, before: StateCopy, backend: str) -> list[TensorRow]:
        """Run the captured step on the live state; `before` is a copy of that state."""
        subject = self.subject
        for parameter in subject.trained.values():
            parameter.grad = None
        scale = None if subject.loss_scale is None else subject.loss_scale.on(subject.device)[0].clone()
        (loss, aux), made = self._run(made, batch)
        variant = made.variant
        gradients = self._gradients(made)
        if scale is not None:
            gradients = {n: g / scale for n, g in gradients.items()}
        rows = self._rows(
            batch, truth, "random", {"draws": _count(made.captured.num_sites)}, lambda r: {"draws": _count(r.draws)}
        )
        buffers = dict(subject.root.named_buffers())
        ours = {"loss": {"loss": loss}, "aux": aux, "gradient": gradients, "buffer": buffers}
        for kind, values in ours.items():
            rows += self._rows(batch, truth, kind, values, VALUES[kind])
        scope = self.compiler.options.clip_scope
        if variant.capture.plans and scope != "global":
            self.report.note(f"updates are not compared: clip_scope={scope!r} is not torch's clipping")
        elif variant.capture.plans:
            # a norm of parts, and torch's fused kernel at the end of a part, round differently
            strict = backend == "interpret" and subject.device.type == "cpu" and not subject.ranks.several
            starts = before.values | truth.eager.written
            rows += optimizer_rows(subject, before, starts, gradients, batch.label, exact=strict)
        return rows

    def _run(self, made: Made, batch: Batch) -> tuple[Any, Made]:
        """The captured step on the live state, micro-batch by micro-batch, and its update; (loss, aux), and what ran."""
        subject = self.subject
        for gradient in made.variant.binding.gradients.values():
            gradient.zero_()
        results, norms, handed, ran = [], [], [], []
        for index, micro in enumerate(batch.micro):

            def call(used: Made, args: Sequence[Any], numbers: Sequence[Any], index: int = index) -> dict[str, Any]:
                used.variant.begin(args)
                named, gradients, norm = used.variant.micro(args, numbers, self.seed, batch.count, index)
                norms.append(norm)
                handed.append(gradients)
                used.args, used.numbers = args, numbers
                ran.append(used)
                return named

            def run(graph: LossGraph, args: tuple, micro: Any = micro, call: Any = call) -> tuple:
                numbers, returned = graph.host(args)
                known = made.reading is not None and graph is made.reading.graph
                values = call(made if known else self._made(graph, args, micro), args, numbers)
                return graph.results(values, returned, args)

            own = own_batch(micro)  # a step may write to it
            if made.reading is None:
                traced = self._traced(micro)
                named = call(made if traced.captured is made.captured else traced, flatten(own)[0], ())
                results.append((named[LOSS], named[AUX]))
            else:
                results.append(self.front(own, run))
        variant = ran[-1].variant
        if handed[-1]:
            variant.hand_over(handed[-1])
        if subject.accumulate == 1:
            variant.finish(norms[-1])
        elif variant.update_runner is not None:
            variant.finish(variant.update())
        else:
            variant.hand_over(dict(variant.binding.gradients))
            if subject.optimizer is not None:
                variant.finish(None)
        return combine(results), ran[-1]

    def _gradients(self, made: Made) -> dict[str, torch.Tensor]:
        """What reached the optimizer, or `p.grad`."""
        subject, binding = self.subject, made.variant.binding
        names = made.variant.capture.graph.gradients
        if subject.optimizer is None:
            return {n: p.grad for n, p in subject.trained.items() if p.grad is not None}
        if subject.accumulate == 1:
            # a gradient may be kept narrower than its parameter, to be widened by the update
            return {n: g.to(subject.parameters[n].dtype) for n, g in made.watched.values.items()}
        weight = binding.gradients.get(ACCUMULATED_WEIGHT)
        totals = {n: binding.gradients[n] for n in names}
        return {n: g.clone() if weight is None else (g / weight).to(g.dtype) for n, g in totals.items()}

    def _rows(
        self,
        batch: Batch,
        truth: Truth,
        kind: str,
        ours: Mapping[str, Any],
        of: Callable[[Reference], Mapping[str, Any]],
    ) -> list[TensorRow]:
        """One row per name that either side has; `of` picks the values out of a reference."""
        eager, exact = of(truth.eager), {} if truth.exact is None else of(truth.exact)
        rows = []
        for name in dict.fromkeys([*eager, *ours]):
            found = truth.rule.compare(ours.get(name), eager.get(name), exact.get(name), gradient=kind == "gradient")
            rows.append(TensorRow(batch.label, kind, str(name), found.error, found.tolerance, found.bitwise))
        return rows

    # ---- when it fails ----

    def blame(self, made: Made, batch: Batch, before: StateCopy, rows: list[TensorRow]) -> Departure:
        """Run the failed step again from where it began: with module outputs watched, then with fewer passes."""
        before.restore()
        found = departure(made.variant.capture.graph, rows, self._boundary(made, batch))
        before.restore()
        truth = self.references.truth(made.captured, made.variant.capture.graph, batch)

        def fails(count: int) -> bool:
            before.restore()
            probe = self.lowered(made.captured, made.reading, made.pipeline.first(count), "interpret")
            probe.variant.brought = made.variant.brought  # without guards nobody has read what a call brings
            rows = self.step(probe, batch, truth, before, "interpret")
            before.restore()
            return not all(row.ok for row in self.references.measured_again(probe.captured, batch, truth, rows))

        guilty = guilty_pass(made.pipeline, fails, self.backend)
        return dataclasses.replace(found, guilty_pass=guilty)

    def _boundary(self, made: Made, batch: Batch) -> Any:
        """The first module whose output departs, on the first micro-batch."""
        variant = made.variant
        if not made.args and made.reading is None:  # traced without guards: the tensors of the batch
            made.args = flatten(own_batch(batch.micro[0]))[0]
        if not made.args:
            return None  # another graph ran
        first = dataclasses.replace(batch, micro=batch.micro[:1])
        truth = self.references.truth(made.captured, variant.capture.graph, first, keep_outputs=True)
        bare = without_updates(variant.capture.graph)
        runner = lower_watched(bare, self.backend, bare.boundaries)
        args = [a.detach().clone() if i in variant.brought else a for i, a in enumerate(made.args)]
        variant.begin(args)
        variant.feed(self.seed, batch.count, 0, made.numbers)
        inputs = variant.inputs(args)
        with seeded_generator(self.subject.device, self.seed, batch.count, 0):
            runner(inputs)
        return departing_boundary(runner.values, truth.eager, truth.exact, truth.rule, BOUNDARY_SLACK[self.backend])


def _count(number: int) -> torch.Tensor:
    return torch.tensor(number)
