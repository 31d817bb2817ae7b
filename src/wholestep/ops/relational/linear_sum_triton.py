"""The Triton bodies of summed_mm and summed_mm_weights: row sums are made where they are multiplied, and never written.

Legend: as in `linear_sum.py`; R rows. A program sums up ROWS rows as gather_sum does (`gather_triton.py`), one entry of each after
another, and multiplies them as grouped_mm does (`grouped_narrow_triton.py`).

    summed_mm          out[row] = sums[row] @ w[group]
    summed_mm_weights  1. of every SPLIT rows and every group among them: sums.T @ sums of grad, 2. summed up per group

Sums are in float32, rounded to x's dtype before the product, and in a fixed order. Cost beside what must be read: a tile
waits for the longest of its rows, at most 2 CHUNK entries and its number of chunks. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.grouped_mm import split_of
from wholestep.ops.grouped_mm_triton import narrow_precision
from wholestep.ops.grouped_narrow_triton import add_parts, first_group, ready, slots_of, tile_of
from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.gather_triton import flat_rows, sums_of_chunks
from wholestep.ops.relational.linear_sum import MOST_SPLIT
from wholestep.ops.relational.segments_triton import direct_entry, pieces

NUM_WARPS = 4
WEIGHTS_ROWS, WEIGHTS_WARPS = 32, 4
"""Of a gradient of weights, which holds sums of both sides."""
AHEAD, WEIGHTS_AHEAD = 2, 1
"""Entries of a row that are read at a time. In a product two take as many registers as one (96 a thread), in the gradient of
weights a fifth more. Not raced yet."""
Side = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""x, ptr, index, edge."""


def rows_of(columns: int) -> int:
    """Rows of a program of a product. On an H200 64 columns take 0.81 ms for 1.19 with 64 rows, 32 columns 0.76 for 0.71."""
    return 32 if columns > 32 else 64


