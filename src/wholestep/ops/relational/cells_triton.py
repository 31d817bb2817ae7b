"""The Triton bodies of cell_mm and cell_mm_weights: nothing stands in memory between edges and results.

Legend: as in `cells.py`; N nodes, G groups. The sums of the cells of a block of nodes and one group are made as gather_sum makes
them (`gather_triton.py`), AHEAD entries of every cell under way at a time, and multiplied where they are.

    cell_mm          a block of nodes goes through all groups, out[nodes] = sum of sums @ w[group]
    cell_mm_weights  1. of every SPLIT nodes and every group: sums.T @ grad, 2. summed up per group

Sums are in float32, rounded to x's dtype before the product, and in a fixed order. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.grouped_mm_triton import narrow_precision
from wholestep.ops.grouped_narrow_triton import ready, tile_of
from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.cells import SPLIT
from wholestep.ops.relational.gather_triton import flat_rows, sums_of_chunks
from wholestep.ops.relational.segments_triton import direct_entry, pieces

ROWS, NUM_WARPS, AHEAD = 64, 4, 2
WEIGHTS_ROWS, WEIGHTS_WARPS, WEIGHTS_AHEAD = 64, 4, 2
BLOCK = 256
"""Numbers that a program adds up."""


@triton.jit
def row_sums(
    x, weight, ptr, index, edge, partial, target, targets, column, width, x_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS): direct entries + whole chunks of each target; zeros from `targets` on."""
    start, head, direct, first, last = pieces(ptr, target, targets, CHUNK)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(0, tl.max(direct.to(tl.int32), 0), AHEAD):
        number = done + tl.arange(0, AHEAD)[None, :]
        entry = direct_entry(start[:, None], head[:, None], last[:, None], number, CHUNK).to(tl.int64)
        real = number < direct[:, None]
        row = tl.load(index + entry, mask=real, other=-1).to(tl.int64)
        inside = (row >= 0)[:, :, None] & (column < width)[None, None, :]
        value = tl.load(x + row[:, :, None] * x_row + column[None, None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            place = tl.where(row >= 0, entry, -1)
            if NAMED:
                place = tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
            value *= tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)[:, :, None]
        total += tl.sum(value, 1)
    for done in range(0, tl.max((last - first).to(tl.int32), 0)):
        chunk = (first + done).to(tl.int64)
        inside = (chunk < last)[:, None] & (column < width)[None, :]
        total += tl.load(partial + chunk[:, None] * width + column[None, :], mask=inside, other=0.0)
    return total


@triton.jit
def _cells_kernel(
    x, weight, ptr, index, edge, partial, width, x_row, w, out, nodes, groups, columns, w_group, w_inner, w_column,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(groups):
        target = tl.where(node < nodes, group * nodes + node, groups * nodes)
        a = row_sums(
            x, weight, ptr, index, edge, partial, target, groups * nodes, step, width, x_row, WEIGHTED, NAMED, ROWS, INNER,
            AHEAD, CHUNK,
        )  # fmt: skip
        b = tl.load(
            w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
            mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b, PRECISION)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = out + node.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(node < nodes)[:, None] & (column < columns)[None, :])


@triton.jit
def _weights_kernel(
    x, weight, ptr, index, edge, x_partial, inner, x_row, grad, grad_row, partial, nodes, groups, columns,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial (splits, groups, inner, columns)."""
    group, split = tl.program_id(0), tl.program_id(1)
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    total = tl.zeros((INNER, COLUMNS), tl.float32)
    begin = split * SPLIT
    for start in range(begin, tl.minimum(begin + SPLIT, nodes), ROWS):
        node = start + tl.arange(0, ROWS)
        b = tl.load(
            grad + node.to(tl.int64)[:, None] * grad_row + column[None, :],
            mask=(node < nodes)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        target = tl.where(node < nodes, group * nodes + node, groups * nodes)
        a = row_sums(
            x, weight, ptr, index, edge, x_partial, target, groups * nodes, step, inner, x_row, WEIGHTED, NAMED, ROWS, INNER,
            AHEAD, CHUNK,
        )  # fmt: skip
        a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b, PRECISION)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    place = (
        partial + (split * groups + group).to(tl.int64) * inner * columns + step[:, None] * columns + column[None, :]
    )
    tl.store(place, total, mask=(step < inner)[:, None] & (column < columns)[None, :])


@triton.jit
def _summed_kernel(partial, out, splits, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of all splits."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for done in range(0, splits, PARTS):
        part = done + tl.arange(0, PARTS)
        inside = (part < splits)[:, None] & (place < size)[None, :]
        total += tl.load(partial + part.to(tl.int64)[:, None] * size + place[None, :], mask=inside, other=0.0)
    tl.store(out + place, tl.sum(total, 0).to(out.dtype.element_ty), mask=place < size)


def cell_mm(x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor) -> Tensor:
    """As `cells.reference`."""
    groups, inner, columns = w.shape
    nodes = (ptr.shape[0] - 1) // max(groups, 1)
    out = x.new_empty(nodes, columns)
    if out.numel() == 0 or x.numel() == 0 or index.shape[0] == 0:
        return out.zero_()
    table, sizes, fixed = sums_of_chunks(flat_rows(x), weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    _cells_kernel[(triton.cdiv(nodes, ROWS),)](
        *table, *sizes[:2], w, out, nodes, groups, columns, *w.stride(), ROWS=ROWS, COLUMNS=tile_of(columns),
        INNER=tile_of(inner), AHEAD=AHEAD, CHUNK=segments.CHUNK, PRECISION=narrow_precision(), num_warps=NUM_WARPS,
        num_stages=1, **fixed,
    )  # fmt: skip
    return out


def cell_mm_weights(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, grad: Tensor, groups: int
) -> Tensor:
    """As `cells.weights_reference`."""
    (nodes, columns), inner = grad.shape, x.shape[1]
    out = x.new_empty(groups, inner, columns)
    if out.numel() == 0 or x.numel() == 0 or index.shape[0] == 0 or nodes == 0:
        return out.zero_()
    table, sizes, fixed = sums_of_chunks(flat_rows(x), weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    pulled, splits = flat_rows(grad), triton.cdiv(nodes, SPLIT)
    partial = out.new_empty(splits, groups, inner, columns, dtype=torch.float32)
    _weights_kernel[(groups, splits)](
        *table, *sizes[:2], pulled, pulled.stride(0), partial, nodes, groups, columns, ROWS=WEIGHTS_ROWS,
        COLUMNS=tile_of(columns), INNER=tile_of(inner), AHEAD=WEIGHTS_AHEAD, CHUNK=segments.CHUNK, SPLIT=SPLIT,
        PRECISION=narrow_precision(), num_warps=WEIGHTS_WARPS, num_stages=1, **fixed,
    )  # fmt: skip
    size = out.numel()
    _summed_kernel[(triton.cdiv(size, BLOCK),)](partial, out, splits, size, PARTS=16, BLOCK=BLOCK, num_warps=4)
    return out
