"""The Triton bodies of grouped_mm: no value is read on the host, so a step with experts is recorded as a CUDA graph.

Rows are cut into tiles group by group: a program finds its group from the ends, which all programs read. Rows of no group
form one more group, whose product is zero. Sums are in float32 and in a fixed order. Import only where Triton exists.

Tensor cores take tf32 only along the summed dimension, and cut the last bits off where cuBLAS rounds them. So such operands are
copied first, rounded and turned (`_ready_kernel`): on an H200, 8192 x 768 x 4096 in 8 groups, the gradient of the weights takes
1.24 ms as it lies and 0.42 turned, that of the rows 0.64 and 0.21, and the error falls from 2.6 times cuBLAS's to its own.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops import grouped_narrow_triton as narrow
from wholestep.ops.grouped_mm import is_narrow

ROWS, COLUMNS, TILE, NUM_WARPS, NUM_STAGES = 128, 128, 64, 8, 3


@triton.jit
def _group_of(ends, tile, rows, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Which group a tile of rows belongs to, its first row, and where the group ends; past the last one for spare tiles."""
    slots = tl.arange(0, SLOTS)
    end = tl.load(ends + slots, mask=slots < GROUPS, other=0).to(tl.int32)
    end = tl.where(slots < GROUPS, end, rows)  # the rows of no group
    start = tl.load(ends + slots - 1, mask=(slots > 0) & (slots <= GROUPS), other=0).to(tl.int32)
    start = tl.where(slots <= GROUPS, start, rows)
    tiles = (tl.maximum(end - start, 0) + ROWS - 1) // ROWS
    behind = tl.cumsum(tiles, 0)
    group = tl.sum((behind <= tile).to(tl.int32), 0)
    here = slots == group
    first = tl.sum(tl.where(here, start + (tile - behind + tiles) * ROWS, 0), 0)
    last = tl.sum(tl.where(here, end, 0), 0)
    return group, first, last


