"""Tracing: a loss with its backward and update, run on fake tensors, becomes one functional graph.

Two make_fx passes. The first runs the step with autograd inside and records aten operators, mutations and all. Where something
mutates, the second replays that record through functionalisation (legal now, no autograd is left), which turns every write
into a value. What is traced is Dynamo's graph of the loss, so no code of the user's runs here; with `guards="off"` it is the
user's own code, once, and what it read is fixed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep import compat
from wholestep.capture.absent import Absent
from wholestep.capture.assemble import assemble, functional, lift_constants
from wholestep.capture.chunked_loss import WHOLE_LOGITS_BYTES
from wholestep.capture.facts import about_places, divisors, kept_dimensions, look_at
from wholestep.capture.front.quiet import quiet
from wholestep.capture.front.replay import Assumed
from wholestep.capture.nonfinite import keep_all, keep_buffers
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.provenance import attribute_backward
from wholestep.capture.reading import Reading
from wholestep.capture.repeats import longest_run
from wholestep.capture.sites import Sites, TooFewKeys
from wholestep.capture.subject import Subject
from wholestep.capture.tracer import ACCUMULATED_WEIGHT, FACT, HOLDS, Tracer, WeightUnknown
from wholestep.capture.write_out import NotAlike, write_out
from wholestep.errors import BadOption, CaptureRefused
from wholestep.frames import in_one_piece
from wholestep.graph.copies import copy_graph
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

UNKNOWN_CALLS = 64
"""Random calls that keys are made for where the user's own code is traced; where there are more, it is traced again."""


@dataclasses.dataclass(slots=True)
class Capture:
    """A captured step: its graph(s) and what the runtime must know to feed them."""

    graph: TrainingGraph
    """The whole step; with accumulation the micro-step, whose update is `update`."""
    update: TrainingGraph | None
    aux_names: tuple[Any, ...]
    num_sites: int
    plans: tuple[UpdatePlan, ...]
    constants: tuple[torch.Tensor, ...]
    """The live tensors behind the CONSTANT inputs: those that a call brings, then those of the graph itself."""
    notes: list[Note]
    used: tuple[str, ...] = ()
    """The parameters that get a gradient."""
    symbols: dict[str, Any] = dataclasses.field(default_factory=dict)
    guards: list[Any] = dataclasses.field(default_factory=list)
    """Facts about symbolic sizes that the trace relied on."""
    fake_mode: Any = None
    rung: str = "whole step"
    from_cache: bool = False
    key: str | None = None
    """Under which it is kept on disk, finished: with its passes and its plan."""
    assumed: tuple[str, ...] = ()
    """Where in the user's code something about data is taken for granted, as output HOLDS tells."""
    facts: tuple[str, ...] = ()
    """Where sizes that data decides have to fit something."""
    plan: Plan | None = None
    """What the passes carried out, where a plan was asked for."""

    def copied(self) -> Capture:
        """The same with graphs of its own, to be rewritten; what was said of it is not taken over."""
        update = None if self.update is None else copy_graph(self.update)
        return dataclasses.replace(self, graph=copy_graph(self.graph), update=update, notes=[])


@in_one_piece
def capture(
    subject: Subject,
    reading: Reading | None,
    batch: Any = None,
    *,
    dynamic: Sequence[dict[int, str]] | None = None,
    whole_logits_bytes: int = WHOLE_LOGITS_BYTES,
) -> Capture:
    """Trace the step for one reading of its arguments. Raises CaptureRefused when the trace would not be the step."""
    began = time.perf_counter()
    if reading is not None:
        _check_surroundings(subject, reading)
    keys = 8 + (UNKNOWN_CALLS if reading is None else reading.graph.random_calls())
    aux_names: tuple[Any, ...] = ()
    run = None if reading is None or dynamic else longest_run(reading.graph.module.graph, reading.graph.paths)
    while True:
        tracer = Tracer(subject, reading, batch, dynamic=dynamic, whole_logits_bytes=whole_logits_bytes, run=run)
        tracer.aux_names = aux_names
        try:
            with compat.ONE_AT_A_TIME, quiet():
                tracer.add_inputs(keys)
                graph, constants = _trace(tracer)
            break
        except TooFewKeys:
            keys *= 4
        except WeightUnknown:
            aux_names = tracer.aux_names
        except NotAlike:
            run = None
    update = None
    if subject.accumulate > 1 and tracer.captured_update:
        update = _trace_update(tracer)
    graph.seconds = time.perf_counter() - began
    num_sites = sum(1 for entry in graph.inputs if entry.role is Role.KEY)
    if reading is not None:
        if reading.graph.checkpoints:
            aside = "activation checkpointing set aside: the whole step is planned by Wholestep"
            tracer.notes.append(Note("capture", aside))
        constants = (*reading.tensors(Role.CONSTANT), *constants)
    return Capture(
        graph, update, tracer.aux_names, num_sites, tuple(tracer.plans), constants, tracer.notes, tuple(tracer.used),
        tracer.symbols, compat.shape_guards(tracer.mode), tracer.mode,
        assumed=tuple(one.where or "" for one in tracer.assumed), facts=tuple(one.where or "" for one in tracer.facts),
    )  # fmt: skip


