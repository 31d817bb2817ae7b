"""The Triton bodies of segment_softmax: a total per node, then one pass over the edges; in float32, in a fixed order, no atomics.

Legend: logits, out, grad (E, heads); ptr (N + 1,). What is summed up is a pair (top, total), total relative to exp(top):

    forward   of an edge (l, 1)             of a node (max l, sum of exp(l - max))    out = exp(l - top) / total
    backward  of an edge (0, out * grad)    of a node (0, sum of out * grad)          out * grad - out * total

    1. pairs of whole chunks (`segments_triton.py`), 2. of nodes: direct edges and whole chunks, 3. edges, which find their node by
    bisection of ptr

Cost: the operands are read twice; a hub of n edges waits for 2 CHUNK of them and for n / CHUNK chunks. Import only where Triton
exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.segments_triton import direct_entries, is_whole, pieces, target_of

TILE, HEADS, NUM_WARPS = 1024, 16, 4
"""Numbers that a program holds, and the most heads among them."""
TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _pairs(left, right, entry, real, head, heads, BACKWARD: tl.constexpr):
    """(top, total) of a block of edges, of shape (*entry.shape, heads)."""
    inside = real[:, :, None] & (head < heads)[None, None, :]
    at = entry[:, :, None] * heads + head[None, None, :]
    if BACKWARD:
        total = tl.load(left + at, mask=inside, other=0.0).to(tl.float32)
        total *= tl.load(right + at, mask=inside, other=0.0).to(tl.float32)
        top = tl.zeros_like(total)
    else:
        top = tl.load(left + at, mask=inside, other=float("-inf")).to(tl.float32)
        total = tl.where(inside, 1.0, 0.0)
    return top, total


@triton.jit
def _joined(top, total, tops, totals):
    """(nodes, heads) and the pairs (nodes, entries, heads) that come to it."""
    higher = tl.maximum(top, tl.max(tops, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * tl.exp(top - base) + tl.sum(totals * tl.exp(tops - base[:, None, :]), 1)
    return higher, total


@triton.jit
def _chunks_kernel(
    left, right, ptr, partial, chunks, nodes, steps, heads,
    BACKWARD: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pair of every whole chunk: partial (2, chunks, heads); the others are not written, and never read."""
    chunk = tl.program_id(0)
    if is_whole(ptr, chunk, nodes, steps, CHUNK):
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        top = tl.full((1, HEADS), 0.0 if BACKWARD else float("-inf"), tl.float32)
        total = tl.zeros((1, HEADS), tl.float32)
        for done in range(0, CHUNK, ENTRIES):
            entry = (chunk.to(tl.int64) * CHUNK + done + tl.arange(0, ENTRIES))[None, :]
            tops, totals = _pairs(left, right, entry, entry >= 0, head, heads, BACKWARD)
            top, total = _joined(top, total, tops, totals)
        place = partial + chunk.to(tl.int64) * heads + head[None, :]
        tl.store(place, top, mask=(head < heads)[None, :])
        tl.store(place + tl.cast(chunks, tl.int64) * heads, total, mask=(head < heads)[None, :])


