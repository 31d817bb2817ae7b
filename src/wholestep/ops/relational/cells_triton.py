"""The Triton bodies of cell_mm and cell_mm_weights: nothing stands in memory between edges and results.

Legend: as in `cells.py`; N nodes, G groups.

    cell_mm          a block of nodes goes through all groups: the sums of its cells are made as gather_sum makes them
                     (`gather_triton.py`) and multiplied where they are. AHEAD entries of every cell are read at a time, and
                     those of the next group are found while this one's are on their way
    cell_mm_weights  1. of every SPLIT entries and every group among them: rows of x, transposed, @ rows of grad, which is one
                     product with no sums before it, 2. summed up per group

Sums are in float32, rounded to x's dtype before the product, and in a fixed order. Import only where Triton exists.
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
from wholestep.ops.relational.segments_triton import cut, direct_entry, pieces

ROWS, NUM_WARPS, AHEAD = 32, 4, 4
"""Not raced yet: with four entries at a time most tiles need one read of rows, and a thread no more registers than with two (209
for 64 columns of tf32)."""
WEIGHTS_ROWS, WEIGHTS_WARPS, WEIGHTS_STAGES = 64, 4, 2


@triton.jit
def _found(index, edge, entry, real, NAMED: tl.constexpr):
    """The rows that entries take, or -1, and where their weights stand."""
    row = tl.load(index + entry, mask=real, other=-1).to(tl.int64)
    if NAMED:
        return row, tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
    return row, tl.where(row >= 0, entry, -1)


@triton.jit
def _taken(x, weight, row, place, column, width, x_row, WEIGHTED: tl.constexpr):
    """(ROWS, AHEAD, COLUMNS)"""
    inside = (row >= 0)[:, :, None] & (column < width)[None, None, :]
    value = tl.load(x + row[:, :, None] * x_row + column[None, None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        value *= tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)[:, :, None]
    return value


@triton.jit
def _rest(
    total, x, weight, index, edge, partial, start, head, direct, first, last, done, column, width, x_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """total (ROWS, COLUMNS) + the direct entries of each target from number `done` on + its whole chunks."""
    for so_far in range(done, tl.max(direct.to(tl.int32), 0), AHEAD):
        number = so_far + tl.arange(0, AHEAD)[None, :]
        entry = direct_entry(start[:, None], head[:, None], last[:, None], number, CHUNK).to(tl.int64)
        row, place = _found(index, edge, entry, number < direct[:, None], NAMED)
        total += tl.sum(_taken(x, weight, row, place, column, width, x_row, WEIGHTED), 1)
    for number in range(0, tl.max((last - first).to(tl.int32), 0)):
        chunk = (first + number).to(tl.int64)
        inside = (chunk < last)[:, None] & (column < width)[None, :]
        total += tl.load(partial + chunk[:, None] * width + column[None, :], mask=inside, other=0.0)
    return total


@triton.jit
def row_sums(
    x, weight, ptr, index, edge, partial, target, targets, column, width, x_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS): direct entries + whole chunks of each target; zeros from `targets` on."""
    start, head, direct, first, last = pieces(ptr, target, targets, CHUNK)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    return _rest(
        total, x, weight, index, edge, partial, start, head, direct, first, last, 0, column, width, x_row, WEIGHTED, NAMED,
        AHEAD, CHUNK,
    )  # fmt: skip


@triton.jit
def _bounds(ptr, group, groups, node, nodes):
    """Where the entries of a group's cells begin and end; of no more than there are."""
    cell = ptr + tl.minimum(group, groups - 1) * nodes + node
    start = tl.load(cell, mask=node < nodes, other=0)
    return start, tl.load(cell + 1, mask=node < nodes, other=0)


