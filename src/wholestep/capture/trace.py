"""Tracing: a step is run on fake tensors, twice, and becomes one functional graph if both runs agree.

Two make_fx passes. The first runs the step with autograd inside and records aten operators, mutations and all. Where something
mutates, the second replays that record through functionalisation (legal now, no autograd is left), which turns every write
into a value.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep import compat
from wholestep.capture.assemble import LeakedFake, functional, lift_constants
from wholestep.capture.batch import BatchSpec
from wholestep.capture.chunked_loss import WHOLE_LOGITS_BYTES
from wholestep.capture.guards import Guards
from wholestep.capture.nonfinite import keep_buffers
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.preflight import set_aside
from wholestep.capture.provenance import attribute_backward
from wholestep.capture.python_random import python_randomness_watched, refuse_drawn, reseed
from wholestep.capture.reach import reached
from wholestep.capture.sites import Sites
from wholestep.capture.snapshot import Snapshot, frozen, leftover_fakes, same_content
from wholestep.capture.subject import Subject
from wholestep.capture.tracer import ACCUMULATED_WEIGHT, Tracer
from wholestep.errors import CaptureRefused
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Input, Output, Role, TrainingGraph


@dataclasses.dataclass(slots=True)
class Capture:
    """A captured step: its graph(s) and what the runtime must know to feed them."""

    graph: TrainingGraph
    """The whole step; with accumulation the micro-step, whose update is `update`."""
    update: TrainingGraph | None
    batch_spec: BatchSpec
    aux_names: tuple[str, ...]
    num_sites: int
    plans: tuple[UpdatePlan, ...]
    constants: tuple[torch.Tensor, ...]
    """The live tensors behind the CONSTANT inputs."""
    notes: list[str]
    symbols: dict[str, Any] = dataclasses.field(default_factory=dict)
    guards: list[Any] = dataclasses.field(default_factory=list)
    fake_mode: Any = None
    rung: str = "whole step"
    from_cache: bool = False
    plan: Plan | None = None
    """What the passes carried out, where a plan was asked for."""
    settled: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Attributes that the first live forward will set, to values with which this capture holds all the same."""


def capture(
    subject: Subject,
    batch_tensors: Sequence[torch.Tensor],
    batch_spec: BatchSpec,
    *,
    dynamic: Sequence[dict[int, str]] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    whole_logits_bytes: int = WHOLE_LOGITS_BYTES,
) -> Capture:
    """Trace the step. Raises CaptureRefused when the trace would not be the step; leaves the modules as they were."""
    began = time.perf_counter()
    foreign = reached(subject)[1]
    snapshot = Snapshot(subject.root, foreign)
    with python_randomness_watched(), set_aside(subject) as seen:
        try:
            tracer, graph, constants = _trace_faithfully(
                subject, batch_tensors, batch_spec, snapshot,
                dynamic=dynamic, loss_fn=loss_fn, whole_logits_bytes=whole_logits_bytes,
            )  # fmt: skip
        finally:
            snapshot.restore()
    leaked = leftover_fakes(subject.root, foreign)
    assert not leaked, f"fake tensors left on {leaked}"
    update = None
    if subject.accumulate > 1 and tracer.captured_update:
        update = _trace_update(tracer)
    graph.seconds = time.perf_counter() - began
    num_sites = sum(1 for entry in tracer.order if entry.role is Role.KEY)
    return Capture(
        graph, update, batch_spec, tracer.aux_names, num_sites, tuple(tracer.plans), constants,
        seen.notes + tracer.notes, tracer.symbols, compat.shape_guards(tracer.mode), tracer.mode, settled=tracer.settled,
    )  # fmt: skip


def _trace_faithfully(
    subject: Subject, batch_tensors: Any, batch_spec: Any, snapshot: Snapshot, **options: Any
) -> tuple[Tracer, TrainingGraph, tuple[torch.Tensor, ...]]:
    """Run the forward twice, with other seeds and without tidying up between: only then is what repeats the step.

    An attribute that the first run stores and the second only reads is a cache: the trace is made again from a clean start, so
    that the cache is computed inside the graph. One that every run replaces carries state from step to step: refused.
    """
    tracer = Tracer(subject, batch_tensors, batch_spec, **options)
    watched = Guards(subject)
    readings = [watched.attributes()]
    first = _rehearse(tracer)
    readings.append(watched.attributes())
    stored = {str(c): frozen(c.value) for c in snapshot.changes()}
    try:
        graph, constants = _trace_once(tracer)
        difference = None if tracer.fingerprint == first else "its second run does other operations than its first"
    except (LeakedFake, IndexError) as error:
        difference = str(error)
    rewritten = [c for c in snapshot.changes() if str(c) not in stored or not same_content(stored[str(c)], c.value)]
    if difference is None:
        for change in rewritten:
            tracer.notes.append(f"{change} changes in every forward: its Python value is fixed in the captured step")
        tracer.settled = _settled(readings[0], readings[1], watched.attributes())
        return tracer, graph, constants
    if rewritten or not stored:
        what = f"{rewritten[0]} is carried from one call to the next" if rewritten else difference
        raise CaptureRefused(f"the forward depends on Python state: {what}")
    snapshot.restore()  # caches only: trace again with cold caches, as the first run was
    tracer = Tracer(subject, batch_tensors, batch_spec, **options)
    _rehearse(tracer)
    snapshot.restore()
    graph, constants = _trace_once(tracer)
    if tracer.fingerprint != first:
        raise CaptureRefused("the forward does other operations at every call")
    tracer.notes.append(f"computed inside the step, not cached between steps: {', '.join(sorted(stored)[:3])}")
    return tracer, graph, constants