@triton.jit
def _nodes_kernel(
    left, right, ptr, partial, out, chunks, nodes, heads,
    BACKWARD: tl.constexpr, NODES: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pair of every node: out (2, nodes, heads)."""
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    start, before, direct, first, last = pieces(ptr, node, nodes, CHUNK)
    number = tl.arange(0, ENTRIES)[None, :]
    top = tl.full((NODES, HEADS), 0.0 if BACKWARD else float("-inf"), tl.float32)
    total = tl.zeros((NODES, HEADS), tl.float32)
    for done in range(0, tl.max(direct.to(tl.int32), 0), ENTRIES):
        entry = direct_entries(start, before, last, done, ENTRIES, CHUNK)
        tops, totals = _pairs(left, right, entry, done + number < direct[:, None], head, heads, BACKWARD)
        top, total = _joined(top, total, tops, totals)
    for done in range(0, tl.max((last - first).to(tl.int32), 0), ENTRIES):
        chunk = first[:, None] + done + number
        inside = (chunk < last[:, None])[:, :, None] & (head < heads)[None, None, :]
        place = partial + chunk[:, :, None] * heads + head[None, None, :]
        tops = tl.load(place, mask=inside, other=0.0 if BACKWARD else float("-inf"))
        totals = tl.load(place + tl.cast(chunks, tl.int64) * heads, mask=inside, other=0.0)
        top, total = _joined(top, total, tops, totals)
    inside = (node < nodes)[:, None] & (head < heads)[None, :]
    place = out + node.to(tl.int64)[:, None] * heads + head[None, :]
    tl.store(place, top, mask=inside)
    tl.store(place + tl.cast(nodes, tl.int64) * heads, total, mask=inside)


@triton.jit
def _edges_kernel(
    left, right, ptr, pairs, out, entries, nodes, steps, heads, tiny,
    BACKWARD: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The result of every edge from the pair of its node."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    node = target_of(ptr, entry, nodes, steps).to(tl.int64)
    inside = (entry < entries)[:, None] & (head < heads)[None, :]
    at = entry[:, None] * heads + head[None, :]
    place = pairs + node[:, None] * heads + head[None, :]
    total = tl.load(place + tl.cast(nodes, tl.int64) * heads, mask=inside, other=1.0)
    value = tl.load(left + at, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        result = value * tl.load(right + at, mask=inside, other=0.0).to(tl.float32) - value * total
    else:
        top = tl.load(place, mask=inside, other=0.0)
        top = tl.where(top == float("-inf"), 0.0, top)
        result = tl.exp(value - top) / tl.where(total < tiny, tiny, total)  # a total that is no number stays so
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def _run(left: Tensor, right: Tensor | None, ptr: Tensor) -> Tensor:
    """Forward from logits; backward from the result and its gradient."""
    out = torch.empty_like(left, memory_format=torch.contiguous_format)
    entries, nodes, backward = left.shape[0], ptr.shape[0] - 1, right is not None
    if out.numel() == 0:
        return out
    heads, chunks, steps = left.shape[1:].numel(), entries // segments.CHUNK, segments.bisections(nodes)
    given = left.contiguous(), left if right is None else right.contiguous(), ptr
    partial, pairs = (torch.empty(2, n, heads, device=left.device) for n in (max(chunks, 1), nodes))
    wide = min(triton.next_power_of_2(heads), HEADS)
    tiles, at_a_time = triton.cdiv(heads, wide), segments.entries_at_a_time(entries, nodes)
    known = {"BACKWARD": backward, "HEADS": wide, "num_warps": NUM_WARPS, "num_stages": 1}
    if chunks:
        at_once = min(TILE // wide, segments.CHUNK)
        _chunks_kernel[(chunks, tiles)](
            *given, partial, chunks, nodes, steps, heads, ENTRIES=at_once, CHUNK=segments.CHUNK, **known
        )
    block = max(TILE // wide // at_a_time, 1)
    _nodes_kernel[(triton.cdiv(nodes, block), tiles)](
        *given, partial, pairs, chunks, nodes, heads, NODES=block, ENTRIES=at_a_time, CHUNK=segments.CHUNK, **known
    )
    block = TILE // wide
    _edges_kernel[(triton.cdiv(entries, block), tiles)](
        *given, pairs, out, entries, nodes, steps, heads, TINY, ENTRIES=block, **known
    )
    return out


def softmax(logits: Tensor, ptr: Tensor) -> Tensor:
    """As `softmax.reference`."""
    return _run(logits, None, ptr)


def softmax_backward(grad: Tensor, out: Tensor, ptr: Tensor) -> Tensor:
    """As `softmax.reference_backward`."""
    return _run(out, grad, ptr)
