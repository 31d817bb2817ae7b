"""What Dynamo traces: the user's loss, and marks that tell in its graph which value is the loss and which are aux.

The marks are functions that Dynamo puts into its graph without looking inside. `LossGraph` reads them off again.
"""

from __future__ import annotations

from typing import Any

import torch


def mark_loss(loss: torch.Tensor) -> torch.Tensor:
    """This value is the loss. Detached: a loss that differentiates by an input may not return what requires a gradient."""
    return loss.detach()


def mark_aux(name: str, value: torch.Tensor) -> torch.Tensor:
    """This value is `aux[name]`."""
    return value.detach()


def mark_bad_loss(kind: str) -> torch.Tensor:
    """What the loss function returned is no tensor."""
    return torch.zeros(())


def mark_bad_aux(name: str, kind: str) -> torch.Tensor:
    """`aux[name]` is no tensor."""
    return torch.zeros(())


def gradients(loss: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where parameters have hooks: their gradients, on which Dynamo then sees the hooks run."""
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found))


def mark_assumed(condition: torch.Tensor, truth: bool) -> None:
    """The graph goes on as if the condition, which only data tells, were `truth` (assumed.py)."""


def mark_cudnn(enabled: bool | None) -> torch.Tensor:
    """From here on cuDNN is, or is not, to be used; None: as before the last such mark."""
    return torch.zeros(())


def mark_gradients(*hooked: torch.Tensor) -> torch.Tensor:
    """What the hooks made of the gradients, in the order of the parameters."""
    return torch.zeros((), device=hooked[0].device)


MARKS = (mark_loss, mark_aux, mark_bad_loss, mark_bad_aux, mark_assumed, mark_cudnn, gradients, mark_gradients)
for _mark in MARKS:
    torch.compiler.allow_in_graph(_mark)


def kind_of(value: Any) -> str:
    """The name of its class, which Dynamo of torch 2.11 cannot tell of a number's."""
    for number, name in ((bool, "bool"), (int, "int"), (float, "float")):
        if isinstance(value, number):
            return name
    return type(value).__name__


def traced(loss_fn: Any, model: Any, batch: Any, hooked: tuple, autocast: tuple | None, share: float) -> Any:
    """The user's loss under the autocast that `precision` asks for; then the marks, and hooks on parameters.

    `hooked` holds (parameter, its hooks) for every trained parameter where one of them has a hook. `share` is what a
    micro-batch counts of the whole batch, where the loss has no weight of its own.
    """
    if autocast is None:
        result = loss_fn(model, batch)
    else:
        with torch.autocast(autocast[0], autocast[1], cache_enabled=False):
            result = loss_fn(model, batch)
    loss = result
    aux: dict[str, torch.Tensor] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        loss, aux = result
    if not isinstance(loss, torch.Tensor):
        return mark_bad_loss(kind_of(loss))
    for name, value in aux.items():
        if not isinstance(value, torch.Tensor):
            return mark_bad_aux(str(name), kind_of(value))
    told = mark_loss(loss)
    marked = {name: mark_aux(name, value) for name, value in aux.items()}
    if hooked:
        objective = loss * share if "weight" not in aux or share == 1.0 else loss * aux["weight"].detach().reshape(())
        after = []
        found = gradients(objective, *[p for p, _ in hooked])
        for (_, hooks), gradient in zip(hooked[::-1], found[::-1]):  # the last layers first, as a backward pass does
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            after.append(gradient)
        told = told + mark_gradients(*after[::-1])
    return told, marked
