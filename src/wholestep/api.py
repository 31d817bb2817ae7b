"""The public calls. They read as a table of contents: what happens, in order, and which folder does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.compiler import Compiler, compiler_for
from wholestep.errors import BadBatch, WholestepWarning
from wholestep.graph.mesh import Mesh
from wholestep.graph.notes import check_note
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.options import Options, with_keywords
from wholestep.passes.pipeline import Pipeline
from wholestep.plan.host import fits_beside
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.step import Step
from wholestep.schedule.schedule import schedule
from wholestep.verify.check import check_first_step, only_before
from wholestep.verify.verify import verify
from wholestep.verify.within_budget import check_within


def compile(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    example_batch: Any,
    *,
    memory: str | int | None = None,
    host_memory: str | int | None = None,
    offload_path: Any = None,
    plan: Plan | None = None,
    recipe: Any = None,
    mesh: Mesh | None = None,
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
        optimizer: gradients are computed for its parameters only; None fills `p.grad` and leaves the update to you.
        example_batch: one batch, as the loader gives it (with `accumulate=n`: one micro-batch, or n of them in a list,
            or a batch to be cut into n).
    """
    options = Options(
        memory=memory, host_memory=host_memory, offload_path=offload_path, plan=plan, recipe=recipe, mesh=mesh,
        precision=precision, accumulate=accumulate, clip_norm=clip_norm, clip_scope=clip_scope, nonfinite=nonfinite,
        chunked_loss=chunked_loss, backend=backend, dynamic=dynamic, check=check, guards=guards, passes=passes,
        early_update=early_update, cuda_graph=cuda_graph, cache=cache, dump=dump, seed=seed, verbose=verbose,
    )  # fmt: skip
    if isinstance(example_batch, DataLoader | Iterator):
        raise BadBatch(
            f"the example batch is a {type(example_batch).__name__}", hint="give one batch: next(iter(loader))"
        )
    compiler = compiler_for(model, loss_fn, optimizer, options, example_batch)
    if compat.untested_version() is not None:
        warnings.warn(str(compat.untested_version()), WholestepWarning, stacklevel=2)
    _warn_about_optimizer(compiler.subject.optimizer, clip_norm)
    step = Step(compiler, _first_check(compiler) if check == "first" else None)
    with compat.no_collection():
        step.prepare(_example_micro_batch(step, example_batch))
    if step.graph is None:
        _warn_not_honoured(compiler)
    compiler.progress.finish(step.explain())
    return step


compile.__doc__ = with_keywords(compile.__doc__)  # what keywords mean stands where they are validated


def _warn_not_honoured(compiler: Compiler) -> None:
    """What a step that was not captured leaves out."""
    if compiler.budget is not None:
        text = f"memory={compiler.budget.said} is not honoured: the step was not captured, so it cannot be planned"
        warnings.warn(text, WholestepWarning, stacklevel=3)
    if compiler.scheduled is not None and len(compiler.scheduled.recipe):
        text = f"{compiler.scheduled.recipe.source} is not honoured but for changed modules: the step was not captured"
        warnings.warn(text, WholestepWarning, stacklevel=3)


def _example_micro_batch(step: Step, example: Any) -> Any:
    """The first micro-batch; an example that cannot be cut is one already."""
    try:
        return step._micro_batches(example)[0]
    except BadBatch:
        return example


def _first_check(compiler: Compiler) -> Any:
    """The comparison of the first live step with eager PyTorch, as far as the options leave it."""
    check, reason, scope = check_first_step, None, compiler.options.clip_scope
    if scope != "global":
        reason = f"clip_scope={scope!r} is not torch's clipping"
        check = only_before(check, reason)
    if compiler.budget is not None:
        check = check_within(compiler.budget, check, whole_only=reason)
    return _where_it_fits(check)


def _where_it_fits(check: Callable[..., Any]) -> Callable[..., Any]:
    """The first step's check, left out where a CPU has no memory for it: it takes an eager step beside copies of the state."""

    def checked(run: OneStep, variant: Any, *rest: Any, **options: Any) -> Any:
        if variant.subject.device.type == "cpu" and not fits_beside(variant.capture.graph):
            text = "the first step was not checked against eager: that would not fit into memory"
            run.step._note(check_note("left out", text))
            return None
        plan = variant.capture.plan
        if variant.subject.device.type == "cuda" and plan is not None and "host" in plan.state.values():
            text = "the first step was not checked against eager, whose optimizer has no state on the host"
            run.step._note(check_note("left out", text))
            return None
        return check(run, variant, *rest, **options)

    return checked


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


__all__ = ["compile", "schedule", "verify"]
