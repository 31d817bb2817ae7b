"""`wholestep.verify`: train a few steps beside eager PyTorch and report every value that is not the same.

Each step starts both sides from one state: the captured step runs on the live model and optimizer, the references on
that same state before it, so errors do not pile up from step to step. At the end model, optimizer and random
generators are put back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from wholestep.capture.batch import split_batch
from wholestep.capture.subject import Subject, root_of
from wholestep.capture.undo import RandomStates
from wholestep.compiler import compiler_for
from wholestep.errors import BadBatch, BadOption, UnsupportedModel
from wholestep.graph.mesh import Mesh
from wholestep.lower.lockstep import RanksDiffer
from wholestep.options import is_whole, options_of
from wholestep.runtime.variant import AssumptionFailed, assumption_failed
from wholestep.schedule import Recipe, recipe_of
from wholestep.verify.blame import module_of_tensor
from wholestep.verify.by_verb import verify_by_verb
from wholestep.verify.report import Departure, Report, TensorRow
from wholestep.verify.side_by_side import SideBySide
from wholestep.verify.state import StateCopy
from wholestep.verify.truth import Batch

BY_VERB = ("blame", "each")


def verify(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    batches: Any,
    *,
    steps: int = 5,
    edge_batches: Sequence[Any] | None = None,
    eval_too: bool = True,
    by_verb: str | None = None,
    **options: Any,
) -> Report:
    """Train a few steps beside eager PyTorch, and compare losses, aux, gradients, buffers and updates.

    Args:
        model, loss_fn, optimizer: as for `wholestep.compile`; eager PyTorch always computes the loss from whole logits. In fp16
            both sides scale the loss alike, and gradients are compared unscaled.
        batches: one batch, or a list of batches that is gone through again and again (a batch that is itself a list
            goes into a list of one).
        steps: train steps; the first step that fails is the last one run.
        edge_batches: run once each after them, for example rows that are all padding.
        eval_too: one more step with all modules in eval mode.
        by_verb: with recipe=, "blame" looks for the wrong verb where anything differs, "each" checks after each verb; awkward
            batches are then made of the first one, unless `edge_batches` are given.
        options: all of `wholestep.compile`; the program that is compared is the one it would run, planned for the budget where
            there is one (the references beside it take what they need). Recording it as a CUDA graph replays the same kernels
            and is not part of the comparison; `check` and `cache` have nothing to do here. With `mesh`, its ranks run side by
            side, and what they must agree on is compared too; gradients and state are compared whole.

    Model, optimizer, random generators and the Python values that `loss_fn` can reach are as before when it returns.
    """
    if by_verb is not None:
        subject = functools.partial(verify, model, loss_fn, optimizer, batches, steps=steps, eval_too=eval_too)
        return _by_verb(subject, model, batches, by_verb, edge_batches, options)
    edge_batches = edge_batches or ()
    mesh = options.get("mesh")
    if isinstance(mesh, Mesh) and mesh.num_ranks > 1:  # the one backend that runs several ranks
        options.setdefault("backend", "interpret")
    chosen = options_of(options)
    if not is_whole(steps) or steps < 0:
        raise BadOption(f"steps={steps!r}", hint="use a whole number of steps, 0 or more")
    listed = batches if isinstance(batches, list) else [batches]
    if not listed:
        raise BadBatch("verify was given no batch")
    compiler = compiler_for(model, loss_fn, optimizer, chosen, [listed, list(edge_batches)])
    report = Report("not captured yet", chosen.backend)
    todo = [(str(k), listed[k % len(listed)]) for k in range(steps)]
    todo += [(f"edge {k}", batch) for k, batch in enumerate(edge_batches)]
    randomness, kept = RandomStates(), StateCopy(compiler.subject)
    try:
        _run_all(SideBySide(compiler, report), todo, listed[0] if eval_too else None)
    finally:
        kept.restore()
        randomness.restore()
    if report.rung == "eager" and compiler.scheduled is not None and len(compiler.scheduled.recipe):
        reason = f": {report.falls[0]}" if report.falls else ""
        raise UnsupportedModel(f"nothing was captured, so that a recipe cannot be verified{reason}")
    return report


def _by_verb(
    verify_all: Callable[..., Report],
    model: Any,
    batches: Any,
    by_verb: str,
    edge_batches: Any,
    options: dict[str, Any],
) -> Report:
    """Which verb of the recipe is wrong."""
    if by_verb not in BY_VERB or options.get("recipe") is None:
        raise BadOption(f"by_verb={by_verb!r}", hint="use 'blame' or 'each', together with recipe=")

    def of(recipe: Recipe, edges: Sequence[Any]) -> Report:
        return verify_all(edge_batches=edges, **{**options, "recipe": recipe})

    recipe, root, each = recipe_of(options["recipe"]), root_of(model), by_verb == "each"
    parts = options_of(options).accumulate
    return verify_by_verb(of, root, batches, recipe, each=each, edge_batches=edge_batches, accumulate=parts)


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
            bare = dataclasses.replace(beside.plan, recompute=())
            beside.compiler = beside.compiler.changed(memory=None, plan=bare)
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
    beside.references.settle_loss_scale(found.captured, batch)
    before = StateCopy(subject, found.captured.constants)
    if not touched:
        touched.append(before)
    truth = beside.references.truth(found.captured, found.variant.capture.graph, batch)
    try:
        rows = beside.step(found, batch, truth, before, beside.backend)
        if not all(row.ok for row in rows):
            before.restore()
            rows = beside.references.measured_again(found.captured, batch, truth, rows)
            if all(row.ok for row in rows):
                beside.step(found, batch, truth, before, beside.backend)  # state moves on
    except RanksDiffer as error:  # state is as it was before the step
        row = TensorRow(batch.label, "ranks", error.name, math.inf, 0.0, False)
        report.rows.append(row)
        report.note(error.what)
        report.first_departure = Departure(
            module_of_tensor(error.name), "ranks", error.name, batch.label, math.inf, 0.0
        )
        return False
    except Exception as error:
        refused = assumption_failed(error, found.captured)
        if not isinstance(refused, AssumptionFailed):
            raise
        before.restore()
        report.note(f"step {batch.label} runs in eager PyTorch: {refused}")
        return True
    report.rows += rows
    if not found.captured.plans and subject.optimizer is not None:
        report.note("the optimizer's update is its own eager code: only gradients are compared")
    if all(row.ok for row in rows):
        return True
    report.first_departure = beside.blame(found, batch, before, rows)
    return False