def _check_surroundings(subject: Subject, reading: Reading) -> None:
    """Two autocasts, hooks beside a loss scale: requests that cannot both be honoured."""
    entered = reading.graph.enters_autocast
    if subject.precision != "fp32" and entered > 1:
        raise BadOption(
            f"precision={subject.precision!r} and loss_fn enters torch.autocast itself",
            hint="use one of the two: drop the autocast, or leave precision='fp32'",
        )
    if subject.loss_scale is not None and any(p._backward_hooks for p in subject.trained.values()):
        raise CaptureRefused("hooks on parameters would see gradients without the loss scale of precision='fp16'")


def _trace(tracer: Tracer) -> tuple[TrainingGraph, tuple[torch.Tensor, ...]]:
    order, traced = tracer.order, list(tracer.fakes)
    meanings: list[Output] = []
    drawn = 0

    def whole(*flat: torch.Tensor) -> list[Any]:
        nonlocal drawn
        values = dict(zip(traced, flat, strict=True))
        sites = Sites([values[e] for e in traced if e.role is Role.KEY], tracer.ranks.mesh)
        outputs, described = tracer.step(values, sites)
        meanings[:], drawn = described, sites.used
        return outputs

    with compat.counts_are_large(tracer.mode):
        recorded = compat.trace(whole, list(tracer.fakes.values()), mode=tracer.mode)
    asked, relied = {one.fact for one in tracer.facts}, _relied_on(tracer, recorded)
    if tracer.watch is not None and relied - asked:
        raise NotAlike  # of few layers the looks would be copied with them
    attribute_backward(recorded)
    if tracer.watch is not None:
        recorded = write_out(recorded, tracer.watch, order, meanings)
        drawn += tracer.watch.more_keys
    first = sum(entry.role is Role.CONSTANT for entry in order)
    constants = lift_constants(recorded, tracer.subject, tracer.mode)
    inputs = order + [Input(Role.CONSTANT, f"constant{first + i}") for i in range(len(constants))]

    def fakes() -> list[torch.Tensor]:
        return [*tracer.fakes_of_all(), *(compat.to_fake(tracer.mode, c) for c in constants)]

    known = compat.facts_of_data(tracer.mode)
    module, names = functional(recorded, fakes, tracer.mode)
    facts = {fact.xreplace(names) for fact in asked | relied} | (_relied_on(tracer, module) - known)
    _look_at_facts(tracer, module, meanings, facts, names)
    graph = assemble(module, inputs, meanings, num_sites=drawn)
    graph.target, graph.ranks = tracer.subject.target, tracer.ranks
    if tracer.subject.nonfinite == "skip":
        keep_buffers(graph)
    if tracer.holds is not None:
        keep_all(graph, HOLDS)
    return graph, constants


def _relied_on(tracer: Tracer, trace: fx.GraphModule) -> set[Any]:
    """The facts about sizes that only data tells, but for those that hold of themselves."""
    facts = compat.facts_of_data(tracer.mode) | divisors(trace) | kept_dimensions(trace)
    return facts - about_places(trace, facts)


def _look_at_facts(
    tracer: Tracer, module: fx.GraphModule, meanings: list[Output], facts: set[Any], names: dict[Any, Any]
) -> None:
    """At those at which nothing in the last tracing looks: of a look of the user's own it leaves `require(1)` where torch takes the
    fact for granted."""
    values = next(iter(reversed(module.graph.nodes))).args[0]
    looks_of = {m.name: v for v, m in zip(values, meanings, strict=True) if m.name.startswith(FACT)}
    live = [one.fact for i, one in enumerate(tracer.facts) if isinstance(looks_of[f"{FACT}{i}"].args[0], fx.Node)]
    seen = {fact.xreplace(names) for fact in live}
    unseen = {fact for fact in facts - seen if fact.free_symbols}
    looks = look_at(module, unseen, tracer.subject.device, tracer.mode)
    meanings += [Output(OutputKind.KEPT, f"{FACT}{len(tracer.facts) + i}") for i in range(len(looks))]
    tracer.facts += [Assumed(look, None, fact) for fact, look in looks.items()]
    if missed := unseen - set(looks):
        raise CaptureRefused(
            "a number n that only data tells (how many places a mask picks, a value read by .item()) has to be such that "
            f"{' and '.join(sorted(compat.in_python(str(fact)) for fact in missed))}, and nothing looks whether it is"
        )


def _trace_update(tracer: Tracer) -> TrainingGraph:
    """The second graph of an accumulating step: accumulated gradients to clipped update."""
    subject = tracer.subject
    weighted = Input(Role.GRADIENT, ACCUMULATED_WEIGHT)
    update = Tracer.__new__(Tracer)
    update.subject, update.plans, update.mode, update.captured_update = subject, tracer.plans, tracer.mode, True
    update.ranks = tracer.ranks
    update.holds = update.go = None  # looked at before the update
    update.absent = Absent({})
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
    recorded, _ = functional(compat.trace(whole, fakes, mode=tracer.mode), lambda: fakes, tracer.mode)
    graph = assemble(recorded, update.order, meanings)
    graph.ranks = tracer.ranks
    return graph