@triton.jit
def _rows_kernel(
    x, w, out, ends, rows, inner, columns, x_row, x_inner, w_group, w_inner, w_column, out_row,
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[rows of g] = x[rows of g] @ w[g]."""
    group, first, last = _group_of(ends, tl.program_id(1), rows, GROUPS, SLOTS, ROWS)
    if group > GROUPS:
        return
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if group < GROUPS:
        left = x + row.to(tl.int64)[:, None] * x_row + step[None, :] * x_inner
        right = w + group.to(tl.int64) * w_group + step[:, None] * w_inner + column[None, :] * w_column
        for done in range(0, inner, INNER):
            inside = step < inner - done
            a = tl.load(left, mask=(row < last)[:, None] & inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            left += INNER * x_inner
            right += INNER * w_inner
    place = out + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < columns)[None, :])


@triton.jit
def _weights_kernel(
    x, grad, out, ends, inner, columns, x_row, x_inner, grad_row, grad_column, out_group, out_inner, out_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[g] = x[rows of g].T @ grad[rows of g]."""
    group = tl.program_id(2)
    last = tl.load(ends + group).to(tl.int32)
    first = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int32)
    entry = tl.program_id(1) * INNER + tl.arange(0, INNER)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((INNER, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        left = x + entry[:, None] * x_inner + row.to(tl.int64)[None, :] * x_row
        right = grad + row.to(tl.int64)[:, None] * grad_row + column[None, :] * grad_column
        a = tl.load(left, mask=(entry < inner)[:, None] & (row < last)[None, :], other=0.0)
        b = tl.load(right, mask=(row < last)[:, None] & (column < columns)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = (
        out + group.to(tl.int64) * out_group + entry.to(tl.int64)[:, None] * out_inner + column[None, :] * out_column
    )
    tl.store(place, total.to(out.dtype.element_ty), mask=(entry < inner)[:, None] & (column < columns)[None, :])


@triton.jit
def _ready_kernel(
    source, out, rows, columns, from_batch, from_row, from_column, to_batch, to_row, to_column, TILE: tl.constexpr
):
    """out = source rounded to tf32, both of any layout: half a last place is added, the rest is cut off by the tensor core."""
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offsets = row.to(tl.int64)[:, None] * from_row + column.to(tl.int64)[None, :] * from_column
    value = tl.load(source + batch * from_batch + offsets, mask=inside, other=0.0)
    bits = value.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    bits = tl.where(finite, (bits + 0x1000) & 0xFFFFE000, bits)
    offsets = row.to(tl.int64)[:, None] * to_row + column.to(tl.int64)[None, :] * to_column
    tl.store(out + batch * to_batch + offsets, bits.to(tl.float32, bitcast=True), mask=inside)


def _ready(operand: Tensor, summed: int) -> Tensor:
    """An operand as the tensor cores want it: float32 that tf32 may stand for is rounded, its summed dimension the dense one."""
    if operand.dtype != torch.float32 or _precision() != "tf32" or operand.numel() == 0:
        return operand
    given = operand if operand.dim() == 3 else operand[None]
    batch, rows, columns = given.shape
    turned = summed % operand.dim() != operand.dim() - 1
    out = given.new_empty(batch, columns, rows).transpose(1, 2) if turned else given.new_empty(batch, rows, columns)
    _ready_kernel[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), batch)](
        given, out, rows, columns, *given.stride(), *out.stride(), TILE=TILE, num_warps=4
    )
    return out if operand.dim() == 3 else out[0]


def rows_product(x: Tensor, w: Tensor, ends: Tensor, index: Tensor | None = None) -> Tensor:
    """As `grouped_mm.reference`, of x[index] where an index is given."""
    if is_narrow(*w.shape[1:]):
        return narrow.rows_product(x, w, ends, narrow_precision(), index)
    x = x if index is None else x.index_select(0, index)
    (rows, inner), (groups, _, columns) = x.shape, w.shape
    out = x.new_empty(rows, columns)
    if out.numel() == 0:
        return out
    x, w = _ready(x, -1), _ready(w, -2)
    tiles = triton.cdiv(rows, ROWS) + groups + 1
    _rows_kernel[(triton.cdiv(columns, COLUMNS), tiles)](
        x, w, out, ends, rows, inner, columns, *x.stride(), *w.stride(), out.stride(0),
        GROUPS=groups, SLOTS=triton.next_power_of_2(groups + 2), ROWS=ROWS, COLUMNS=COLUMNS, INNER=_depth(x),
        PRECISION=_precision(), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def weights_product(grad: Tensor, x: Tensor, ends: Tensor, index: Tensor | None = None) -> Tensor:
    """As `grouped_mm.weights_reference`."""
    groups, inner, columns = ends.shape[0], x.shape[1], grad.shape[1]
    if is_narrow(inner, columns):
        return narrow.weights_product(grad, x, ends, narrow_precision(), index)
    x = x if index is None else x.index_select(0, index)
    out = x.new_empty(groups, inner, columns)
    if out.numel() == 0:
        return out
    x, grad = _ready(x, -2), _ready(grad, -2)
    _weights_kernel[(triton.cdiv(columns, COLUMNS), triton.cdiv(inner, ROWS), groups)](
        x, grad, out, ends, inner, columns, *x.stride(), *grad.stride(), *out.stride(),
        ROWS=_depth(x), COLUMNS=COLUMNS, INNER=ROWS, PRECISION=_precision(), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out


def _depth(x: Tensor) -> int:
    """Entries summed at a time: what three stages of two tiles leave of an SM's memory."""
    return 64 if x.element_size() == 2 else 32


def _precision() -> str:
    """As torch's own products: exact float32 unless the user allows tf32."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else "ieee"


def narrow_precision() -> str:
    """Six products of thirds in bfloat16 are as exact as float32 (on an H200 the error is half of cuBLAS's), and take no longer
    than what must be read and written: 1.7 million rows of 64 by 64, 0.48 ms and 0.64 without tensor cores."""
    return "tf32" if _precision() == "tf32" else "bf16x6"
