"""The loss on batches that are not trained on: plain module, eval mode, no gradients, random generators as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from wholestep.capture.preflight import autocast_for
from wholestep.capture.subject import Subject
from wholestep.capture.undo import RandomStates


@contextlib.contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each has its own flag again and no generator has moved.

    The flags are put back one by one: a model may train with some of its modules in eval mode (a frozen BatchNorm).
    """
    flags = [(module, module.training) for module in root.modules()]
    randomness = RandomStates()
    root.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags:
            module.training = training
        randomness.restore()


def held_out_loss(subject: Subject, batches: Sequence[Any]) -> float | None:
    """The mean loss, by `aux["weight"]` where the loss function gives one; None without batches. Waits for the device once."""
    if not batches:
        return None
    total = weights = None
    with evaluating(subject.root):
        for batch in batches:
            with autocast_for(subject):
                result = subject.loss_fn(subject.model, batch)
            loss, aux = result if isinstance(result, tuple) else (result, {})
            weight = aux.get("weight")
            weight = torch.ones((), device=loss.device) if weight is None else weight.reshape(())
            part = loss.detach().reshape(()).double() * weight
            total = part if total is None else total + part
            weights = weight.double() if weights is None else weights + weight
    assert total is not None and weights is not None
    return float(total / weights)
