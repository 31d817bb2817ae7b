"""The lower rungs: the step as a user would write it, in plain PyTorch, or with its loss through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture.forward import check_loss
from wholestep.capture.optimizers import genuine_zero_grad
from wholestep.capture.preflight import autocast_for
from wholestep.capture.subject import Subject

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]


def eager_step(
    subject: Subject,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    done: Sequence[Result] = (),
) -> tuple[Result, torch.Tensor | None]:
    """Forward, loss, backward (over all micro-batches), clip and update; (loss, aux) and the gradient norm.

    `done` are results of micro-batches before these, whose gradients are in p.grad already.
    """
    return updated(subject, backward(subject, batches, loss_fn, done))


def backward(
    subject: Subject,
    batches: Sequence[Any],
    loss_fn: Callable[[Any, Any], Any] | None = None,
    done: Sequence[Result] = (),
) -> list[Result]:
    """Forward, loss and backward over all micro-batches; nothing but p.grad, buffers and the user's Python has changed then."""
    results = list(done)
    count = len(batches) + len(done)
    if subject.optimizer is not None and not done:
        clear_gradients(subject.optimizer)
    for batch in batches:
        with subject.edits.applied(), autocast_for(subject):
            returned = (loss_fn or subject.loss_fn)(subject.model, batch)
            loss, aux = check_loss(returned)
        weight = aux.get("weight")
        if count == 1:
            objective = loss
        else:
            objective = loss / count if weight is None else loss * weight.detach().reshape(())
        if subject.loss_scale is not None:
            objective = objective * subject.loss_scale.on(subject.device)[0]
        objective.backward()
        shape = (returned[0] if isinstance(returned, tuple) else returned).shape
        results.append((loss.detach().reshape(shape), {n: v.detach() for n, v in aux.items()}))
    return results


def updated(subject: Subject, results: Sequence[Result]) -> tuple[Result, torch.Tensor | None]:
    """Clip and update with what is in p.grad."""
    norm, count = None, len(results)
    if subject.optimizer is not None:
        trained = [p.grad for p in subject.trained.values() if p.grad is not None]
        if count > 1 and "weight" in results[0][1]:
            total = torch.stack([aux["weight"].float().reshape(()) for _, aux in results]).sum()
            torch._foreach_div_(trained, total)
        if subject.loss_scale is not None:
            torch._foreach_div_(trained, subject.loss_scale.on(subject.device)[0])
        norm = update_in_torch(subject)
    return combine(results), norm


def update_in_torch(subject: Subject) -> torch.Tensor | None:
    """Clip p.grad and call the optimizer's own step; the norm of the gradients, where it was asked for."""
    optimizer, norm = subject.optimizer, None
    assert optimizer is not None
    if subject.clip_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(list(subject.trained.values()), subject.clip_norm)
    elif subject.nonfinite == "skip":
        norm = torch.nn.utils.get_total_norm([p.grad for p in subject.trained.values() if p.grad is not None])
    # decided on the host, which waits for a GPU
    skips = norm is not None and subject.nonfinite == "skip" and not bool(norm.isfinite())
    if not skips:
        optimizer.step()
    if subject.loss_scale is not None:
        subject.loss_scale.after_eager(not skips)
    if genuine_zero_grad(optimizer):  # one that somebody wrote is called once a step, where a loop calls it
        optimizer.zero_grad(set_to_none=True)
    return norm


def clear_gradients(optimizer: Optimizer) -> None:
    """As a loop does before its backward."""
    if genuine_zero_grad(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None
    else:
        optimizer.zero_grad()


def combine(results: Sequence[Result]) -> Result:
    """One loss and aux for all micro-batches: means, weighted by aux["weight"] when it is there (which is summed)."""
    if len(results) == 1:
        return results[0]
    losses = torch.stack([loss.reshape(()) for loss, _ in results])
    if "weight" in results[0][1]:
        weights = torch.stack([aux["weight"].reshape(()).to(losses.dtype) for _, aux in results])
        share = weights / weights.sum()
    else:
        share = torch.full_like(losses, 1.0 / len(results))
    merged: dict[str, Any] = {}
    for name in results[0][1]:
        values = [aux[name] for _, aux in results]
        if name == "weight":
            merged[name] = torch.stack([v.reshape(()) for v in values]).sum()
        elif values[0].dim() == 0 and values[0].is_floating_point():
            merged[name] = (torch.stack(values) * share.to(values[0].dtype)).sum()
        else:
            merged[name] = torch.stack(values) if all(v.shape == values[0].shape for v in values) else values
    return (losses * share).sum(), merged
