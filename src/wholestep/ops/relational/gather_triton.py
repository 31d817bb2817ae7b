"""The Triton bodies of gather_sum and gather_dot: no atomics, sums in float32 and in a fixed order, nothing read on the host.

Legend: x (N, *F) is seen as (N, width), columns in heads of `inner`; ptr, index, edge as in `gather.py`; out (T, *F). A program
has TARGETS targets and takes ENTRIES of each at a time: LANES = TARGETS * ENTRIES rows.

    gather_sum  1. every whole chunk (`segments_triton.py`) is added up by itself: partial (Z // CHUNK, width)
                2. a block of targets adds up its direct entries, then its chunks
    gather_dot  1. whole chunks, 2. the direct entries of a block of targets
    take_rows   a block of rows

Cost beside the rows that must be read: 2 / CHUNK of their bytes for the partial sums, and a target waits for at most 2 CHUNK
entries and its number of chunks, one after another. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.segments_triton import direct_entry, pieces, some_whole

TILE, COLUMNS, NUM_WARPS = 1024, 128, 2
"""Numbers that a program holds, and the most columns among them."""
AHEAD, DOTS_AHEAD, FEW_PROGRAMS = 2, 1, 1 << 12
"""Blocks of entries of long targets that are under way at a time where there are few programs: one that takes block after block
waits for memory twice each time, and a kernel over a small graph waits for its longest targets. Over a large one others run, as
many as registers allow. A layer of HGT on FB15k-237 takes 1.08 ms so on an H200, 1.12 with 4 and 2, 1.10 with 8 and 4; about 1.3
with four warps, 1.13 with one and half of the numbers."""


@triton.jit
def _terms(
    x, weight, index, edge, entry, real, column, width, x_row, heads, inner,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """weight[edge] * x[index] of a block of entries: (entries, columns), zeros where an entry is not real."""
    row = tl.load(index + entry, mask=real, other=-1).to(tl.int64)
    inside = (row >= 0)[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        place = tl.where(row >= 0, entry, -1)
        if NAMED:
            place = tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
        counts = place >= 0
        if PER_HEAD:
            at = place[:, None] * heads + (column // inner)[None, :]
            value *= tl.load(weight + at, mask=inside & counts[:, None], other=1.0).to(tl.float32)
        else:
            factor = tl.load(weight + place, mask=counts, other=1.0).to(tl.float32)
            value *= factor[:, None]
    return value


@triton.jit
def _sum_of_chunks_kernel(
    x, weight, index, edge, owner, partial, chunks, width, x_row, heads, inner,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, PER_HEAD: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """partial[chunk] of every whole chunk; the others are not written, and never read."""
    begin, end = some_whole(owner, chunks, CHUNKS)
    for chunk in range(begin, end):
        if tl.load(owner + chunk) >= 0:
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            total = tl.zeros((LANES, COLUMNS), tl.float32)
            for done in tl.static_range(0, CHUNK, LANES):
                entry = chunk * CHUNK + done + tl.arange(0, LANES)
                total += _terms(
                    x, weight, index, edge, entry, entry >= 0, column, width, x_row, heads, inner, WEIGHTED, NAMED, PER_HEAD
                )  # fmt: skip
            tl.store(partial + chunk * width + column, tl.sum(total, 0), mask=column < width)


@triton.jit
def sums(
    x, weight, ptr, index, edge, partial, target, targets, column, width, x_row, heads, inner,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, PER_HEAD: tl.constexpr,
    TARGETS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """(TARGETS, COLUMNS): direct entries + whole chunks of each target, held ENTRIES times by `target`; zeros from `targets` on."""
    lane = tl.arange(0, TARGETS * ENTRIES)
    start, head, direct, first, last = pieces(ptr, target, targets, CHUNK)
    total = tl.zeros((TARGETS * ENTRIES, COLUMNS), tl.float32)
    if AHEAD > 1:
        number = lane % ENTRIES
        total += _terms(
            x, weight, index, edge, direct_entry(start, head, last, number, CHUNK), number < direct, column, width, x_row,
            heads, inner, WEIGHTED, NAMED, PER_HEAD,
        )  # fmt: skip
    for done in range(ENTRIES if AHEAD > 1 else 0, tl.max(direct.to(tl.int32), 0), AHEAD * ENTRIES):
        for ahead in tl.static_range(AHEAD):
            numbers = done + ahead * ENTRIES + lane % ENTRIES
            total += _terms(
                x, weight, index, edge, direct_entry(start, head, last, numbers, CHUNK), numbers < direct, column, width, x_row,
                heads, inner, WEIGHTED, NAMED, PER_HEAD,
            )  # fmt: skip
    for done in range(0, tl.max((last - first).to(tl.int32), 0), ENTRIES):
        chunk = first + done + lane % ENTRIES
        inside = (chunk < last)[:, None] & (column < width)[None, :]
        total += tl.load(partial + chunk[:, None] * width + column[None, :], mask=inside, other=0.0)
    return tl.sum(tl.reshape(total, (TARGETS, ENTRIES, COLUMNS)), 1)


@triton.jit
def _sum_kernel(
    x, weight, ptr, index, edge, partial, out, targets, width, x_row, heads, inner,
    WEIGHTED: tl.constexpr, NAMED: tl.constexpr, PER_HEAD: tl.constexpr,
    TARGETS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out[target] = its direct entries + its whole chunks."""
    begin = tl.program_id(0) * TARGETS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = sums(
        x, weight, ptr, index, edge, partial, begin + tl.arange(0, TARGETS * ENTRIES) // ENTRIES, targets, column, width,
        x_row, heads, inner, WEIGHTED, NAMED, PER_HEAD, TARGETS, ENTRIES, COLUMNS, AHEAD, CHUNK,
    )  # fmt: skip
    target = begin + tl.arange(0, TARGETS)
    place = out + target.to(tl.int64)[:, None] * width + column[None, :]
    inside = (target < targets)[:, None] & (column < width)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def _ahead(programs: int, most: int) -> int:
    return most if programs <= FEW_PROGRAMS else 1


