"""A chain of cheap operators that keeps only what went into it.

In: a function of tensors, and those tensors. Out: its result, with an origin. Kept for the backward: the inputs alone; the
backward runs the function again under autograd and differentiates that, so its gradients have the very bits of the chain
written out (which keeps a tensor per operator: six for the tanh GELU of GPT-2, four for an RMS norm in bf16). A function
whose derivative is known by hand may bring it, and is then differentiated without a second autograd inside the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.nn.origin import Casts, plain, remember, wanted, without_autocast

Derivative = Callable[..., Sequence[Tensor | None]]


def replayed(function: Callable[..., Tensor], *tensors: Tensor | None, derivative: Derivative | None = None) -> Tensor:
    """function(*tensors), keeping `tensors` and nothing that is computed on the way.

    `derivative(grad, *tensors)` gives one gradient per tensor, by the same operators as autograd would use.
    """
    given = [t for t in tensors if t is not None]
    if not wanted() or not any(t.requires_grad for t in given) or not plain(*given):
        return function(*tensors)
    out: Tensor = _Replayed.apply(function, derivative, Casts.now(given[0].device.type), *tensors)
    return remember(out, function, *tensors)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        derivative: Derivative | None,
        casts: Casts,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.function, ctx.derivative, ctx.casts = function, derivative, casts
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()  # create_graph=True: this backward will be differentiated too
        needed = ctx.needs_input_grad[3:]
        tensors = list(ctx.saved_tensors)
        if ctx.derivative is not None and not again and not ctx.casts.enabled:
            with without_autocast(grad.device.type):
                return None, None, None, *ctx.derivative(grad, *tensors)
        if not again:
            tensors = [t if t is None else t.detach().requires_grad_(n) for t, n in zip(tensors, needed, strict=True)]
        with torch.enable_grad(), ctx.casts.again():
            out = ctx.function(*tensors)
        chosen = [t for t, n in zip(tensors, needed, strict=True) if n]
        with without_autocast(grad.device.type):
            grads = iter(torch.autograd.grad(out, chosen, grad, create_graph=again, allow_unused=True))
        return None, None, None, *(next(grads) if n else None for n in needed)
