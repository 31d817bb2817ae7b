"""`wholestep.verify`: train a few steps beside eager PyTorch and report every value that is not the same.

Each step starts both sides from one state: the captured step runs on the live model and optimizer, the references on
that same state before it, so errors do not pile up from step to step. At the end model, optimizer and random
generators are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture.batch import split_batch
from wholestep.capture.subject import Subject, make_subject
from wholestep.capture.undo import RandomStates
from wholestep.errors import BadBatch, BadOption
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.verify.report import Report
from wholestep.verify.side_by_side import Batch, Planner, SideBySide
from wholestep.verify.state import StateCopy

BACKENDS = ("inductor", "interpret")
PRECISIONS = ("fp32", "bf16", "fp16")


def verify(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    batches: Any,
    *,
    steps: int = 5,
    edge_batches: Sequence[Any] = (),
    precision: str = "fp32",
    clip_norm: float | None = None,
    accumulate: int = 1,
    chunked_loss: bool | None = None,
    plan: Plan | Planner | None = None,
    backend: str = "inductor",
    passes: Pipeline | Sequence[Callable[[TrainingGraph], TrainingGraph]] | None = None,
    seed: int | None = None,
    eval_too: bool = True,
) -> Report:
    """Compare losses, aux, gradients, buffers and updates of the captured step with eager PyTorch.

    Args:
        model, loss_fn, optimizer, precision, clip_norm, accumulate, chunked_loss, backend, passes: as for
            `wholestep.compile`; eager PyTorch always computes the loss from whole logits. In fp16 both sides scale the loss
            alike, and gradients are compared unscaled.
        batches: one batch, or a list of batches that is gone through again and again (a batch that is itself a list
            goes into a list of one).
        plan: a Plan to carry out, or a function that makes one for every captured step.
        steps: train steps; the first step that fails is the last one run.
        edge_batches: run once each after them, for example rows that are all padding.
        seed: for dropout and random numbers; None takes torch's seed.
        eval_too: one more step with all modules in eval mode.

    Model, optimizer, random generators and the Python values that `loss_fn` can reach are as before when it returns.
    """
    for name, value, known in (("backend", backend, BACKENDS), ("precision", precision, PRECISIONS)):
        if value not in known:
            raise BadOption(f"{name}={value!r}", hint=f"use one of {', '.join(map(repr, known))}")
    subject = make_subject(
        model,
        loss_fn,
        optimizer,
        precision=precision,
        accumulate=accumulate,
        clip_norm=clip_norm,
        chunked_loss=chunked_loss,
    )
    pipeline = passes if isinstance(passes, Pipeline) else default_pipeline(extra=passes or ())
    planner = _always(plan or Plan()) if plan is None or isinstance(plan, Plan) else plan
    report = Report("not captured yet", backend)
    listed = batches if isinstance(batches, list) else [batches]
    if not listed:
        raise BadBatch("verify was given no batch")
    todo = [(str(k), listed[k % len(listed)]) for k in range(steps)]
    todo += [(f"edge {k}", batch) for k, batch in enumerate(edge_batches)]
    chosen = torch.initial_seed() & (2**63 - 1) if seed is None else seed
    randomness, kept = RandomStates(), StateCopy(subject)
    try:
        _run_all(SideBySide(subject, pipeline, planner, backend, chosen, report), todo, listed[0] if eval_too else None)
    finally:
        kept.restore()
        randomness.restore()
    return report


def _always(plan: Plan) -> Planner:
    return lambda captured: plan


def _run_all(beside: SideBySide, todo: list[tuple[str, Any]], eval_batch: Any) -> None:
    """Train steps and edge batches in train mode as the modules are, then one step in eval mode; stops at a failure."""
    touched: list[StateCopy] = []
    try:
        for batch in _batches(beside.subject, todo):
            if not _run_one(beside, batch, touched):
                return
        if eval_batch is not None and beside.report.rung != "eager":
            beside.subject.root.eval()
            if beside.plan.recompute:
                beside.report.note("the step in eval mode runs without a plan: budgets are for training")
            beside.planner = _always(Plan())
            beside.made.clear()  # what does not read the flag is planned anew all the same
            (last,) = _batches(beside.subject, [("eval", eval_batch)], len(todo))
            _run_one(beside, last, touched)
    finally:
        for copy in touched:  # closure tensors that a captured step writes
            for tensor, value in copy.constants:
                tensor.data.copy_(value)


def _batches(subject: Subject, todo: list[tuple[str, Any]], start: int = 0) -> Iterator[Batch]:
    for count, (label, given) in enumerate(todo, start=start):
        micro = [given]
        if subject.accumulate > 1:
            ready = isinstance(given, list) and len(given) == subject.accumulate
            micro = given if ready else split_batch(given, subject.accumulate)
        yield Batch(label, count, micro)


def _run_one(beside: SideBySide, batch: Batch, touched: list[StateCopy]) -> bool:
    """One step, its rows in the report; False when it failed and the rest should not run."""
    report, subject = beside.report, beside.subject
    found = beside.make(batch)
    if found is None:
        report.note(f"step {batch.label}: nothing was captured, it runs in eager PyTorch")
        if report.rung == "not captured yet":
            report.rung = "eager"
        return True
    if report.rung == "not captured yet":
        report.rung = found.captured.rung
    subject.refresh()
    beside.settle_loss_scale(found, batch)
    before = StateCopy(subject, found.captured.constants)
    if not touched:
        touched.append(before)
    truth = beside.truth(found, batch)
    rows = beside.step(found, batch, truth, before, beside.backend)
    report.rows += rows
    if not found.captured.plans and subject.optimizer is not None:
        report.note("the optimizer's update is its own eager code: only gradients are compared")
    if all(row.ok for row in rows):
        return True
    report.first_departure = beside.blame(found, batch, before, rows)
    return False
