"""Sums over edges of rows times the matrix of their relation, without the rows that stand between: ws::linear_sum.

Legend: x (N, I), weight (E,), tables as in `gather.py`: one from nodes to rows, sorted by group, and one (`to_`) from rows to
nodes. w (G, I, O), ends (G,): where each group of rows ends.

    summed_mm          out[r] = (sum over the entries of row r of weight[edge] * x[index]) @ w[group of r]
    linear_sum         out[t] = sum over the entries of node t of weight[to_edge] * (summed_mm of x)[to_index]
    summed_mm_weights  out[g] = sums of x over the rows of g, transposed, @ sums of grad over the rows of g

Of a table without edges no weights are asked for. A row sum costs little where its entries are read from a tensor of nodes, which
is small, and much where it is written and read again: there are ten times as many rows as nodes. So products sum up what they
multiply, and the gradient of w sums up both of its sides again. What is in memory is the product alone: forward between the two
tables, backward on its way to the gradient of x, which is the same with tables turned round and matrices transposed.

On a GPU Triton kernels (`linear_sum_triton.py`); elsewhere a gather_sum and a grouped product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops import grouped_mm
from wholestep.ops.amounts import numel
from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record
from wholestep.ops.relational import gather

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "summed_mm(Tensor x, Tensor? weight, Tensor ptr, Tensor index, Tensor? edge, Tensor w, Tensor ends) -> Tensor"
)
LIBRARY.define(
    "summed_mm_weights(Tensor x, Tensor? weight, Tensor ptr, Tensor index, Tensor? edge, Tensor grad, Tensor grad_ptr, "
    "Tensor grad_index, Tensor? grad_edge, Tensor ends) -> Tensor"
)
LIBRARY.define(
    "linear_sum(Tensor x, Tensor? weight, Tensor w, Tensor ends, Tensor ptr, Tensor index, Tensor? edge, Tensor back_ptr, "
    "Tensor back_index, Tensor? back_edge, Tensor to_ptr, Tensor to_index, Tensor? to_edge, Tensor back_to_ptr, "
    "Tensor back_to_index, Tensor? back_to_edge) -> Tensor"
)
MOST_ENTRIES = 2
"""Per row: where there are more, sums are made once and kept. On an H200 a layer with 3.3 entries per row on either side takes 5.5
ms without its rows and 3.7 with them; one with 1.4 is as fast without."""
MOST_SPLIT = 512
"""Rows of a part of the gradient of weights: 1.47 ms for 1.70 with 1024, on an H200."""


def pays(x: Tensor, weight: Tensor | None, w: Tensor, rows: int, entries: int, on_gpu: bool = False) -> bool:
    """Whether sums are better recomputed than kept: they are short, and products are of what kernels hold in registers.
    `on_gpu`: they will be made on one, wherever tensors are now."""
    plain = x.dim() == 2 and w.dim() == 3 and (weight is None or weight.dim() == 1) and x.dtype == w.dtype
    learned = weight is not None and weight.requires_grad  # the gradient of weights reads the products
    return (
        plain
        and not learned
        and (on_gpu or x.device.type != "cpu")
        and grouped_mm.is_narrow(*w.shape[1:])
        and entries <= MOST_ENTRIES * rows
    )


def _asked(weight: Tensor | None, edge: Tensor | None) -> Tensor | None:
    return None if edge is None else weight


def _summed(x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None) -> Tensor:
    return gather.gather_sum(x, _asked(weight, edge), ptr, index, edge, ptr, index, None)


def _summed_plainly(x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None) -> Tensor:
    return gather.sum_reference(x, _asked(weight, edge), ptr, index, edge, ptr, index, None)


def reference(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor, ends: Tensor
) -> Tensor:
    return grouped_mm.reference(_summed_plainly(x, weight, ptr, index, edge), w, ends)


def summed_mm(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor, ends: Tensor
) -> Tensor:
    if in_triton(x, weight, w) and grouped_mm.is_narrow(*w.shape[1:]):
        from wholestep.ops.relational import linear_sum_triton

        return linear_sum_triton.summed_mm(x, _asked(weight, edge), ptr, index, edge, w, ends)
    return torch.ops.ws.grouped_mm(_summed(x, weight, ptr, index, edge), w, ends)  # type: ignore[no-any-return]


def weights_reference(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, grad: Tensor, grad_ptr: Tensor,
    grad_index: Tensor, grad_edge: Tensor | None, ends: Tensor,
) -> Tensor:  # fmt: skip
    rows = _summed_plainly(x, weight, ptr, index, edge)
    pulled = _summed_plainly(grad, weight, grad_ptr, grad_index, grad_edge)
    return grouped_mm.weights_reference(pulled, rows, ends)


def summed_mm_weights(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, grad: Tensor, grad_ptr: Tensor,
    grad_index: Tensor, grad_edge: Tensor | None, ends: Tensor,
) -> Tensor:  # fmt: skip
    if in_triton(x, weight, grad) and grouped_mm.is_narrow(x.shape[1], grad.shape[1]):
        from wholestep.ops.relational import linear_sum_triton

        return linear_sum_triton.summed_mm_weights(
            (x, ptr, index, edge), (grad, grad_ptr, grad_index, grad_edge), weight, ends
        )
    pulled = _summed(grad, weight, grad_ptr, grad_index, grad_edge)
    out: Tensor = torch.ops.ws.grouped_mm_weights(pulled, _summed(x, weight, ptr, index, edge), ends)
    return out


def linear_reference(x: Tensor, weight: Tensor | None, w: Tensor, ends: Tensor, *tables: Any) -> Tensor:
    ptr, index, edge, *others = tables
    return _summed_plainly(reference(x, weight, ptr, index, edge, w, ends), weight, *others[3:6])


def linear_sum(x: Tensor, weight: Tensor | None, w: Tensor, ends: Tensor, *tables: Any) -> Tensor:
    ptr, index, edge, *others = tables
    return _summed(summed_mm(x, weight, ptr, index, edge, w, ends), weight, *others[3:6])


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("summed_mm", summed_mm, _device)
    LIBRARY.impl("summed_mm_weights", summed_mm_weights, _device)
    LIBRARY.impl("linear_sum", linear_sum, _device)


@torch.library.register_fake("ws::summed_mm", lib=LIBRARY)
def _fake(x: Tensor, weight: Any, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ptr.shape[0] - 1, w.shape[2])


@torch.library.register_fake("ws::summed_mm_weights", lib=LIBRARY)
def _weights_fake(
    x: Tensor, weight: Any, ptr: Tensor, index: Tensor, edge: Tensor | None, grad: Tensor, *rest: Any
) -> Tensor:
    return x.new_empty(rest[-1].shape[0], x.shape[1], grad.shape[1])


@torch.library.register_fake("ws::linear_sum", lib=LIBRARY)
def _linear_fake(x: Tensor, weight: Any, w: Tensor, ends: Tensor, *tables: Any) -> Tensor:
    return x.new_empty(tables[6].shape[0] - 1, w.shape[2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, w, ends, *tables = ctx.saved_tensors
    taken, turned, spread, gathered = tables[:3], tables[3:6], tables[6:9], tables[9:]
    of_x = of_w = of_weight = of_rows = None
    if ctx.needs_input_grad[2]:
        of_w = torch.ops.ws.summed_mm_weights(x, weight, *taken, grad, *gathered, ends)
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
        of_rows = torch.ops.ws.summed_mm(grad, weight, *gathered, w.transpose(1, 2), ends)
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.ws.gather_sum(of_rows, _asked(weight, turned[2]), *turned, *taken)
    if ctx.needs_input_grad[1]:
        rows = torch.ops.ws.summed_mm(x, weight, *taken, w, ends)
        dots = [
            torch.ops.ws.gather_dot(left, right, weight, ptr, index, edge)
            for left, right, (ptr, index, edge) in ((of_rows, x, taken), (grad, rows, spread))
            if edge is not None
        ]
        of_weight = sum(dots[1:], dots[0]) if dots else torch.zeros_like(weight)
    return of_x, of_weight, of_w, *[None] * 13


torch.library.register_autograd("ws::linear_sum", _backward, setup_context=_keep, lib=LIBRARY)


# ---- what is known of them -------------------------------------------------------------------------------------


def _tables() -> tuple[Tensor, ...]:
    """Five nodes to four rows and back: two rows of pairs that are sums, two that are spread over two edges each."""
    lists = (
        [0, 2, 4, 5, 6], [0, 4, 1, 1, 2, 4], [0, 1, 2, 3, -1, -1],
        [0, 1, 3, 4, 4, 6], [0, 1, 1, 2, 0, 3], [0, 2, 3, -1, 1, -1],
        [0, 1, 2, 4, 4, 6], [0, 1, 2, 3, 2, 3], [-1, -1, 4, 5, 6, 7],
        [0, 1, 2, 4, 6], [0, 1, 2, 4, 2, 4], [-1, -1, 4, 6, 5, 7],
    )  # fmt: skip
    return tuple(torch.tensor(ids, dtype=torch.int32) for ids in lists)


def _linear_cases() -> Iterator[tuple[Any, ...]]:
    tables, ends = _tables(), torch.tensor([2, 2, 4], dtype=torch.int32)
    bare = tuple(None if place % 3 == 2 else ids for place, ids in enumerate(tables))
    for dtype in (torch.float32, torch.float64):
        x, w = torch.randn(5, 3).to(dtype), torch.randn(3, 3, 6).to(dtype)
        yield x, None, w, ends, *bare
        yield x, torch.rand(8).to(dtype), w, ends, *tables
        yield x, torch.rand(8).to(dtype), w, ends, *tables[:6], *bare[6:]


def _cases() -> Iterator[tuple[Any, ...]]:
    for x, weight, w, ends, *tables in _linear_cases():
        yield x, weight, *tables[:3], w, ends


def _weights_cases() -> Iterator[tuple[Any, ...]]:
    for x, weight, w, ends, *tables in _linear_cases():
        yield x, weight, *tables[:3], torch.randn(5, w.shape[2], dtype=x.dtype), *tables[9:], ends


def bytes_between(w: Tensor, ptr: Tensor) -> int:
    """The products that stand between both tables."""
    return w.element_size() * (ptr.shape[0] - 1) * w.shape[2]


def _parts_bytes(call: Call) -> int:
    rows, groups = call.shape("ptr")[0] - 1, call.shape("ends")[0]
    return 4 * (grouped_mm.splits_of(rows, MOST_SPLIT) + groups) * call.shape("x")[1] * call.shape("grad")[1]


def _product_flops(call: Call) -> int:
    """Of the product, and of the sums beside it."""
    inner, columns = call.shape("w")[1:]
    return 2 * (call.shape("ptr")[0] - 1) * inner * columns + 2 * numel(call.tensor("index")) * inner


record(
    "ws::summed_mm", reference=reference, cases=_cases, tolerance=1e-5, kind="matmul", flops=_product_flops, compiled=False
)  # fmt: skip
record(
    "ws::summed_mm_weights",
    reference=weights_reference,
    cases=_weights_cases,
    tolerance=1e-5,
    kind="matmul",
    flops=lambda call: 2 * (call.shape("ptr")[0] - 1) * call.shape("x")[1] * call.shape("grad")[1],
    scratch=_parts_bytes,
    compiled=False,
)
record(
    "ws::linear_sum",
    reference=linear_reference,
    cases=_linear_cases,
    tolerance=1e-5,
    kind="matmul",
    flops=lambda call: _product_flops(call) + 2 * numel(call.tensor("to_index")) * call.shape("w")[2],
    scratch=lambda call: bytes_between(call.tensor("w"), call.tensor("ptr")),
    compiled=False,
)
