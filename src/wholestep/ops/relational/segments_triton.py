"""What the Triton kernels over a table share: how the entries of a target are cut, and who owns a chunk of them.

Legend: a table has T targets, the Z entries of target t stand at ptr[t] to ptr[t + 1]. Entries are cut into chunks of CHUNK at
fixed places, whatever the targets are. A chunk that lies in one target alone is *whole*: it is taken by itself, so that a
hub is shared by many programs. What is left of a target, before its first whole chunk and after its last, is less than two chunks.

Nothing here depends on a value that the host would have to read: grids and sizes come from shapes, so calls are recorded in
CUDA graphs. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.relational.gather import GPU_CHUNK as CHUNK

BLOCK = 128
PARTS = 8
"""Into which a search cuts what is left at a time: the places between are read at once, and every reading is waited for."""


@triton.jit
def _owners_kernel(ptr, owner, chunks, targets, rounds, CHUNK: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """By search, ptr[low] <= entry < ptr[high] throughout."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry = chunk.to(tl.int64) * CHUNK
    low = chunk * 0
    high = low + targets
    for _ in range(rounds):
        step = (high - low + PARTS - 1) // PARTS
        begin, end = low, high
        for part in tl.static_range(1, PARTS):
            middle = tl.minimum(begin + part * step, end - 1)
            begun = tl.load(ptr + middle).to(tl.int64) <= entry
            low = tl.where(begun, middle, low)
            high = tl.where(begun, high, tl.minimum(high, middle))
    whole = tl.load(ptr + low + 1).to(tl.int64) >= entry + CHUNK
    tl.store(owner + chunk, tl.where(whole, low, -1), mask=chunk < chunks)


def rounds_of(targets: int) -> int:
    """Until one is left, whatever is found."""
    rounds = 0
    while targets > 1:
        targets, rounds = -(-targets // PARTS), rounds + 1
    return rounds


def owners(ptr: Tensor, entries: int) -> Tensor:
    """Of every chunk the target that has all of its entries, or -1."""
    chunks, targets = entries // CHUNK, ptr.shape[0] - 1
    owner = torch.empty(chunks, dtype=torch.int32, device=ptr.device)
    if chunks:
        _owners_kernel[(triton.cdiv(chunks, BLOCK),)](
            ptr, owner, chunks, targets, rounds_of(targets), CHUNK=CHUNK, BLOCK=BLOCK, PARTS=PARTS, num_warps=4
        )
    return owner


@triton.jit
def pieces(ptr, target, targets, CHUNK: tl.constexpr):
    """The entries of targets: `direct` of them alone, `head` of these from `start` and the others behind the whole chunks, which
    are `first` to `last`."""
    start = tl.load(ptr + target, mask=target < targets, other=0)
    end = tl.load(ptr + target + 1, mask=target < targets, other=0)
    head, direct, first, last = cut(start, end, CHUNK)
    return start, head, direct, first, last


@triton.jit
def cut(start, end, CHUNK: tl.constexpr):
    """The same of entries from start to end."""
    first = (start + CHUNK - 1) // CHUNK
    last = tl.maximum(end // CHUNK, first)
    head = tl.where(last > first, first * CHUNK - start, end - start)
    direct = tl.where(last > first, head + end - last * CHUNK, head)
    return head, direct, first, last


@triton.jit
def some_whole(owner, chunks, CHUNKS: tl.constexpr):
    """The first and the last of a program's chunks; none of them where none is whole."""
    begin = tl.program_id(0).to(tl.int64) * CHUNKS
    chunk = begin + tl.arange(0, CHUNKS)
    highest = tl.max(tl.load(owner + chunk, mask=chunk < chunks, other=-1), 0)
    return begin, tl.where(highest >= 0, tl.minimum(begin + CHUNKS, chunks), begin)


@triton.jit
def direct_entry(start, head, last, number, CHUNK: tl.constexpr):
    """Where the direct entry of that number stands."""
    return tl.where(number < head, start + number, last * CHUNK + number - head)


def chunks_at_a_time(entries: int, targets: int) -> int:
    """Of a program. Where targets have few entries hardly any chunk is whole, and most programs would begin only to end."""
    return 4 if entries < 16 * targets else 1


def entries_at_a_time(entries: int, targets: int) -> int:
    """As many as a usual target has: more would be lanes without work. Where all are hubs, their chunks are added up one after
    another, many at a time."""
    usual = entries // max(targets, 1)
    return min(max(triton.next_power_of_2(usual), 2), 16 if usual < 1024 else 64)
