"""The public calls. They read as a table of contents: what happens, in order, and which folder does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.compiler import Compiler, compiler_for
from wholestep.errors import BadBatch, WholestepWarning
from wholestep.graph.mesh import Mesh
from wholestep.graph.notes import check_note
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.options import Options
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
        optimizer: what is differentiated is exactly its parameters; None fills `p.grad` and leaves the update to you.
        example_batch: one batch, as the loader gives it (with `accumulate=n`: one micro-batch, or n of them in a list,
            or a batch to be cut into n).
        memory: a budget in bytes of the card ("26GiB", "auto" for what is free): values of the forward pass are made again in
            the backward pass where that is needed, as fast as possible; or an error names the smallest budget there is.
        host_memory: how much of the host's memory ("64GiB") values and optimizer state may wait in: as far as the link to the card
            hides it without a budget, as far as needed with one. Same bits.
        offload_path: a folder, or several of different disks, for what does not fit there. Disks are slow: for capacity.
        plan: decisions made earlier (`wholestep plan`), instead of a budget. Without either, a GPU makes again what it computes
            more quickly than it stores it; `plan=Plan()` keeps everything.
        recipe: how the model is to run, verb by verb: a `wholestep.schedule(model)`, or the file of one. A verb beats the budget.
        mesh: the ranks that run the step, `wholestep.Mesh(tp=4)`; what `shard` lines of the recipe cut is divided among them. They
            run side by side in this process (backend="interpret"), to be looked at and verified; state stays whole in your model.
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
    options = Options(
        memory=memory, host_memory=host_memory, offload_path=offload_path, plan=plan, recipe=recipe, mesh=mesh,
        precision=precision, accumulate=accumulate, clip_norm=clip_norm, clip_scope=clip_scope, nonfinite=nonfinite,
        chunked_loss=chunked_loss, backend=backend, dynamic=dynamic, check=check, guards=guards, passes=passes,
        early_update=early_update, cuda_graph=cuda_graph, cache=cache, dump=dump, seed=seed, verbose=verbose,
    )  # fmt: skip
    compiler = compiler_for(model, loss_fn, optimizer, options, example_batch)
    if compat.untested_version() is not None:
        warnings.warn(str(compat.untested_version()), WholestepWarning, stacklevel=2)
    _warn_about_optimizer(optimizer, clip_norm)
    step = Step(compiler, _first_check(compiler) if check == "first" else None)
    with compat.no_collection():
        step.prepare(_example_micro_batch(step, example_batch))
    if step.graph is None and compiler.budget is not None:
        text = f"memory={compiler.budget.said} is not honoured: the step was not captured, so it cannot be planned"
        warnings.warn(text, WholestepWarning, stacklevel=2)
    if step.graph is None and compiler.scheduled is not None and len(compiler.scheduled.recipe):
        text = f"{compiler.scheduled.recipe.source} is not honoured but for changed modules: the step was not captured"
        warnings.warn(text, WholestepWarning, stacklevel=2)
    compiler.progress.finish(step.explain())
    return step


def _example_micro_batch(step: Step, example: Any) -> Any:
    """The first micro-batch; an example that cannot be cut is one already."""
    try:
        return step._micro_batches(example)[0]
    except BadBatch:
        return example


def _first_check(compiler: Compiler) -> Any:
    """The comparison of the first live step with eager PyTorch, as far as the options leave it."""
    check, reason, scope = _where_it_fits(check_first_step), None, compiler.options.clip_scope
    if scope != "global":
        reason = f"clip_scope={scope!r} is not torch's clipping"
        check = only_before(check, reason)
    return check if compiler.budget is None else check_within(compiler.budget, check, whole_only=reason)


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
