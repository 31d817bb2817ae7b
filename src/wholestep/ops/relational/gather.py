"""Rows that are taken and summed by a table: ws::take_rows, ws::gather_sum, ws::gather_dot, ws::edge_dot.

Legend: x (N, *F), F the features, (D,) or (heads, D). A table has T targets; the entries of target t stand at ptr[t] to ptr[t + 1]:
index (Z,) is a row of x, edge (Z,) the row of `weight` that it is multiplied by, or -1 for one. weight (E,) or (E, heads).

    take_rows   out[i] = x[index[i]]
    gather_sum  out[t] = sum over its entries of weight[edge] * x[index]
    gather_dot  out[edge] = <grad[t], x[index]> for every entry of target t that has an edge, per head: the gradient of `weight`
    edge_dot    out[edge] = <left[t], right[index]>, the same where every entry has an edge, with derivatives of its own

Every table comes with itself turned round (back_ptr, back_index, back_edge: for every row of x the targets that read it), so that a
derivative is a gather_sum too: no atomic additions, hence the same bits in every run. On the CPU the sums are products with a
sparse matrix where torch has them, on a GPU Triton kernels (`gather_triton.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.amounts import numel, product
from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import in_triton
from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("take_rows(Tensor x, Tensor index, Tensor back_ptr, Tensor back_index) -> Tensor")
LIBRARY.define(
    "gather_sum(Tensor x, Tensor? weight, Tensor ptr, Tensor index, Tensor? edge, Tensor back_ptr, Tensor back_index, "
    "Tensor? back_edge) -> Tensor"
)
LIBRARY.define("gather_dot(Tensor grad, Tensor x, Tensor weight, Tensor ptr, Tensor index, Tensor edge) -> Tensor")
LIBRARY.define(
    "edge_dot(Tensor left, Tensor right, Tensor ptr, Tensor index, Tensor edge, Tensor back_ptr, Tensor back_index, "
    "Tensor back_edge) -> Tensor"
)
GPU_CHUNK = 64
"""Entries of one target that a program of their own adds up, on a GPU."""
CHUNK = 1 << 16
"""Entries whose products exist at a time, on the CPU."""


def _one_weight_per_head(x: Tensor, weight: Tensor | None) -> bool:
    """The kernels know a number per entry, or one per head, and no other broadcasting."""
    return weight is None or weight.shape[1:] == x.shape[1 : weight.dim()]


def targets_of(ptr: Tensor, entries: int) -> Tensor:
    """For every entry its target."""
    counts = (ptr[1:] - ptr[:-1]).long()
    return torch.repeat_interleave(torch.arange(counts.shape[0], device=ptr.device), counts, output_size=entries)


def values_of(weight: Tensor | None, edge: Tensor | None) -> Tensor | None:
    """The factor of every entry, (Z,) or (Z, heads); None where all are one."""
    if weight is None:
        return None
    if edge is None:
        return weight
    picked = weight.index_select(0, edge.clamp(min=0))
    has_none = (edge < 0).reshape(-1, *[1] * (weight.dim() - 1))
    return picked.masked_fill(has_none, 1.0)


def sum_reference(
    x: Tensor,
    weight: Tensor | None,
    ptr: Tensor,
    index: Tensor,
    edge: Tensor | None,
    back_ptr: Tensor,
    back_index: Tensor,
    back_edge: Tensor | None,
) -> Tensor:
    """Entry by entry, added in float32 (float64 for float64) and rounded once."""
    values, rows = values_of(weight, edge), widened(x.index_select(0, index))
    if values is not None:
        rows = rows * values.to(rows.dtype).reshape(*values.shape, *[1] * (rows.dim() - values.dim()))
    out = rows.new_zeros(ptr.shape[0] - 1, *x.shape[1:])
    return out.index_add(0, targets_of(ptr, index.shape[0]), rows).to(x.dtype)


def widened(t: Tensor) -> Tensor:
    """As sums are made: in float32, or float64."""
    return t if t.dtype == torch.float64 else t.float()


def gather_sum(
    x: Tensor,
    weight: Tensor | None,
    ptr: Tensor,
    index: Tensor,
    edge: Tensor | None,
    back_ptr: Tensor,
    back_index: Tensor,
    back_edge: Tensor | None,
) -> Tensor:
    if in_triton(x, weight) and _one_weight_per_head(x, weight):
        from wholestep.ops.relational import gather_triton

        return gather_triton.gather_sum(x, weight, ptr, index, edge)
    if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu" or index.shape[0] == 0 or x.numel() == 0:
        return sum_reference(x, weight, ptr, index, edge, back_ptr, back_index, back_edge)
    values = values_of(weight, edge)
    if values is None:
        values = x.new_ones(index.shape[0])
    if values.dim() == 1:
        return _sparse_product(ptr, index, values, x.reshape(x.shape[0], -1)).reshape(-1, *x.shape[1:])
    heads = [_sparse_product(ptr, index, values[:, h], x[:, h].reshape(x.shape[0], -1)) for h in range(values.shape[1])]
    return torch.stack([head.reshape(-1, *x.shape[2:]) for head in heads], dim=1)


@functools.cache
def _known() -> None:
    """torch says once that these tensors are new to it; nobody who trains a network has to read that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(
            torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0), (1, 1)
        )