@triton.jit
def _take_kernel(x, index, out, rows, width, x_row, LANES: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taken = tl.load(index + row, mask=row < rows, other=-1).to(tl.int64)
    inside = (taken >= 0)[:, None] & (column < width)[None, :]
    value = tl.load(x + taken[:, None] * x_row + column[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * width + column[None, :], value, mask=inside)


@triton.jit
def _dots(
    grad, x, index, edge, entry, real, target, first, grad_row, x_row, inner, LANES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """<grad[target, head], x[index, head]> of a block of entries, and their edges; `first` is the head's column."""
    place = tl.load(edge + entry, mask=real, other=-1).to(tl.int64)
    real = place >= 0
    row = tl.load(index + entry, mask=real, other=0).to(tl.int64)
    total = tl.zeros((LANES, COLUMNS), tl.float32)
    for done in range(0, inner, COLUMNS):
        column = done + tl.arange(0, COLUMNS)
        inside = real[:, None] & (column < inner)[None, :]
        at = (first + column)[None, :]
        left = tl.load(grad + target[:, None] * grad_row + at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(x + row[:, None] * x_row + at, mask=inside, other=0.0).to(tl.float32)
        total += left * right
    return place, tl.sum(total, 1)


@triton.jit
def _dots_of_chunks_kernel(
    grad, x, index, edge, owner, out, chunks, grad_row, x_row, heads, inner,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * inner
    begin, end = some_whole(owner, chunks, CHUNKS)
    for chunk in range(begin, end):
        target = tl.load(owner + chunk).to(tl.int64)
        if target >= 0:
            for done in range(0, CHUNK, LANES):
                entry = chunk * CHUNK + done + tl.arange(0, LANES)
                place, total = _dots(
                    grad,
                    x,
                    index,
                    edge,
                    entry,
                    entry >= 0,
                    entry * 0 + target,
                    first,
                    grad_row,
                    x_row,
                    inner,
                    LANES,
                    COLUMNS,
                )
                tl.store(out + place * heads + first // inner, total.to(out.dtype.element_ty), mask=place >= 0)


@triton.jit
def _dots_kernel(
    grad, x, ptr, index, edge, out, targets, grad_row, x_row, heads, inner,
    TARGETS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * inner
    if AHEAD > 1:
        lane = tl.arange(0, TARGETS * ENTRIES)
        target = tl.program_id(0) * TARGETS + lane // ENTRIES
        start, head, direct, _, last = pieces(ptr, target, targets, CHUNK)
        number = lane % ENTRIES
        place, total = _dots(
            grad, x, index, edge, direct_entry(start, head, last, number, CHUNK), number < direct, target.to(tl.int64), first,
            grad_row, x_row, inner, TARGETS * ENTRIES, COLUMNS,
        )  # fmt: skip
        tl.store(out + place * heads + first // inner, total.to(out.dtype.element_ty), mask=place >= 0)
    lanes = tl.arange(0, TARGETS * ENTRIES * AHEAD)
    theirs = tl.program_id(0) * TARGETS + lanes // (ENTRIES * AHEAD)
    begin, before, most, _, behind = pieces(ptr, theirs, targets, CHUNK)
    for done in range(ENTRIES if AHEAD > 1 else 0, tl.max(most.to(tl.int32), 0), ENTRIES * AHEAD):
        numbers = done + lanes % (ENTRIES * AHEAD)
        at, dots = _dots(
            grad, x, index, edge, direct_entry(begin, before, behind, numbers, CHUNK), numbers < most, theirs.to(tl.int64), first,
            grad_row, x_row, inner, TARGETS * ENTRIES * AHEAD, COLUMNS,
        )  # fmt: skip
        tl.store(out + at * heads + first // inner, dots.to(out.dtype.element_ty), mask=at >= 0)


def flat_rows(x: Tensor) -> Tensor:
    """(N, width), dense along the rows."""
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    return flat if flat.stride(1) == 1 else flat.contiguous()


def stand_ins(
    x: Tensor, weight: Tensor | None, index: Tensor, edge: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Where a table has no weights or no edges, another tensor stands in, which is not read; with it what is fixed."""
    fixed: dict[str, int] = {"WEIGHTED": weight is not None, "NAMED": edge is not None}
    return x if weight is None else weight.contiguous(), index if edge is None else edge, fixed


def sums_of_chunks(
    x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """What `sums` takes of a table and of x (N, width): tensors, sizes and what is fixed; whole chunks are summed up."""
    width, owner = x.shape[1], segments.owners(ptr, index.shape[0])
    heads, columns = 1 if weight is None else weight.shape[1:].numel(), min(triton.next_power_of_2(width), COLUMNS)
    partial = x.new_empty(max(owner.shape[0], 1), width, dtype=torch.float32)
    factors, names, fixed = stand_ins(x, weight, index, edge)
    fixed["PER_HEAD"] = heads > 1
    sizes = width, x.stride(0), heads, width // heads
    if owner.shape[0]:
        chunks, at_once = owner.shape[0], segments.chunks_at_a_time(index.shape[0], ptr.shape[0] - 1)
        _sum_of_chunks_kernel[(triton.cdiv(chunks, at_once), triton.cdiv(width, columns))](
            x, factors, index, names, owner, partial, chunks, *sizes, LANES=min(TILE // columns, segments.CHUNK),
            COLUMNS=columns, CHUNK=segments.CHUNK, CHUNKS=at_once, num_warps=NUM_WARPS, num_stages=1, **fixed,
        )  # fmt: skip
    return (x, factors, ptr, index, names, partial), sizes, fixed


def gather_sum(x: Tensor, weight: Tensor | None, ptr: Tensor, index: Tensor, edge: Tensor | None) -> Tensor:
    """As `gather.sum_reference`."""
    targets, entries = ptr.shape[0] - 1, index.shape[0]
    if entries == 0 or targets == 0 or x.numel() == 0:
        return x.new_zeros(targets, *x.shape[1:])
    flat, out = flat_rows(x), x.new_empty(targets, *x.shape[1:])
    table, sizes, fixed = sums_of_chunks(flat, weight, ptr, index, edge)
    columns = min(triton.next_power_of_2(flat.shape[1]), COLUMNS)
    at_a_time = segments.entries_at_a_time(entries, targets)
    block = min(max(TILE // columns // at_a_time, 1), 64)
    grid = triton.cdiv(targets, block), triton.cdiv(flat.shape[1], columns)
    _sum_kernel[grid](
        *table, out, targets, *sizes, TARGETS=block, ENTRIES=at_a_time, COLUMNS=columns, AHEAD=_ahead(grid[0] * grid[1], AHEAD),
        CHUNK=segments.CHUNK, num_warps=NUM_WARPS, num_stages=1, **fixed,
    )  # fmt: skip
    return out


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """As `gather.take_reference`: torch's own moves 0.85 TB/s where rows are of 64 numbers."""
    rows, out = index.shape[0], x.new_empty(index.shape[0], *x.shape[1:])
    if out.numel():
        flat = flat_rows(x)
        width = flat.shape[1]
        columns = min(triton.next_power_of_2(width), COLUMNS)
        _take_kernel[(triton.cdiv(rows, TILE // columns), triton.cdiv(width, columns))](
            flat, index, out, rows, width, flat.stride(0), LANES=TILE // columns, COLUMNS=columns, num_warps=NUM_WARPS
        )
    return out


def gather_dot(grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor, index: Tensor, edge: Tensor) -> Tensor:
    """As `gather.dot_reference`."""
    out = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    targets, entries = ptr.shape[0] - 1, index.shape[0]
    if entries == 0 or x.numel() == 0 or grad.numel() == 0 or out.numel() == 0:
        return out
    left, right, owner = flat_rows(grad), flat_rows(x), segments.owners(ptr, entries)
    heads = weight.shape[1:].numel()
    inner = left.shape[1] // heads
    columns, at_a_time = min(triton.next_power_of_2(inner), COLUMNS), segments.entries_at_a_time(entries, targets)
    sizes = (left.stride(0), right.stride(0), heads, inner)
    known = {"COLUMNS": columns, "CHUNK": segments.CHUNK, "num_warps": NUM_WARPS, "num_stages": 1}
    if owner.shape[0]:
        chunks, at_once = owner.shape[0], segments.chunks_at_a_time(entries, targets)
        _dots_of_chunks_kernel[(triton.cdiv(chunks, at_once), heads)](
            left, right, index, edge, owner, out, chunks, *sizes, LANES=min(TILE // columns, segments.CHUNK),
            CHUNKS=at_once, **known,
        )  # fmt: skip
    block = min(max(TILE // columns // at_a_time, 1), 64)
    grid = triton.cdiv(targets, block), heads
    _dots_kernel[grid](
        left, right, ptr, index, edge, out, targets, *sizes, TARGETS=block, ENTRIES=at_a_time,
        AHEAD=_ahead(grid[0] * grid[1], DOTS_AHEAD), **known,
    )  # fmt: skip
    return out
