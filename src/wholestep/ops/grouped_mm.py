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

from wholestep.graph.liveness import tensor_bytes
from wholestep.ops.amounts import Amount, numel, product
from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record

NARROW = 128
"""Matrices with no more rows and columns are multiplied by kernels that cut rows at fixed places."""
SPLIT, LEAST_SPLIT, PARTS = 1024, 128, 512
"""Rows that are summed up to a part of the weights' gradient, at most and at least; parts that keep a GPU busy."""


def is_narrow(inner: int, columns: int) -> bool:
    return max(inner, columns) <= NARROW


def split_of(rows: int, most: int = SPLIT) -> int:
    """Rows of a part: a power of two, smaller where there would be few parts."""
    return min(max(1 << (-(-rows // PARTS) - 1).bit_length(), LEAST_SPLIT), most)


def splits_of(rows: Amount, most: int = SPLIT) -> Amount:
    """How many parts, or of rows whose number is a symbol how many at most."""
    return -(-rows // split_of(rows, most)) if isinstance(rows, int) else rows // most + PARTS


def reference(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """One product per group."""
    out = x.new_zeros(x.shape[0], w.shape[2])
    start = 0
    for group, end in enumerate(ends.tolist()):
        out[start:end] = x[start:end] @ w[group]
        start = end
    return out


def by_group(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The same, every product written to its place."""
    out, start = x.new_empty(x.shape[0], w.shape[2]), 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], w[group], out=out[start:end])
        start = end
    out[start:].zero_()
    return out


def _product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    if not in_triton(x, w):
        return by_group(x, w, ends)
    from wholestep.ops.grouped_mm_triton import rows_product

    return rows_product(x, w, ends)


def weights_reference(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient of w."""
    out = x.new_zeros(ends.shape[0], x.shape[1], grad.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        out[group] = x[start:end].T @ grad[start:end]
        start = end
    return out


def weights_by_group(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    out, start = x.new_empty(ends.shape[0], x.shape[1], grad.shape[1]), 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[start:end].T, grad[start:end], out=out[group])
        start = end
    return out


def _weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    if not in_triton(grad, x):
        return weights_by_group(grad, x, ends)
    from wholestep.ops.grouped_mm_triton import weights_product

    return weights_product(grad, x, ends)


_forward = torch.library.custom_op(
    "ws::grouped_mm", _product, mutates_args=(), schema="(Tensor x, Tensor w, Tensor ends) -> Tensor"
)
_of_weights = torch.library.custom_op(
    "ws::grouped_mm_weights", _weights, mutates_args=(), schema="(Tensor grad, Tensor x, Tensor ends) -> Tensor"
)


@_forward.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


@_of_weights.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    """Two operators, that of w first: x, kept or recomputed for it, is gone before the gradient of x, as large, is made."""
    x, w, ends = ctx.saved_tensors  # type: ignore[attr-defined]
    of_x, of_w = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
    grad_w = torch.ops.ws.grouped_mm_weights(grad, x, ends) if of_w else None
    return torch.ops.ws.grouped_mm(grad, w.transpose(1, 2), ends) if of_x else None, grad_w, None


_forward.register_autograd(_differentiated, setup_context=_keep)


def _cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for dtype in (torch.float32, torch.float64):
        for ends in ([2, 2, 5], [0, 5, 5], [0, 0, 0]):  # groups without rows, first, last and all
            yield (
                torch.randn(ends[-1], 4).to(dtype),
                torch.randn(3, 4, 6).to(dtype),
                torch.tensor(ends, dtype=torch.int32),
            )


def _weights_cases() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for x, w, ends in _cases():
        yield torch.randn(x.shape[0], w.shape[2], dtype=x.dtype), x, ends


def _rounded(call: Call, *names: str) -> int:
    """Operands that are copied, rounded to tf32, on a GPU (`grouped_mm_triton.py`). Where tf32 is not allowed, none are."""
    if (
        is_narrow(call.shape(names[-1])[-1], call.shape(names[0])[-1])
        or call.tensor("x").dtype != torch.float32
        or torch.get_float32_matmul_precision() == "highest"
    ):
        return 0
    return sum(tensor_bytes(call.tensor(name)) for name in names)


def parts_bytes(call: Call) -> int:
    """What the gradient of narrow weights is summed up from (`grouped_narrow_triton.py`)."""
    (rows, columns), inner, groups = call.shape("grad"), call.shape("x")[-1], call.shape("ends")[0]
    return 4 * (splits_of(rows) + groups) * inner * columns if is_narrow(inner, columns) else 0


record(
    "ws::grouped_mm",
    reference=reference,
    cases=_cases,
    kind="matmul",
    flops=lambda call: 2 * numel(call.outputs[0]) * call.shape("x")[-1],
    scratch=lambda call: _rounded(call, "x", "w"),
    compiled=False,
)
record(
    "ws::grouped_mm_weights",
    reference=weights_reference,
    cases=_weights_cases,
    kind="matmul",
    flops=lambda call: 2 * product(call.shape("grad")) * call.shape("x")[-1],
    scratch=lambda call: _rounded(call, "grad", "x") + parts_bytes(call),
    compiled=False,
)