def _matrix(ptr: Tensor, index: Tensor, values: Tensor, columns: int) -> Tensor:
    _known()
    return torch.sparse_csr_tensor(ptr, index, values, (ptr.shape[0] - 1, columns), check_invariants=False)


def _sparse_product(ptr: Tensor, index: Tensor, values: Tensor, x: Tensor) -> Tensor:
    matrix = _matrix(ptr, index, values.to(x.dtype).contiguous(), x.shape[0])
    return x.new_empty(ptr.shape[0] - 1, x.shape[1]).addmm_(matrix, x.contiguous(), beta=0)  # torch.mm makes it twice


def dot_reference(grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, index: Tensor, edge: Tensor) -> Tensor:
    """Entries without an edge give nothing; every edge has one entry, or none."""
    out = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    targets, wide = targets_of(ptr, index.shape[0]), weight.dim()
    for start in range(0, index.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        products = widened(grad.index_select(0, targets[part])) * widened(x.index_select(0, index[part]))
        dots = products.reshape(*products.shape[:wide], -1).sum(-1).to(weight.dtype)
        real = edge[part] >= 0
        out[edge[part][real].long()] = dots[real]
    return out


def gather_dot(grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, index: Tensor, edge: Tensor) -> Tensor:
    if in_triton(grad, x, weight) and _one_weight_per_head(x, weight):
        from wholestep.ops.relational import gather_triton

        return gather_triton.gather_dot(grad, x, weight, ptr, index, edge)
    known = {grad.dtype, x.dtype, weight.dtype} in ({torch.float32}, {torch.float64}) and _one_weight_per_head(
        x, weight
    )
    # torch refuses a sparse matrix with more entries than places: few nodes with many equal edges
    fits = 0 < index.shape[0] <= (ptr.shape[0] - 1) * x.shape[0]
    if known and x.device.type == "cpu" and fits and x.numel():
        return _sampled_product(grad, x, weight, ptr, index, edge)
    return dot_reference(grad, x, weight, ptr, index, edge)


def _sampled_product(grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, index: Tensor, edge: Tensor) -> Tensor:
    """Of grad @ x.T only what has an entry: 0.7 ms for 48,810 entries of width 64, where taking both rows of each is 9.8 ms."""
    heads = weight.numel() // max(weight.shape[0], 1)
    left, right = (t.reshape(t.shape[0], heads, -1).unbind(1) for t in (grad, x))
    matrix = _matrix(ptr, index, x.new_zeros(index.shape[0]), x.shape[0])
    dots = [torch.sparse.sampled_addmm(matrix, a, b.t(), beta=0.0).values() for a, b in zip(left, right, strict=True)]
    out = weight.new_zeros(weight.shape[0] + 1, heads)  # the last row is for entries without an edge
    place = edge.long()
    out.index_copy_(0, torch.where(place < 0, weight.shape[0], place), torch.stack(dots, dim=1))
    return out[:-1].reshape(weight.shape)


def _edge_dot_with(dot: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def edge_dot(left: Tensor, right: Tensor, ptr: Tensor, index: Tensor, edge: Tensor, *back: Tensor) -> Tensor:
        return dot(left, right, left.new_empty(index.shape[0], *left.shape[1:-1]), ptr, index, edge)

    return edge_dot


edge_dot_reference, edge_dot = _edge_dot_with(dot_reference), _edge_dot_with(gather_dot)


def take_reference(x: Tensor, index: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    return x.index_select(0, index)


def take_rows(x: Tensor, index: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    if in_triton(x):
        from wholestep.ops.relational import gather_triton

        return gather_triton.take_rows(x, index)
    return take_reference(x, index, back_ptr, back_index)


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("take_rows", take_rows, _device)
    LIBRARY.impl("gather_sum", gather_sum, _device)
    LIBRARY.impl("gather_dot", gather_dot, _device)
    LIBRARY.impl("edge_dot", edge_dot, _device)


@torch.library.register_fake("ws::take_rows", lib=LIBRARY)
def _take_fake(x: Tensor, index: Tensor, back_ptr: Tensor, back_index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], *x.shape[1:])


@torch.library.register_fake("ws::gather_sum", lib=LIBRARY)
def _sum_fake(x: Tensor, weight: Tensor | None, ptr: Tensor, *_: Any) -> Tensor:
    return x.new_empty(ptr.shape[0] - 1, *x.shape[1:])


@torch.library.register_fake("ws::gather_dot", lib=LIBRARY)
def _dot_fake(grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, index: Tensor, edge: Tensor) -> Tensor:
    return torch.empty_like(weight, memory_format=torch.contiguous_format)


@torch.library.register_fake("ws::edge_dot", lib=LIBRARY)
def _edge_dot_fake(left: Tensor, right: Tensor, ptr: Tensor, index: Tensor, *_: Any) -> Tensor:
    return left.new_empty(index.shape[0], *left.shape[1:-1])


def _keep_take(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _take_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    index, back_ptr, back_index = ctx.saved_tensors
    one_each = torch.arange(index.shape[0] + 1, dtype=back_ptr.dtype, device=index.device)
    return torch.ops.ws.gather_sum(grad, None, back_ptr, back_index, None, one_each, index, None), None, None, None


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, *table = inputs
    ctx.save_for_backward(x if weight is not None else None, weight, *table)  # only the gradient of weights reads rows


def _keep_dot(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _sum_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, ptr, index, edge, back_ptr, back_index, back_edge = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = torch.ops.ws.gather_sum(grad, weight, back_ptr, back_index, back_edge, ptr, index, edge)
    if weight is not None and ctx.needs_input_grad[1]:
        named = edge if edge is not None else torch.arange(index.shape[0], dtype=torch.int32, device=index.device)
        of_weight = torch.ops.ws.gather_dot(grad, x, weight, ptr, index, named)
    return of_x, of_weight, None, None, None, None, None, None


def _edge_dot_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, *table = ctx.saved_tensors
    turned = (*table[3:], *table[:3])
    of_left = torch.ops.ws.gather_sum(right, grad, *table) if ctx.needs_input_grad[0] else None
    of_right = torch.ops.ws.gather_sum(left, grad, *turned) if ctx.needs_input_grad[1] else None
    return of_left, of_right, None, None, None, None, None, None


torch.library.register_autograd("ws::edge_dot", _edge_dot_backward, setup_context=_keep_dot, lib=LIBRARY)
torch.library.register_autograd("ws::take_rows", _take_backward, setup_context=_keep_take, lib=LIBRARY)
torch.library.register_autograd("ws::gather_sum", _sum_backward, setup_context=_keep_sum, lib=LIBRARY)


# ---- what is known of them -------------------------------------------------------------------------------------


def _table() -> tuple[Tensor, ...]:
    """Four targets of five rows, one of them without entries; three entries have an edge."""
    return (
        torch.tensor([0, 2, 2, 3, 6]), torch.tensor([0, 4, 4, 1, 1, 2]), torch.tensor([2, -1, 0, -1, 1, -1]),
        torch.tensor([0, 1, 3, 4, 4, 6]), torch.tensor([0, 3, 3, 3, 0, 2]), torch.tensor([2, -1, 1, -1, -1, 0]),
    )  # fmt: skip


def _sum_cases() -> Iterator[tuple[Any, ...]]:
    table = tuple(t.int() for t in _table())
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield torch.randn(5, 3).to(dtype), None, *table[:2], None, *table[3:5], None
        yield torch.randn(5, 3).to(dtype), torch.randn(3).to(dtype), *table
        yield torch.randn(5, 2, 3).to(dtype), torch.randn(3, 2).to(dtype), *table
    yield torch.randn(5, 3).bfloat16(), torch.randn(3), *table  # as autocast has it


def _dot_cases() -> Iterator[tuple[Any, ...]]:
    ptr, index, edge = (t.int() for t in _table()[:3])
    yield torch.randn(4, 3), torch.randn(5, 3), torch.randn(3), ptr, index, edge
    yield torch.randn(4, 2, 3), torch.randn(5, 2, 3), torch.randn(3, 2), ptr, index, edge


def _edge_dot_cases() -> Iterator[tuple[Any, ...]]:
    ptr, index, _, back_ptr, back_index, _ = (t.int() for t in _table())
    edge, back_edge = (torch.tensor(t, dtype=torch.int32) for t in ([2, 5, 0, 3, 1, 4], [2, 3, 1, 4, 5, 0]))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for inner in ((3,), (2, 3)):
            left, right = torch.randn(4, *inner).to(dtype), torch.randn(5, *inner).to(dtype)
            yield left, right, ptr, index, edge, back_ptr, back_index, back_edge


def _take_cases() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(3, 2), *(torch.tensor(t, dtype=torch.int32) for t in ([2, 0, 2], [0, 1, 1, 3], [1, 0, 2]))


record(
    "ws::take_rows", reference=take_reference, cases=_take_cases, kind="movement", flops=lambda call: 0, compiled=False
)


def _partial_bytes(call: Call) -> int:
    """Of whole chunks (`gather_triton.py`)."""
    return 4 * numel(call.tensor("index")) // GPU_CHUNK * product(call.shape("x")[1:])


record(
    "ws::gather_sum",
    reference=sum_reference,
    cases=_sum_cases,
    scratch=_partial_bytes,
    tolerance=1e-5,
    kind="reduction",
    flops=lambda call: 2 * numel(call.tensor("index")) * numel(call.tensor("x")) // call.tensor("x").shape[0],
    compiled=False,
)
record(
    "ws::gather_dot",
    reference=dot_reference,
    cases=_dot_cases,
    tolerance=1e-5,
    kind="reduction",
    flops=lambda call: 2 * numel(call.tensor("index")) * numel(call.tensor("x")) // call.tensor("x").shape[0],
    compiled=False,
)
record(
    "ws::edge_dot",
    reference=edge_dot_reference,
    cases=_edge_dot_cases,
    tolerance=1e-5,
    kind="reduction",
    flops=lambda call: 2 * numel(call.tensor("index")) * numel(call.tensor("right")) // call.tensor("right").shape[0],
    compiled=False,
)
