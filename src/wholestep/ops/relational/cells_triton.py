"""The Triton bodies of cell_mm and cell_mm_weights: nothing stands in memory between edges and results.

Legend: as in `cells.py`; N nodes, G groups.

    cell_mm          a block of nodes goes through all groups. The entries of its cells of a group stand behind one another, so
                     that their rows are read without gaps; which node each is for is a matrix of ones and zeros, whose
                     product with the rows are the sums. Whole chunks of a cell have been summed up (`gather_triton.py`)
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

ROWS, NUM_WARPS = 32, 4
WEIGHTS_ROWS, WEIGHTS_WARPS, WEIGHTS_STAGES = 64, 4, 2
MOST_ENTRIES = 128


def entries_of(entries: int, cells: int) -> int:
    """Of a block of cells at a time: all of most blocks, at least a chunk."""
    usual = ROWS * entries // max(cells, 1)
    return min(max(triton.next_power_of_2(usual + usual // 4), segments.CHUNK), max(MOST_ENTRIES, segments.CHUNK))


@triton.jit
def _add_tile(
    a, x, weight, index, target, edge, begin, end, first, step, width, x_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a (ROWS, INNER) + the entries from begin to end, at most ENTRIES, each in the row of its node: ones and zeros @ rows of x."""
    entry = begin + tl.arange(0, ENTRIES)
    row = tl.load(index + entry, mask=entry < end, other=-1).to(tl.int64)
    node = tl.load(target + entry, mask=entry < end, other=-1)
    value = tl.load(
        x + row[:, None] * x_row + step[None, :], mask=(row >= 0)[:, None] & (step < width)[None, :], other=0.0
    )
    if WEIGHTED:
        place = tl.where(row >= 0, entry, -1)
        if NAMED:
            place = tl.load(edge + entry, mask=entry < end, other=-1)
        factor = tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)
        value = value.to(tl.float32) * factor[:, None]
    mine = (first + tl.arange(0, ROWS))[:, None] == node[None, :]
    return tl.dot(mine.to(value.dtype), ready(value, PRECISION), a, input_precision=PRECISION)


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
    x, weight, ptr, index, edge, partial, owner, target, chunks, width, x_row, w, out, nodes, groups, columns, w_group, w_inner,
    w_column, WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    behind = tl.minimum(first + ROWS, nodes)
    step, column = tl.arange(0, INNER), tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    # Triton 3.6 computes something else where a loop hands on tensors of which it takes the largest: numbers alone are handed on.
    begin, end = tl.load(ptr + first), tl.load(ptr + behind)
    for group in range(groups):
        cells = tl.minimum(group + 1, groups - 1) * nodes
        next_begin, next_end = tl.load(ptr + cells + first), tl.load(ptr + cells + behind)
        # all at once, or up to the next chunk and then chunk by chunk
        done = tl.where(end - begin <= ENTRIES, end, (begin // CHUNK + 1) * CHUNK)
        a = _add_tile(
            tl.zeros((ROWS, INNER), tl.float32), x, weight, index, target, edge, begin, done, first, step, width, x_row,
            WEIGHTED, NAMED, ROWS, ENTRIES, SUMS,
        )  # fmt: skip
        while done < end:
            chunk = done // CHUNK
            cell = tl.load(owner + chunk, mask=chunk < chunks, other=-1)
            if cell >= 0:  # summed up already
                value = tl.load(partial + chunk.to(tl.int64) * width + step, mask=step < width, other=0.0)
                mine = group * nodes + first + tl.arange(0, ROWS) == cell
                a += tl.where(mine[:, None], value[None, :], 0.0)
            else:
                a = _add_tile(
                    a, x, weight, index, target, edge, done, tl.minimum(done + CHUNK, end), first, step, width, x_row,
                    WEIGHTED, NAMED, ROWS, ENTRIES, SUMS,
                )  # fmt: skip
            done += CHUNK
        b = tl.load(  # not earlier: then a thread has 213 registers instead of 128
            w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
            mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        a, b = ready(a.to(x.dtype.element_ty), PRECISION), ready(b, PRECISION)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        begin, end = next_begin, next_end
    finite = tl.abs(total) < float("inf")
    if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
        total = _one_by_one(
            x, weight, ptr, index, target, edge, first, behind, step, column, width, x_row, w, nodes, groups, columns, w_group,
            w_inner, w_column, WEIGHTED, NAMED, ROWS, COLUMNS,
        )  # fmt: skip
    node = first + tl.arange(0, ROWS)
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
    nodes, entries = (ptr.shape[0] - 1) // max(groups, 1), index.shape[0]
    out = x.new_empty(nodes, columns)
    if out.numel() == 0 or x.numel() == 0 or entries == 0:
        return out.zero_()
    table, sizes, owner, fixed = sums_of_chunks(flat_rows(x), weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    precision = narrow_precision()
    _cells_kernel[(triton.cdiv(nodes, ROWS),)](
        *table, owner, target, owner.shape[0], *sizes[:2], w, out, nodes, groups, columns, *w.stride(), ROWS=ROWS,
        ENTRIES=entries_of(entries, groups * nodes), COLUMNS=tile_of(columns), INNER=tile_of(inner), CHUNK=segments.CHUNK,
        PRECISION=precision, SUMS=precision if x.dtype == torch.float32 else "tf32", num_warps=NUM_WARPS, num_stages=1, **fixed,
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
