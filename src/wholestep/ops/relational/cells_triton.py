"""The Triton bodies of cell_mm, cell_mm_weights and cell_mm_both: products over all groups at once, by cuBLAS, and sums of cells.

Legend: as in `cells.py`; N nodes, G groups, E entries.

    product first  of some groups at a time: x @ their matrices, beside each other, then every node adds up the rows of its cells
    sums first     of some nodes at a time: the sums of all of their cells, beside each other, then one product. A gradient of the
                   matrices is a product of the same sums, so cell_mm_both makes them once

Product first moves (E + G N) O numbers and sums first (E + 2 G N) I, but rows of x are mostly in the cache and rows of products
are not: on an H200 a number of these takes about twice as long, and `cell_mm` goes by that. So many groups or nodes are taken
at a time as have ROOM. Sums are in float32 and in a fixed order; sums, or products, that stand in between are rounded to x's dtype.

A product of sums multiplies cells without entries too, as zeros. What is not finite and multiplied by those must not show: results
that are not finite are made again entry by entry. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.grouped_mm_triton import narrow_precision
from wholestep.ops.grouped_narrow_triton import ready, tile_of
from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.cells import groups_at_once, nodes_at_once, product_first
from wholestep.ops.relational.gather_triton import NUM_WARPS as CHUNK_WARPS
from wholestep.ops.relational.gather_triton import TILE, _terms, flat_rows, stand_ins, sums_of_chunks
from wholestep.ops.relational.linear_sum_triton import row_sums, taken

ROWS, NUM_WARPS, AHEAD = 8, 2, 4
"""Cells of a program, and entries of each that are read at a time: with four most cells are short. On an H200 the sums of r-gcn's
cells take 0.63 ms with 16 cells and 4 warps, 0.83 with 32, 0.78 with 16 and 2 warps, 0.95 with 16 and eight entries; whole calls
are a little quicker with 8 cells and 2 warps."""
BESIDE = 2
"""Groups of a program, product first."""
AGAIN_ROWS = 32


@triton.jit
def _sums(
    x, weight, ptr, index, edge, partial, cell, cells, column, width, x_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """(LANES, COLUMNS): what the entries of each cell add up to; zeros from `cells` on."""
    start = tl.load(ptr + cell, mask=cell < cells, other=0)
    count = tl.load(ptr + cell + 1, mask=cell < cells, other=0) - start
    number = tl.arange(0, AHEAD)[None, :]
    entry = (start[:, None] + number).to(tl.int64)
    real = (number < count[:, None]) & (count <= AHEAD)[:, None]
    row = tl.load(index + entry, mask=real, other=-1).to(tl.int64)
    place = tl.where(row >= 0, entry, -1)
    if NAMED:
        place = tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
    total = tl.sum(taken(x, weight, row, place, column, width, x_row, WEIGHTED), 1)
    if tl.max(count, 0) > AHEAD:
        long = tl.where(count > AHEAD, cell, cells)
        total += row_sums(
            x,
            weight,
            ptr,
            index,
            edge,
            partial,
            long,
            cells,
            column,
            width,
            x_row,
            WEIGHTED,
            NAMED,
            LANES,
            COLUMNS,
            AHEAD,
            CHUNK,
        )
    return total


@triton.jit
def _sums_kernel(
    x, weight, ptr, index, edge, partial, width, x_row, out, nodes, groups, first, behind,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """out (behind - first, groups, width): the sums of the cells of those nodes."""
    node, group, column = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, COLUMNS)
    cell = tl.where(node < behind, group * nodes + node, groups * nodes)
    total = _sums(
        x, weight, ptr, index, edge, partial, cell, groups * nodes, column, width, x_row, WEIGHTED, NAMED, ROWS, COLUMNS, AHEAD,
        CHUNK,
    )  # fmt: skip
    at = out + ((node - first).to(tl.int64) * groups + group)[:, None] * width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(node < behind)[:, None] & (column < width)[None, :])


@triton.jit
def _chunks_kernel(
    made, weight, index, edge, owner, partial, chunks, width, made_row, nodes, first, behind,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """partial[chunk] of every whole chunk of these groups, whose products lie beside each other in `made`."""
    chunk = tl.program_id(0).to(tl.int64)
    group = tl.load(owner + chunk) // nodes
    if (group >= first) & (group < behind):
        column = tl.arange(0, COLUMNS)
        total = tl.zeros((LANES, COLUMNS), tl.float32)
        for done in tl.static_range(0, CHUNK, LANES):
            entry = chunk * CHUNK + done + tl.arange(0, LANES)
            total += _terms(
                made + (group - first) * width, weight, index, edge, entry, entry >= 0, column, width, made_row, 1, width,
                WEIGHTED, NAMED, False,
            )  # fmt: skip
        tl.store(partial + chunk * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def _added_kernel(
    made, weight, ptr, index, edge, partial, width, made_row, out, nodes, groups, first, behind,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, BESIDE: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out[node] += the rows of its cells of these groups, whose products lie beside each other in `made`."""
    block, lane, column = tl.program_id(0) * ROWS, tl.arange(0, ROWS * BESIDE), tl.arange(0, COLUMNS)
    node = block + lane // BESIDE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in range(first, behind, BESIDE):
        group = done + lane % BESIDE
        cell = tl.where((node < nodes) & (group < behind), group * nodes + node, groups * nodes)
        part = _sums(
            made + ((group - first) * width)[:, None, None], weight, ptr, index, edge, partial, cell, groups * nodes, column,
            width, made_row, WEIGHTED, NAMED, ROWS * BESIDE, COLUMNS, AHEAD, CHUNK,
        )  # fmt: skip
        total += tl.sum(tl.reshape(part, (ROWS, BESIDE, COLUMNS)), 1)
    nodes_here = block + tl.arange(0, ROWS)
    at = out + nodes_here.to(tl.int64)[:, None] * width + column[None, :]
    inside = (nodes_here < nodes)[:, None] & (column < width)[None, :]
    if first > 0:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)


