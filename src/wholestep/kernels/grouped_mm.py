"""Products of groups of rows with a matrix each, as mixtures of experts have them: `out[a:b] = x[a:b] @ w[i]`.

x (S, I) sorted by group, w (G, I, O), ends (G,): where each group of rows ends; out (S, O). transformers falls back to an
operator of its own where torch's grouped product cannot be compiled (anything but bf16), and the backward of that one
reads `ends` in Python, so no whole step can be traced through it. Here both directions are operators.

Reading `ends` waits for the device; so it is in the fallback that this stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """One product per group."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ w[group]
        start = end
    return out


def reference_backward(grad: Tensor, x: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and w; rows of no group, and groups of no row, get zeros."""
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for group, end in enumerate(ends.tolist()):
        grad_x[start:end] = grad[start:end] @ w[group].T
        grad_w[group] = x[start:end].T @ grad[start:end]
        start = end
    return grad_x, grad_w


_forward = torch.library.custom_op(
    "ws::grouped_mm", reference, mutates_args=(), schema="(Tensor x, Tensor w, Tensor ends) -> Tensor"
)
_backward = torch.library.custom_op(
    "ws::grouped_mm_backward", reference_backward, mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor w, Tensor ends) -> (Tensor, Tensor)",
)  # fmt: skip


@_forward.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_w = torch.ops.ws.grouped_mm_backward(grad, *ctx.saved_tensors)  # type: ignore[attr-defined]
    return grad_x, grad_w, None


_forward.register_autograd(_differentiated, setup_context=_keep)
