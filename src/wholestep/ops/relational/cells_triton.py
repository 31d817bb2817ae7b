"""The Triton bodies of cell_mm and cell_mm_weights: nothing stands in memory between edges and results.

Legend: as in `cells.py`; N nodes, G groups.

    cell_mm          a block of nodes goes through all groups: the sums of its cells are made and multiplied where they are.
                     AHEAD entries of every cell are read at a time, and those of the next group are found while this one's
                     are on their way; what is in longer cells is added as gather_sum does (`gather_triton.py`)
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
from wholestep.ops.relational.linear_sum_triton import row_sums, taken

ROWS, NUM_WARPS, AHEAD = 32, 4, 4
"""With four entries at a time most cells are short, and are read at once. Tried on an H200 and slower: the entries of a block of
cells one behind the other, added up by a product with ones and zeros (5.8 ms for the four sums of a step of r-gcn, 3.1 so)."""
WEIGHTS_ROWS, WEIGHTS_WARPS, WEIGHTS_STAGES = 64, 4, 2


@triton.jit
def _bounds(ptr, group, groups, node, nodes):
    """Where the entries of a group's cells begin and end, and the most of a cell; of no more groups than there are."""
    cell = ptr + tl.minimum(group, groups - 1) * nodes + node
    start = tl.load(cell, mask=node < nodes, other=0)
    end = tl.load(cell + 1, mask=node < nodes, other=0)
    return start, end, tl.max(end - start, 0)


@triton.jit
def _found(index, edge, start, end, number, NAMED: tl.constexpr):
    """The rows that the entries of short cells take, or -1, and where their weights stand."""
    entry, count = (start[:, None] + number).to(tl.int64), (end - start)[:, None]
    real = (number < count) & (count <= number.shape[1])
    row = tl.load(index + entry, mask=real, other=-1).to(tl.int64)
    if NAMED:
        return row, tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
    return row, tl.where(row >= 0, entry, -1)


@triton.jit
def _one_by_one(
    x, weight, ptr, index, target, edge, first, behind, step, column, width, x_row, w, nodes, groups, columns, w_group, w_inner,
    w_column, WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the kernel computes, entry by entry: what is not finite in one stays in its node."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for group in range(groups):
        b = tl.load(
            w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
            mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        for entry in range(tl.load(ptr + group * nodes + first), tl.load(ptr + group * nodes + behind)):
            row = tl.load(index + entry).to(tl.int64)
            if row >= 0:
                value = tl.load(x + row * x_row + step, mask=step < width, other=0.0).to(tl.float32)
                if WEIGHTED:
                    place = entry
                    if NAMED:
                        place = tl.load(edge + entry)
                    if place >= 0:
                        value *= tl.load(weight + place).to(tl.float32)
                part = tl.sum(tl.where((step < width)[:, None], value[:, None] * b, 0.0), 0)
                mine = first + tl.arange(0, ROWS) == tl.load(target + entry)
                total += tl.where(mine[:, None], part[None, :], 0.0)
    return total


@triton.jit
def _cells_kernel(
    x, weight, ptr, index, edge, partial, target, width, x_row, w, out, nodes, groups, columns, w_group, w_inner, w_column,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * ROWS
    node, number = block + tl.arange(0, ROWS), tl.arange(0, AHEAD)[None, :]
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Triton 3.6 takes the largest of a tensor that a loop hands on once, before the loop: what is handed on are largest numbers
    # that were found where the tensor was loaded.
    start, end, longest = _bounds(ptr, 0, groups, node, nodes)
    later, later_end, later_longest = _bounds(ptr, 1, groups, node, nodes)
    row, place = _found(index, edge, start, end, number, NAMED)
    for group in range(groups):
        value = taken(x, weight, row, place, step, width, x_row, WEIGHTED)
        row, place = _found(index, edge, later, later_end, number, NAMED)
        next_longest = later_longest
        later, later_end, later_longest = _bounds(ptr, group + 2, groups, node, nodes)
        a = tl.sum(value, 1)
        if longest > AHEAD:
            first, behind, _ = _bounds(ptr, group, groups, node, nodes)
            long = tl.where(behind - first > AHEAD, group * nodes + node, groups * nodes)
            a += row_sums(
                x, weight, ptr, index, edge, partial, long, groups * nodes, step, width, x_row, WEIGHTED, NAMED, ROWS, INNER,
                AHEAD, CHUNK,
            )  # fmt: skip
        b = tl.load(  # not earlier: it takes most registers
            w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
            mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b, PRECISION)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        longest = next_longest
    finite = tl.abs(total) < float("inf")
    if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
        total = _one_by_one(
            x, weight, ptr, index, target, edge, block, tl.minimum(block + ROWS, nodes), step, column, width, x_row, w, nodes,
            groups, columns, w_group, w_inner, w_column, WEIGHTED, NAMED, ROWS, COLUMNS,
        )  # fmt: skip
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


def cell_mm(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None, w: Tensor
) -> Tensor:
    """As `cells.reference`."""
    groups, inner, columns = w.shape
    nodes = (ptr.shape[0] - 1) // max(groups, 1)
    out = x.new_empty(nodes, columns)
    if out.numel() == 0 or x.numel() == 0 or index.shape[0] == 0:
        return out.zero_()
    table, sizes, fixed = sums_of_chunks(flat_rows(x), weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    _cells_kernel[(triton.cdiv(nodes, ROWS),)](
        *table, target, *sizes[:2], w, out, nodes, groups, columns, *w.stride(), ROWS=ROWS, COLUMNS=tile_of(columns),
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