@triton.jit
def taken(x, weight, row, place, column, width, x_row, WEIGHTED: tl.constexpr):
    """x[row] of entries (ROWS, AHEAD), times what stands at their places of `weight`; nothing below 0: (ROWS, AHEAD, COLUMNS)."""
    inside = (row >= 0)[:, :, None] & (column < width)[None, None, :]
    value = tl.load(x + row[:, :, None] * x_row + column[None, None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)[:, :, None]
    return value


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
        row = tl.load(index + entry, mask=number < direct[:, None], other=-1).to(tl.int64)
        place = tl.where(row >= 0, entry, -1)
        if NAMED:
            place = tl.load(edge + entry, mask=number < direct[:, None], other=-1).to(tl.int64)
        total += tl.sum(taken(x, weight, row, place, column, width, x_row, WEIGHTED), 1)
    for number in range(0, tl.max((last - first).to(tl.int32), 0)):
        chunk = (first + number).to(tl.int64)
        inside = (chunk < last)[:, None] & (column < width)[None, :]
        total += tl.load(partial + chunk[:, None] * width + column[None, :], mask=inside, other=0.0)
    return total


@triton.jit
def _rows_kernel(
    x, weight, ptr, index, edge, partial, width, x_row, w, out, ends, rows, columns, w_group, w_inner, w_column,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row, step, column = begin + tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLUMNS)
    behind = tl.minimum(begin + ROWS, rows)
    group = first_group(ends, begin, GROUPS, SLOTS)
    a = row_sums(
        x, weight, ptr, index, edge, partial, row, rows, step, width, x_row, WEIGHTED, NAMED, ROWS, INNER, AHEAD, CHUNK
    )
    a = ready(a.to(x.dtype.element_ty), PRECISION)
    place = out + row[:, None] * columns + column[None, :]
    while (group < GROUPS) & (begin < behind):
        end = tl.minimum(tl.load(ends + group).to(tl.int64), behind)
        if end > begin:
            b = tl.load(
                w + group.to(tl.int64) * w_group + step[:, None] * w_inner + column[None, :] * w_column,
                mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
            )  # fmt: skip
            part = tl.dot(a, ready(b, PRECISION), input_precision=PRECISION)
            here = (row >= begin) & (row < end)
            tl.store(place, part.to(out.dtype.element_ty), mask=here[:, None] & (column < columns)[None, :])
            begin = end
        group += 1
    rest = (row >= begin) & (row < rows)  # of no group
    tl.store(place, tl.zeros((ROWS, COLUMNS), out.dtype.element_ty), mask=rest[:, None] & (column < columns)[None, :])


@triton.jit
def _parts_kernel(
    x, weight, ptr, index, edge, x_partial, inner, x_row,
    grad, grad_weight, grad_ptr, grad_index, grad_edge, grad_partial, columns, grad_row, partial, ends, rows,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, GRAD_WEIGHTED: tl.constexpr, GRAD_NAMED: tl.constexpr, GROUPS: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial (splits + groups, inner, columns); what no rows belong to is not written, and never read."""
    split = tl.program_id(0)
    begin = split.to(tl.int64) * SPLIT
    behind = tl.minimum(begin + SPLIT, rows)
    entry, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    group = first_group(ends, begin, GROUPS, SLOTS)
    while (group < GROUPS) & (begin < behind):
        end = tl.minimum(tl.load(ends + group).to(tl.int64), behind)
        if end > begin:
            total = tl.zeros((INNER, COLUMNS), tl.float32)
            for start in range(begin, end, ROWS):
                row = start + tl.arange(0, ROWS)  # those of the next group give zeros
                a = row_sums(
                    x, weight, ptr, index, edge, x_partial, row, end, entry, inner, x_row, WEIGHTED, NAMED, ROWS, INNER, AHEAD,
                    CHUNK,
                )  # fmt: skip
                b = row_sums(
                    grad, grad_weight, grad_ptr, grad_index, grad_edge, grad_partial, row, end, column, columns, grad_row,
                    GRAD_WEIGHTED, GRAD_NAMED, ROWS, COLUMNS, AHEAD, CHUNK,
                )  # fmt: skip
                a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b.to(grad.dtype.element_ty), PRECISION)
                total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
            place = (split + group).to(tl.int64) * inner * columns + entry[:, None] * columns + column[None, :]
            tl.store(partial + place, total, mask=(entry < inner)[:, None] & (column < columns)[None, :])
            begin = end
        group += 1


def summed_mm(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor, ends: Tensor
) -> Tensor:
    """As `linear_sum.reference`."""
    rows, (groups, inner, columns) = ptr.shape[0] - 1, w.shape
    out = x.new_empty(rows, columns)
    if out.numel() == 0 or x.numel() == 0 or index.shape[0] == 0:
        return out.zero_()
    table, sizes, fixed = sums_of_chunks(flat_rows(x), weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    tile = rows_of(columns)
    _rows_kernel[(triton.cdiv(rows, tile),)](
        *table, *sizes[:2], w, out, ends, rows, columns, *w.stride(), GROUPS=groups, SLOTS=slots_of(groups), ROWS=tile,
        COLUMNS=tile_of(columns), INNER=tile_of(inner), AHEAD=AHEAD, CHUNK=segments.CHUNK, PRECISION=narrow_precision(),
        num_warps=NUM_WARPS, num_stages=1, **fixed,
    )  # fmt: skip
    return out


def summed_mm_weights(of_x: Side, of_grad: Side, weight: Tensor | None, ends: Tensor) -> Tensor:
    """As `linear_sum.weights_reference`."""
    groups, inner, columns, rows = ends.shape[0], of_x[0].shape[1], of_grad[0].shape[1], of_x[1].shape[0] - 1
    out = of_x[0].new_empty(groups, inner, columns)
    if (
        out.numel() == 0
        or rows == 0
        or any(x.numel() == 0 or index.shape[0] == 0 for x, _, index, _ in (of_x, of_grad))
    ):
        return out.zero_()
    (left, (_, left_row, *_), fixed), (right, (_, right_row, *_), known) = (
        sums_of_chunks(flat_rows(x), None if edge is None else weight, ptr, index, edge)
        for x, ptr, index, edge in (of_x, of_grad)
    )
    split = split_of(rows, MOST_SPLIT)
    splits = triton.cdiv(rows, split)
    partial = out.new_empty(splits + groups, inner, columns, dtype=torch.float32)
    _parts_kernel[(splits,)](
        *left, inner, left_row, *right, columns, right_row, partial, ends, rows, WEIGHTED=fixed["WEIGHTED"],
        NAMED=fixed["NAMED"], GRAD_WEIGHTED=known["WEIGHTED"], GRAD_NAMED=known["NAMED"], GROUPS=groups,
        SLOTS=slots_of(groups), ROWS=WEIGHTS_ROWS, COLUMNS=tile_of(columns), INNER=tile_of(inner), AHEAD=WEIGHTS_AHEAD,
        CHUNK=segments.CHUNK, SPLIT=split, PRECISION=narrow_precision(), num_warps=WEIGHTS_WARPS, num_stages=1,
    )  # fmt: skip
    return add_parts(partial, ends, out, split)
