"""Products of groups of rows with a matrix each, as mixtures of experts have them: `out[a:b] = x[a:b] @ w[i]`.

x (S, I) sorted by group, w (G, I, O), ends (G,): where each group of rows ends; out (S, O). transformers falls back to an
operator of its own where torch's grouped product cannot be compiled (anything but bf16), and the backward of that one
reads `ends` in Python, so no whole step can be traced through it. Here both directions are operators.

On a GPU one Triton kernel takes all groups (`grouped_mm_triton.py`); elsewhere `ends` is read and every group is a product.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from wholestep.ops.amounts import numel, product
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record


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
    grad_x, grad_w = x.new_zeros(x.shape), torch.zeros_like(w)
    start = 0
    for group, end in enumerate(ends.tolist()):
        grad_x[start:end] = grad[start:end] @ w[group].T
        grad_w[group] = x[start:end].T @ grad[start:end]
        start = end
    return grad_x, grad_w


def _product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if not in_triton(x, w):
        return reference(x, w, ends)
    from wholestep.ops.grouped_mm_triton import rows_product

    return rows_product(x, w, ends)


def _product_backward(grad: Tensor, x: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    if not in_triton(grad, x, w):
        return reference_backward(grad, x, w, ends)
    from wholestep.ops.grouped_mm_triton import rows_product, weights_product

    grad_x = rows_product(grad, w.transpose(1, 2), ends)
    return grad_x, weights_product(grad, x, w, ends)


_forward = torch.library.custom_op(
    "ws::grouped_mm", _product, mutates_args=(), schema="(Tensor x, Tensor w, Tensor ends) -> Tensor"
)
_backward = torch.library.custom_op(
    "ws::grouped_mm_backward", _product_backward, mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor w, Tensor ends) -> (Tensor, Tensor)",
)  # fmt: skip


@_forward.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_backward.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(w)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_w = torch.ops.ws.grouped_mm_backward(grad, *ctx.saved_tensors)  # type: ignore[attr-defined]
    return grad_x, grad_w, None


_forward.register_autograd(_differentiated, setup_context=_keep)


def _cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        for ends in ([2, 2, 5], [0, 5, 5], [0, 0, 0]):  # groups without rows, first, last and all
            yield (
                torch.randn(ends[-1], 4).to(dtype),
                torch.randn(3, 4, 6).to(dtype),
                torch.tensor(ends, dtype=torch.int32),
            )


def _backward_cases() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for x, w, ends in _cases():
        yield torch.randn(x.shape[0], w.shape[2], dtype=x.dtype), x, w, ends


record(
    "ws::grouped_mm",
    reference=reference,
    cases=_cases,
    kind="matmul",
    flops=lambda call: 2 * numel(call.outputs[0]) * call.shape("x")[-1],
    compiled=False,
)
record(
    "ws::grouped_mm_backward",
    reference=reference_backward,
    cases=_backward_cases,
    kind="matmul",
    flops=lambda call: 4 * product(call.shape("grad")) * call.shape("x")[-1],
    compiled=False,
)