@triton.jit
def _rows_again_kernel(
    x, weight, ptr, index, edge, width, x_row, w, out, nodes, groups, columns, w_group, w_inner, w_column,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Rows of cell_mm that are not finite, entry by entry."""
    block = tl.program_id(0).to(tl.int64) * ROWS
    node, step, column = block + tl.arange(0, ROWS), tl.arange(0, INNER), tl.arange(0, COLUMNS)
    at = out + node[:, None] * columns + column[None, :]
    found = tl.load(at, mask=(node < nodes)[:, None] & (column < columns)[None, :], other=0.0).to(tl.float32)
    if tl.max(tl.max((tl.abs(found) < float("inf")).to(tl.int32) ^ 1, 1), 0) > 0:
        for one in range(block, tl.minimum(block + ROWS, nodes)):
            total = tl.zeros((COLUMNS,), tl.float32)
            for group in range(groups):
                begin, end = tl.load(ptr + group * nodes + one), tl.load(ptr + group * nodes + one + 1)
                if end > begin:
                    b = tl.load(
                        w + group * w_group + step[:, None] * w_inner + column[None, :] * w_column,
                        mask=(step < width)[:, None] & (column < columns)[None, :], other=0.0,
                    ).to(tl.float32)  # fmt: skip
                    for entry in range(begin, end):
                        row = tl.load(index + entry).to(tl.int64)
                        if row >= 0:
                            value = tl.load(x + row * x_row + step, mask=step < width, other=0.0).to(tl.float32)
                            if WEIGHTED:
                                place = entry
                                if NAMED:
                                    place = tl.load(edge + entry)
                                if place >= 0:
                                    value *= tl.load(weight + place).to(tl.float32)
                            total += tl.sum(tl.where((step < width)[:, None], value[:, None] * b, 0.0), 0)
            tl.store(out + one * columns + column, total.to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def _weights_again_kernel(
    x, weight, grad, ptr, index, target, edge, out, nodes, inner, columns, x_row, grad_row,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of matrices (G, inner, columns) that are not finite, entry by entry."""
    group, step, column = tl.program_id(0), tl.arange(0, INNER), tl.arange(0, COLUMNS)
    at = out + group.to(tl.int64) * inner * columns + step[:, None] * columns + column[None, :]
    inside = (step < inner)[:, None] & (column < columns)[None, :]
    found = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if tl.max(tl.max((tl.abs(found) < float("inf")).to(tl.int32) ^ 1, 1), 0) > 0:
        total = tl.zeros((INNER, COLUMNS), tl.float32)
        end = tl.load(ptr + (group + 1) * nodes)
        for start in range(tl.load(ptr + group * nodes), end, ROWS):
            entry = start + tl.arange(0, ROWS)
            row = tl.load(index + entry, mask=entry < end, other=-1).to(tl.int64)
            node = tl.load(target + entry, mask=entry < end, other=-1).to(tl.int64)
            a = tl.load(
                x + row[None, :] * x_row + step[:, None], mask=(step < inner)[:, None] & (row >= 0)[None, :], other=0.0
            )
            if WEIGHTED:
                place = tl.where(row >= 0, entry, -1)
                if NAMED:
                    place = tl.load(edge + entry, mask=entry < end, other=-1).to(tl.int64)
                factor = tl.load(weight + place, mask=place >= 0, other=1.0).to(tl.float32)
                a = (a.to(tl.float32) * factor[None, :]).to(x.dtype.element_ty)
            b = tl.load(
                grad + node[:, None] * grad_row + column[None, :],
                mask=((node >= 0) & (row >= 0))[:, None] & (column < columns)[None, :], other=0.0,
            )  # fmt: skip
            total = tl.dot(ready(a, PRECISION), ready(b, PRECISION), total, input_precision=PRECISION)
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)