@triton.jit
def _cells_kernel(
    x, weight, ptr, index, edge, partial, width, x_row, w, out, nodes, groups, columns, w_group, w_inner, w_column,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    node, number = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, AHEAD)[None, :]
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start, end = _bounds(ptr, 0, groups, node, nodes)
    later, later_end = _bounds(ptr, 1, groups, node, nodes)
    head, direct, first, last = cut(start, end, CHUNK)
    entry = direct_entry(start[:, None], head[:, None], last[:, None], number, CHUNK).to(tl.int64)
    row, place = _found(index, edge, entry, number < direct[:, None], NAMED)
    for group in range(groups):
        value = _taken(x, weight, row, place, step, width, x_row, WEIGHTED)
        next_head, next_direct, next_first, next_last = cut(later, later_end, CHUNK)
        entry = direct_entry(later[:, None], next_head[:, None], next_last[:, None], number, CHUNK).to(tl.int64)
        row, place = _found(index, edge, entry, number < next_direct[:, None], NAMED)
        next_start = later
        later, later_end = _bounds(ptr, group + 2, groups, node, nodes)
        a = _rest(
            tl.sum(value, 1), x, weight, index, edge, partial, start, head, direct, first, last, AHEAD, step, width, x_row,
            WEIGHTED, NAMED, AHEAD, CHUNK,
        )  # fmt: skip
        b = tl.load(  # not earlier: it takes most registers
            w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
            mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b, PRECISION)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        start, head, direct, first, last = next_start, next_head, next_direct, next_first, next_last
    at = out + node.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(node < nodes)[:, None] & (column < columns)[None, :])


@triton.jit
def _parts_kernel(
    x, weight, grad, index, target, edge, partial, ends, entries, inner, columns, x_row, grad_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INNER: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """partial (splits + groups, inner, columns); what no entries belong to is not written, and never read."""
    split = tl.program_id(0)
    begin = split.to(tl.int64) * SPLIT
    behind = tl.minimum(begin + SPLIT, entries)
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    group = first_group(ends, begin, GROUPS, SLOTS)
    while (group < GROUPS) & (begin < behind):
        end = tl.minimum(tl.load(ends + group).to(tl.int64), behind)
        if end > begin:
            total = tl.zeros((INNER, COLUMNS), tl.float32)
            for start in range(begin, end, ROWS):
                entry = start + tl.arange(0, ROWS)
                row = tl.load(index + entry, mask=entry < end, other=-1).to(tl.int64)
                node = tl.load(target + entry, mask=entry < end, other=-1).to(tl.int64)
                a = tl.load(
                    x + row[None, :] * x_row + step[:, None],
                    mask=(step < inner)[:, None] & (row >= 0)[None, :],
                    other=0.0,
                )
                b = tl.load(
                    grad + node[:, None] * grad_row + column[None, :],
                    mask=(node >= 0)[:, None] & (column < columns)[None, :], other=0.0,
                )  # fmt: skip
                if WEIGHTED:
                    place = tl.where(node >= 0, entry, -1)
                    if NAMED:
                        place = tl.load(edge + entry, mask=entry < end, other=-1).to(tl.int64)
                    factor = tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)
                    b = (b.to(tl.float32) * factor[:, None]).to(grad.dtype.element_ty)
                total = tl.dot(ready(a, PRECISION), ready(b, PRECISION), total, input_precision=PRECISION)
            at = (split + group).to(tl.int64) * inner * columns + step[:, None] * columns + column[None, :]
            tl.store(partial + at, total, mask=(step < inner)[:, None] & (column < columns)[None, :])
            begin = end
        group += 1


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
    x: Tensor, weight: Tensor | None, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    """As `cells.weights_reference`."""
    (nodes, columns), inner, entries = grad.shape, x.shape[1], index.shape[0]
    groups = (ptr.shape[0] - 1) // max(nodes, 1)
    out = x.new_empty(groups, inner, columns)
    if out.numel() == 0 or x.numel() == 0 or entries == 0 or nodes == 0:
        return out.zero_()
    left, right, ends, split = flat_rows(x), flat_rows(grad), ptr[nodes::nodes].contiguous(), split_of(entries)
    splits = triton.cdiv(entries, split)
    partial = out.new_empty(splits + groups, inner, columns, dtype=torch.float32)
    # Where a table has no weights or no edges, another tensor stands in, which is not read.
    factors, names = left if weight is None else weight.contiguous(), index if edge is None else edge
    _parts_kernel[(splits,)](
        left, factors, right, index, target, names, partial, ends, entries, inner, columns, left.stride(0), right.stride(0),
        WEIGHTED=weight is not None, NAMED=edge is not None, GROUPS=groups, SLOTS=slots_of(groups), ROWS=WEIGHTS_ROWS,
        COLUMNS=tile_of(columns), INNER=tile_of(inner), SPLIT=split, PRECISION=narrow_precision(), num_warps=WEIGHTS_WARPS,
        num_stages=WEIGHTS_STAGES,
    )  # fmt: skip
    return add_parts(partial, ends, out, split)
