"""What the Triton kernels over a table share: who owns an entry, and how the entries of a target are cut.

Legend: a table has T targets, the Z entries of target t stand at ptr[t] to ptr[t + 1]. Entries are cut into chunks of CHUNK at
fixed places, whatever the targets are. A chunk that lies in one target alone is *whole*: a program of its own adds it up, so that a
hub is shared by many. What is left of a target, before its first whole chunk and after its last, is less than two chunks.

Nothing here depends on a value that the host would have to read: grids and sizes come from shapes, so calls are recorded in
CUDA graphs. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl

CHUNK = 128


@triton.jit
def target_of(ptr, entry, targets, steps):
    """The target of an entry, or of a block of them, by bisection: ptr[low] <= entry < ptr[high] throughout."""
    low = entry.to(tl.int32) * 0
    high = low + targets
    for _ in range(steps):
        middle = low + (high - low) // 2
        begun = tl.load(ptr + middle).to(tl.int64) <= entry
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def is_whole(ptr, chunk, targets, steps, CHUNK: tl.constexpr):
    """Whether all entries of a chunk are of one target."""
    begin = chunk.to(tl.int64) * CHUNK
    target = target_of(ptr, begin, targets, steps)
    return tl.load(ptr + target + 1).to(tl.int64) >= begin + CHUNK


@triton.jit
def pieces(ptr, target, targets, CHUNK: tl.constexpr):
    """The entries of targets: `direct` of them alone, `head` of these from `start` and the others behind the whole chunks, which
    are `first` to `last`."""
    start = tl.load(ptr + target, mask=target < targets, other=0).to(tl.int64)
    end = tl.load(ptr + target + 1, mask=target < targets, other=0).to(tl.int64)
    first = (start + CHUNK - 1) // CHUNK
    last = tl.maximum(end // CHUNK, first)
    head = tl.where(last > first, first * CHUNK - start, end - start)
    direct = tl.where(last > first, head + end - last * CHUNK, head)
    return start, head, direct, first, last


@triton.jit
def direct_entries(start, head, last, done, ENTRIES: tl.constexpr, CHUNK: tl.constexpr):
    """Where the next ENTRIES of the direct entries stand: (targets, ENTRIES)."""
    number = (done + tl.arange(0, ENTRIES))[None, :]
    behind = last[:, None] * CHUNK + number - head[:, None]
    return tl.where(number < head[:, None], start[:, None] + number, behind)


def bisections(targets: int) -> int:
    """Steps in which `target_of` is sure to end."""
    return max(targets, 1).bit_length()


def entries_at_a_time(entries: int, targets: int) -> int:
    """As many as a usual target has: more would be lanes without work."""
    return min(max(triton.next_power_of_2(entries // max(targets, 1)), 2), 16)