Block = tuple[slice, Tensor]
"""Nodes, and the sums of their cells (nodes, G * width)."""


def _blocks_of_sums(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, groups: int
) -> Iterator[Block]:
    """In the same memory, one after another."""
    nodes, width = (ptr.shape[0] - 1) // groups, x.shape[1]
    table, sizes, fixed = sums_of_chunks(x, weight, ptr, index, edge)
    del fixed["PER_HEAD"]
    at_once = nodes_at_once(nodes, groups, width, x.element_size())
    sums = x.new_empty(at_once, groups * width)
    for first in range(0, nodes, at_once):
        behind = min(first + at_once, nodes)
        _sums_kernel[(triton.cdiv(behind - first, ROWS), groups)](
            *table, *sizes[:2], sums, nodes, groups, first, behind, ROWS=ROWS, COLUMNS=tile_of(width), AHEAD=AHEAD,
            CHUNK=segments.CHUNK, num_warps=NUM_WARPS, num_stages=1, **fixed,
        )  # fmt: skip
        yield slice(first, behind), sums[: behind - first]


def _nothing(*tensors: Tensor) -> bool:
    return any(t.numel() == 0 for t in tensors)


def _rows_again(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None, w: Tensor, out: Tensor
) -> None:
    (groups, inner, columns), nodes = w.shape, out.shape[0]
    factors, names, fixed = stand_ins(x, weight, index, edge)
    _rows_again_kernel[(triton.cdiv(nodes, AGAIN_ROWS),)](
        x, factors, ptr, index, names, inner, x.stride(0), w, out, nodes, groups, columns, *w.stride(), ROWS=AGAIN_ROWS,
        COLUMNS=tile_of(columns), INNER=tile_of(inner), num_warps=4, num_stages=1, **fixed,
    )  # fmt: skip


