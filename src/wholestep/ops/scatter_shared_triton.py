"""The Triton body of scatter_shared: for every row q, src[:, q, :] times the matrix of (index[q, k] == p). Import only where
Triton exists."""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl
from torch import Tensor

BATCH, PLACES, DEPTH, NUM_WARPS = 64, 128, 64, 4
PART = tl.bfloat16
"""What float32 is taken apart into; Triton's interpreter knows no products of it."""


@triton.jit
def _scatter_kernel(
    index, src, out, batch, rows, depth, size, index_row, index_column, src_batch, src_row,
    BATCH: tl.constexpr, PLACES: tl.constexpr, DEPTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    entry = tl.program_id(2) * BATCH + tl.arange(0, BATCH)
    step = tl.arange(0, DEPTH)
    total = tl.zeros((BATCH, PLACES), tl.float32)
    for start in range(0, depth, DEPTH):
        column = start + step
        inside = column < depth
        left = tl.load(
            src + entry.to(tl.int64)[:, None] * src_batch + row * src_row + column[None, :],
            mask=(entry < batch)[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        target = tl.load(index + row * index_row + column * index_column, mask=inside, other=-1).to(tl.int32)
        here = target[:, None] == place[None, :]
        if left.dtype == tl.float32:
            # Three parts are the number, and products with ones are exact: tensor cores instead of float32 products, which
            # do not fit into registers (4.9 KB a thread went to memory).
            ones = here.to(PART)
            first = left.to(PART)
            rest = left - first.to(tl.float32)
            second = rest.to(PART)
            third = (rest - second.to(tl.float32)).to(PART)
            total = tl.dot(first, ones, tl.dot(second, ones, tl.dot(third, ones, total)))
        else:
            total = tl.dot(left, here.to(left.dtype), total)
    where = out + (entry.to(tl.int64)[:, None] * rows + row) * size + place[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(entry < batch)[:, None] & (place < size)[None, :])


def launch(index: Tensor, src: Tensor, size: int) -> Tensor:
    """As `scatter_shared.reference`."""
    rows, depth = index.shape
    out = src.new_empty(*src.shape[:-1], size)
    if out.numel() == 0:
        return out
    flat = src.reshape(src.shape[:-2].numel(), rows, depth)
    if flat.stride(2) != 1:  # read along the rows
        flat = flat.contiguous()
    grid = rows, triton.cdiv(size, PLACES), triton.cdiv(flat.shape[0], BATCH)
    _scatter_kernel[grid](
        index, flat, out, flat.shape[0], rows, depth, size, *index.stride(), flat.stride(0), flat.stride(1),
        BATCH=BATCH, PLACES=PLACES, DEPTH=DEPTH, PART=PART, num_warps=NUM_WARPS, num_stages=3,
    )  # fmt: skip
    return out
