"""Products of rows that are taken with the matrix of their group: ws::gathered_mm, out[i] = x[index[i]] @ w[group of i].

Legend: x (N, I); index (S,) sorted by group; w (G, I, O), ends (G,): where each group ends; out (S, O). back_ptr and back_index say
who took a row of x. The rows themselves are never in memory: neither here nor for the gradient of w (ws::gathered_mm_weights),
which takes them again.

ws::scattered_mm is the same turned round: x (S, I) has a row each, and out[n] is the sum of x[i] @ w[group of i] over the i with
index[i] = n. Each is what x gets in the backward of the other, and the gradient of w takes rows of the result's.

On a GPU the Triton kernels of grouped_mm read through the index (`ops/grouped_narrow_triton.py`); elsewhere rows are taken first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops import grouped_mm
from wholestep.ops.amounts import numel
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record
from wholestep.ops.relational import gather

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "gathered_mm(Tensor x, Tensor index, Tensor w, Tensor ends, Tensor back_ptr, Tensor back_index) -> Tensor"
)
LIBRARY.define(
    "scattered_mm(Tensor x, Tensor index, Tensor w, Tensor ends, Tensor back_ptr, Tensor back_index) -> Tensor"
)
LIBRARY.define("gathered_mm_weights(Tensor grad, Tensor x, Tensor index, Tensor ends) -> Tensor")


def reference(x: Tensor, index: Tensor, w: Tensor, ends: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    return grouped_mm.reference(x.index_select(0, index), w, ends)


def weights_reference(grad: Tensor, x: Tensor, index: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm.weights_reference(grad, x.index_select(0, index), ends)


def _product(x: Tensor, index: Tensor, w: Tensor, ends: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    if in_triton(x, w):
        from wholestep.ops import grouped_mm_triton

        return grouped_mm_triton.rows_product(x, w, ends, index)
    return grouped_mm.by_group(x.index_select(0, index), w, ends)


def _weights(grad: Tensor, x: Tensor, index: Tensor, ends: Tensor) -> Tensor:
    if in_triton(grad, x):
        from wholestep.ops import grouped_mm_triton

        return grouped_mm_triton.weights_product(grad, x, ends, index)
    return grouped_mm.weights_by_group(grad, x.index_select(0, index), ends)


def scattered_reference(
    x: Tensor, index: Tensor, w: Tensor, ends: Tensor, back_ptr: Tensor, back_index: Tensor
) -> Tensor:
    rows = gather.widened(grouped_mm.reference(x, w, ends))
    return rows.new_zeros(back_ptr.shape[0] - 1, w.shape[2]).index_add(0, index, rows).to(x.dtype)


def _scattered(x: Tensor, index: Tensor, w: Tensor, ends: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    rows = torch.ops.ws.grouped_mm(x, w, ends)
    return gather.gather_sum(rows, None, back_ptr, back_index, None, back_ptr, back_index, None)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("gathered_mm", _product, _device)
    LIBRARY.impl("scattered_mm", _scattered, _device)
    LIBRARY.impl("gathered_mm_weights", _weights, _device)


@torch.library.register_fake("ws::gathered_mm", lib=LIBRARY)
def _fake(x: Tensor, index: Tensor, w: Tensor, *_: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], w.shape[2])


@torch.library.register_fake("ws::scattered_mm", lib=LIBRARY)
def _scattered_fake(x: Tensor, index: Tensor, w: Tensor, ends: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    return x.new_empty(back_ptr.shape[0] - 1, w.shape[2])


@torch.library.register_fake("ws::gathered_mm_weights", lib=LIBRARY)
def _weights_fake(grad: Tensor, x: Tensor, index: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, index, w, ends, back_ptr, back_index = ctx.saved_tensors
    of_x = of_w = None
    if ctx.needs_input_grad[2]:
        of_w = torch.ops.ws.gathered_mm_weights(grad, x, index, ends)
    if ctx.needs_input_grad[0]:  # last: grad, which is large, is read no more
        of_x = torch.ops.ws.scattered_mm(grad, index, w.transpose(1, 2), ends, back_ptr, back_index)
    return of_x, None, of_w, None, None, None


def _scattered_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, index, w, ends, back_ptr, back_index = ctx.saved_tensors
    of_x = of_w = None
    if ctx.needs_input_grad[2]:
        of_w = torch.ops.ws.gathered_mm_weights(x, grad, index, ends).transpose(1, 2)
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.ws.gathered_mm(grad, index, w.transpose(1, 2), ends, back_ptr, back_index)
    return of_x, None, of_w, None, None, None


torch.library.register_autograd("ws::gathered_mm", _backward, setup_context=_keep, lib=LIBRARY)
torch.library.register_autograd("ws::scattered_mm", _scattered_backward, setup_context=_keep, lib=LIBRARY)


def product_bytes(x: Tensor, w: Tensor) -> int:
    """The products that a scattered_mm sums up."""
    return x.element_size() * x.shape[0] * w.shape[2]


def _cases() -> Iterator[tuple[Tensor, ...]]:
    index, back_ptr, back_index = ([2, 0, 2, 1, 3], [0, 1, 2, 4, 5], [1, 3, 0, 2, 4])
    for dtype in (torch.float32, torch.float64):
        for ends in ([2, 2, 5], [0, 5, 5], [5, 5, 5]):
            x, w = torch.randn(4, 3).to(dtype), torch.randn(3, 3, 6).to(dtype)
            ids = [torch.tensor(t, dtype=torch.int32) for t in (index, ends, back_ptr, back_index)]
            yield x, ids[0], w, *ids[1:]


def _scattered_cases() -> Iterator[tuple[Tensor, ...]]:
    for _, index, w, *rest in _cases():
        yield torch.randn(index.shape[0], w.shape[1], dtype=w.dtype), index, w, *rest


def _weights_cases() -> Iterator[tuple[Tensor, ...]]:
    for x, index, w, ends, *_ in _cases():
        yield torch.randn(index.shape[0], w.shape[2], dtype=x.dtype), x, index, ends


record(
    "ws::gathered_mm",
    reference=reference,
    cases=_cases,
    kind="matmul",
    flops=lambda call: 2 * numel(call.outputs[0]) * call.shape("x")[-1],
    compiled=False,
)
record(
    "ws::scattered_mm",
    reference=scattered_reference,
    cases=_scattered_cases,
    tolerance=1e-5,
    kind="matmul",
    flops=lambda call: (
        2 * numel(call.tensor("x")) * call.shape("w")[2] + numel(call.tensor("index")) * call.shape("w")[2]
    ),
    scratch=lambda call: product_bytes(call.tensor("x"), call.tensor("w")),
    compiled=False,
)
record(
    "ws::gathered_mm_weights",
    reference=weights_reference,
    cases=_weights_cases,
    kind="matmul",
    flops=lambda call: 2 * numel(call.tensor("grad")) * call.shape("x")[-1],
    scratch=grouped_mm.parts_bytes,
    compiled=False,
)