def _weights_again(
    x: Tensor, weight: Tensor | None, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    groups, inner, columns = out.shape
    factors, names, fixed = stand_ins(x, weight, index, edge)
    _weights_again_kernel[(groups,)](
        x, factors, grad, ptr, index, target, names, out, (ptr.shape[0] - 1) // groups, inner, columns, x.stride(0),
        grad.stride(0), ROWS=64, COLUMNS=tile_of(columns), INNER=tile_of(inner), PRECISION=narrow_precision(), num_warps=4,
        num_stages=2, **fixed,
    )  # fmt: skip


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """a @ b to what is there, in float32."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        total += torch.mm(a, b, out_dtype=torch.float32)
    else:
        total += a.float() @ b.float()


def _product_first(
    x: Tensor, weight: Tensor | None, w: Tensor, ptr: Tensor, index: Tensor, edge: Tensor | None
) -> Tensor:
    """As `cells.reference`."""
    (groups, inner, columns), nodes, (factors, names, fixed) = (
        w.shape,
        (ptr.shape[0] - 1) // w.shape[0],
        stand_ins(x, weight, index, edge),
    )
    owner = segments.owners(ptr, index.shape[0])
    partial, total = (x.new_empty(rows, columns, dtype=torch.float32) for rows in (max(owner.shape[0], 1), nodes))
    at_once = groups_at_once(x.shape[0], groups, columns, x.element_size())
    products, tile = x.new_empty(x.shape[0] * at_once * columns), tile_of(columns)
    for first in range(0, groups, at_once):
        behind = min(first + at_once, groups)
        beside = (behind - first) * columns
        made = products[: x.shape[0] * beside].view(x.shape[0], beside)
        torch.mm(x, w[first:behind].transpose(0, 1).reshape(inner, beside), out=made)
        if owner.shape[0]:
            _chunks_kernel[(owner.shape[0],)](
                made, factors, index, names, owner, partial, owner.shape[0], columns, beside, nodes, first, behind,
                LANES=min(TILE // tile, segments.CHUNK), COLUMNS=tile, CHUNK=segments.CHUNK, num_warps=CHUNK_WARPS,
                num_stages=1, **fixed,
            )  # fmt: skip
        _added_kernel[(triton.cdiv(nodes, max(ROWS // BESIDE, 1)),)](
            made, factors, ptr, index, names, partial, columns, beside, total, nodes, groups, first, behind,
            ROWS=max(ROWS // BESIDE, 1), BESIDE=BESIDE, COLUMNS=tile, AHEAD=AHEAD, CHUNK=segments.CHUNK, num_warps=NUM_WARPS,
            num_stages=1, **fixed,
        )  # fmt: skip
    return total.to(x.dtype)


def _results(
    x: Tensor, weight: Tensor | None, w: Tensor | None, grad: Tensor | None, ptr: Tensor, index: Tensor, target: Tensor,
    edge: Tensor | None, groups: int,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Of one pass over the sums: their product with w, and that with grad, where these are given."""
    nodes, inner, empty = (ptr.shape[0] - 1) // max(groups, 1), x.shape[1], x.numel() == 0 or index.shape[0] == 0
    out = None if w is None else (x.new_zeros if empty else x.new_empty)(nodes, w.shape[2])
    total = None if grad is None else x.new_zeros(groups * inner, grad.shape[1], dtype=torch.float32)
    x, matrices = flat_rows(x), None if w is None else w.reshape(groups * inner, w.shape[2])
    for block, sums in () if empty or nodes == 0 else _blocks_of_sums(x, weight, ptr, index, edge, groups):
        if out is not None and matrices is not None:
            torch.mm(sums, matrices, out=out[block])
        if total is not None and grad is not None:
            _add_product(total, sums.t(), grad[block])
    of_w = None if total is None else total.view(groups, inner, total.shape[1]).to(x.dtype)
    if out is not None and w is not None and not empty and out.numel():
        _rows_again(x, weight, ptr, index, edge, w, out)
    if of_w is not None and grad is not None and not empty and of_w.numel():
        _weights_again(x, weight, flat_rows(grad), ptr, index, target, edge, of_w)
    return out, of_w


def cell_mm(
    x: Tensor, weight: Tensor | None, w: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    """As `cells.reference`."""
    if x.numel() and index.shape[0] and product_first(ptr.shape[0] - 1, index.shape[0], *w.shape[1:]):
        return _product_first(flat_rows(x), weight, w, ptr, index, edge)
    out, _ = _results(x, weight, w, None, ptr, index, target, edge, w.shape[0])
    assert out is not None
    return out


def cell_mm_weights(
    x: Tensor, weight: Tensor | None, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> Tensor:
    """As `cells.weights_reference`."""
    _, of_w = _results(x, weight, None, grad, ptr, index, target, edge, (ptr.shape[0] - 1) // max(grad.shape[0], 1))
    assert of_w is not None
    return of_w


def cell_mm_both(
    x: Tensor, weight: Tensor | None, w: Tensor, grad: Tensor, ptr: Tensor, index: Tensor, target: Tensor, edge: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `cells.both_reference`."""
    out, of_w = _results(x, weight, w, grad, ptr, index, target, edge, w.shape[0])
    assert out is not None and of_w is not None
    return out, of_w