def _settled(before: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What a forward sets and then leaves (a config's `problem_type`): the second run, with it set, did the same."""
    kept = (str, int, float, bool, type(None))
    return {n: v for n, v in first.items() if isinstance(v, kept) and v != before[n] and v == second[n]}


def _rehearse(tracer: Tracer) -> list[tuple]:
    """The forward on fakes, untraced: counts the random sites and leaves a fingerprint."""
    reseed(1)
    with tracer.mode:
        sites = Sites(stand_in=torch.empty((), dtype=torch.int64, device=tracer.subject.device))
    with compat.fake_run(tracer.mode):
        run, _ = tracer.forward(tracer.fakes, sites, tracing=False)
    refuse_drawn(1)
    tracer.aux_names = tuple(run.aux)
    if run.unrolled:
        tracer.notes.append("a recurrent layer is unrolled over its time steps: the graph grows with the sequence")
    tracer.notes += run.losses
    if tracer.subject.chunked_loss and not run.losses:
        tracer.notes.append("chunked_loss=True: no cross-entropy over the output of a linear layer was recognised")
    tracer.add_inputs(sites.used)
    return run.fingerprint


def _trace_once(tracer: Tracer) -> tuple[TrainingGraph, tuple[torch.Tensor, ...]]:
    reseed(2)
    order = tracer.order
    meanings: list[Output] = []

    def whole(*flat: torch.Tensor) -> list[Any]:
        values = dict(zip(order, flat, strict=True))
        keys = [values[e] for e in order if e.role is Role.KEY]
        outputs, described = tracer.step(values, Sites(keys))
        meanings[:] = described
        return outputs

    fakes = [tracer.fakes[e] for e in order]
    recorded = compat.trace(whole, fakes, mode=tracer.mode)
    attribute_backward(recorded)
    constants = lift_constants(recorded, tracer.subject, tracer.mode)
    inputs = order + [Input(Role.CONSTANT, f"constant{i}") for i in range(len(constants))]
    fakes = fakes + [compat.to_fake(tracer.mode, c) for c in constants]
    graph = functional(recorded, fakes, inputs, meanings, tracer.mode)
    graph.for_gpu = tracer.subject.on_gpu
    if tracer.subject.nonfinite == "skip":
        keep_buffers(graph)
    return graph, constants


def _trace_update(tracer: Tracer) -> TrainingGraph:
    """The second graph of an accumulating step: accumulated gradients to clipped update."""
    subject = tracer.subject
    weighted = Input(Role.GRADIENT, ACCUMULATED_WEIGHT)
    update = Tracer.__new__(Tracer)
    update.subject, update.plans, update.mode, update.captured_update = subject, tracer.plans, tracer.mode, True
    update.fakes = {Input(Role.PARAMETER, n): tracer.fakes[Input(Role.PARAMETER, n)] for n in tracer.used}
    with tracer.mode:
        update.add_update_inputs(subject.device)
    update.fakes |= {Input(Role.GRADIENT, n): tracer.fakes[Input(Role.GRADIENT, n)] for n in tracer.used}
    if weighted in tracer.fakes:
        update.fakes[weighted] = tracer.fakes[weighted]
    update.order = list(update.fakes)
    update.place = {entry: i for i, entry in enumerate(update.order)}
    meanings: list[Output] = []

    def whole(*flat: torch.Tensor) -> list[Any]:
        values = dict(zip(update.order, flat, strict=True))
        with torch.no_grad(), compat.annotate(phase="update"):
            grads = {n: values[Input(Role.GRADIENT, n)] for n in tracer.used}
            if weighted in values:
                grads = {n: (g / values[weighted]).to(g.dtype) for n, g in grads.items()}
            results = update.updated(values, grads)
        meanings[:] = [m for _, m in results]
        return [v for v, _ in results]

    fakes = list(update.fakes.values())
    recorded = compat.trace(whole, fakes, mode=tracer.mode)
    return functional(recorded, fakes, update.order, meanings, tracer.mode)
