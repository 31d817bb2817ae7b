"""The Triton bodies of grouped_mm for many groups of uneven size with small matrices, as relations have them.

Legend: x (S, I) sorted by group, w (G, I, O), ends (G,), out (S, O). Rows are cut at fixed places, whatever the groups are, and a
program goes through the groups that its rows belong to: a group of a million rows is shared by many programs, and a thousand groups
of a few rows share one.

    rows     out[rows of g] = x[rows of g] @ w[g], ROWS at a time; with an index (S,) the rows are x[index]
    weights  out[g] = x[rows of g].T @ grad[rows of g]: 1. of every SPLIT rows and every group among them, 2. summed up per group

The part of split s and group g is number s + g: from one part to the next either the split or the group is the next one, so that
numbers are never given twice, and there are at most splits + groups. Sums are in float32 and in a fixed order; nothing is read on
the host. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.grouped_mm import split_of

ROWS, BLOCK, PARTS = 64, 256, 16


@triton.jit
def first_group(ends, row, GROUPS: tl.constexpr, SLOTS: tl.constexpr):
    """The group of a row, or GROUPS."""
    slots = tl.arange(0, SLOTS)
    end = tl.load(ends + slots, mask=slots < GROUPS, other=0).to(tl.int64)
    return tl.sum(((slots < GROUPS) & (end <= row)).to(tl.int32), 0)


@triton.jit
def ready(value, PRECISION: tl.constexpr):
    """Half a last place of tf32 is added where the tensor core cuts the rest off."""
    if PRECISION == "tf32" and value.dtype == tl.float32:
        bits = value.to(tl.uint32, bitcast=True)
        finite = (bits & 0x7F800000) != 0x7F800000
        value = tl.where(finite, (bits + 0x1000) & 0xFFFFE000, bits).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _rows_kernel(
    x, index, w, out, ends, rows, inner, columns, x_row, x_inner, w_group, w_inner, w_column,
    INDEXED: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    column, step = tl.arange(0, COLUMNS), tl.arange(0, INNER)
    behind = tl.minimum(begin + ROWS, rows)
    source = row
    if INDEXED:
        source = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)
    group = first_group(ends, begin, GROUPS, SLOTS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    while (group < GROUPS) & (begin < behind):
        end = tl.minimum(tl.load(ends + group).to(tl.int64), behind)
        if end > begin:
            here = (row >= begin) & (row < end)
            part = tl.zeros((ROWS, COLUMNS), tl.float32)
            for done in range(0, inner, INNER):
                at = done + step
                a = tl.load(
                    x + source[:, None] * x_row + at[None, :] * x_inner,
                    mask=here[:, None] & (at < inner)[None, :], other=0.0,
                )  # fmt: skip
                b = tl.load(
                    w + group.to(tl.int64) * w_group + at[:, None] * w_inner + column[None, :] * w_column,
                    mask=(at < inner)[:, None] & (column < columns)[None, :], other=0.0,
                )  # fmt: skip
                part = tl.dot(ready(a, PRECISION), ready(b, PRECISION), part, input_precision=PRECISION)
            total = tl.where(
                here[:, None], part, total
            )  # a matrix that holds no numbers is none of the other rows' business
            begin = end
        group += 1
    place = out + row[:, None] * columns + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _parts_kernel(
    x, index, grad, partial, ends, rows, inner, columns, x_row, x_inner, grad_row, grad_column,
    INDEXED: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
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
                row = start + tl.arange(0, ROWS)
                here = row < end
                source = row
                if INDEXED:
                    source = tl.load(index + row, mask=here, other=0).to(tl.int64)
                a = tl.load(
                    x + entry[:, None] * x_inner + source[None, :] * x_row,
                    mask=(entry < inner)[:, None] & here[None, :], other=0.0,
                )  # fmt: skip
                b = tl.load(
                    grad + row[:, None] * grad_row + column[None, :] * grad_column,
                    mask=here[:, None] & (column < columns)[None, :], other=0.0,
                )  # fmt: skip
                total = tl.dot(ready(a, PRECISION), ready(b, PRECISION), total, input_precision=PRECISION)
            place = (split + group).to(tl.int64) * inner * columns + entry[:, None] * columns + column[None, :]
            tl.store(partial + place, total, mask=(entry < inner)[:, None] & (column < columns)[None, :])
            begin = end
        group += 1


@triton.jit
def _summed_kernel(
    partial, out, ends, size, SPLIT: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[g] = the sum of its parts."""
    group = tl.program_id(0)
    end = tl.load(ends + group).to(tl.int64)
    start = tl.load(ends + group - 1, mask=group > 0, other=0).to(tl.int64)
    first, last = start // SPLIT, tl.where(end > start, (end - 1) // SPLIT, start // SPLIT - 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for done in range(first, last + 1, PARTS):
        part = done + tl.arange(0, PARTS)
        inside = (part <= last)[:, None] & (place < size)[None, :]
        total += tl.load(partial + (part + group)[:, None] * size + place[None, :], mask=inside, other=0.0)
    tl.store(out + group.to(tl.int64) * size + place, tl.sum(total, 0).to(out.dtype.element_ty), mask=place < size)


def rows_product(x: Tensor, w: Tensor, ends: Tensor, precision: str, index: Tensor | None = None) -> Tensor:
    """As `grouped_mm.reference`."""
    rows, (groups, inner, columns) = (x if index is None else index).shape[0], w.shape
    out = x.new_empty(rows, columns)
    if out.numel():
        _rows_kernel[(triton.cdiv(rows, ROWS),)](
            x, ends if index is None else index, w, out, ends, rows, inner, columns, *x.stride(), *w.stride(),
            INDEXED=index is not None, GROUPS=groups, SLOTS=slots_of(groups), ROWS=ROWS,
            COLUMNS=tile_of(columns), INNER=min(tile_of(inner), 64), PRECISION=precision, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


def weights_product(grad: Tensor, x: Tensor, ends: Tensor, precision: str, index: Tensor | None = None) -> Tensor:
    """The gradient of w."""
    groups, inner, columns = ends.shape[0], x.shape[1], grad.shape[1]
    rows, out = grad.shape[0], x.new_empty(groups, inner, columns)
    if out.numel() == 0:
        return out
    split = split_of(rows)
    splits = triton.cdiv(rows, split)
    partial = x.new_empty(splits + groups, inner, columns, dtype=torch.float32)
    if splits:
        _parts_kernel[(splits,)](
            x, ends if index is None else index, grad, partial, ends, rows, inner, columns, *x.stride(), *grad.stride(),
            INDEXED=index is not None, GROUPS=groups, SLOTS=slots_of(groups),
            ROWS=64, COLUMNS=tile_of(columns), INNER=tile_of(inner), SPLIT=split, PRECISION=precision, num_warps=4, num_stages=2,
        )  # fmt: skip
    return add_parts(partial, ends, out, split)


def add_parts(partial: Tensor, ends: Tensor, out: Tensor, split: int) -> Tensor:
    """Into out (groups, inner, columns)."""
    size = out.shape[1:].numel()
    _summed_kernel[(out.shape[0], triton.cdiv(size, BLOCK))](
        partial, out, ends, size, SPLIT=split, PARTS=PARTS, BLOCK=BLOCK, num_warps=4
    )
    return out


def tile_of(size: int) -> int:
    """What tensor cores want at least."""
    return max(triton.next_power_of_2(size), 16)


def slots_of(groups: int) -> int:
    return max(triton.next_power_of_2(groups), 2)
