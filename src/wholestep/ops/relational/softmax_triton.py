"""The Triton bodies of segment_softmax: in float32, in a fixed order, no atomics.

Legend: logits, out, grad (E, heads); ptr (N + 1,). A lane is a node and a head. What is summed up is a pair (top, total), total
relative to exp(top):

    forward   of an edge (l, 1)             of a node (max l, sum of exp(l - max))    out = exp(l - top) / total
    backward  of an edge (0, out * grad)    of a node (0, sum of out * grad)          out * grad - out * total

    1. pairs of whole chunks (`segments_triton.py`), 2. of nodes: direct edges and whole chunks; results of direct edges, 3. results
    of whole chunks

Cost: the operands are read twice, the second time mostly from a cache; a hub of n edges waits for 2 CHUNK of them and for
n / CHUNK chunks. Import only where Triton exists.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.relational import segments_triton as segments
from wholestep.ops.relational.segments_triton import direct_entry, pieces

TILE, NUM_WARPS = 1024, 4
"""Edges and heads that a program holds."""
TINY = torch.finfo(torch.float32).tiny


@triton.jit
def _added(top, total, left, right, at, real, BACKWARD: tl.constexpr):
    """The pairs with one edge more each."""
    value = tl.load(left + at, mask=real, other=0.0 if BACKWARD else float("-inf")).to(tl.float32)
    if BACKWARD:
        total += value * tl.load(right + at, mask=real, other=0.0).to(tl.float32)
        return top, total
    return _joined(top, total, value, tl.where(real, 1.0, 0.0))


@triton.jit
def _joined(top, total, tops, totals):
    higher = tl.maximum(top, tops)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, total * tl.exp(top - base) + totals * tl.exp(tops - base)


@triton.jit
def _row(top, total):
    """The pairs of a row as one."""
    highest = tl.max(top, 1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.sum(total * tl.exp(top - base[:, None]), 1)


@triton.jit
def _write(left, right, out, at, real, top, total, tiny, BACKWARD: tl.constexpr):
    """Results of edges from the pairs of their nodes."""
    value = tl.load(left + at, mask=real, other=0.0).to(tl.float32)
    if BACKWARD:
        result = value * tl.load(right + at, mask=real, other=0.0).to(tl.float32) - value * total
    else:
        top = tl.where(top == float("-inf"), 0.0, top)
        result = tl.exp(value - top) / tl.where(total < tiny, tiny, total)  # a total that is no number stays so
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def _chunks_kernel(
    left, right, owner, partial, pairs, out, chunks, nodes, heads, tiny,
    BACKWARD: tl.constexpr, WRITE: tl.constexpr, LANES: tl.constexpr, ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pair of every whole chunk and head, partial (2, chunks, heads), or with WRITE the results of its edges."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    chunk, head = lane // heads, lane % heads
    node = tl.load(owner + chunk, mask=chunk < chunks, other=-1).to(tl.int64)
    if tl.max(node, 0) >= 0:
        real = (node >= 0)[:, None] & (tl.arange(0, ENTRIES) >= 0)[None, :]
        begin = (chunk * CHUNK)[:, None] + tl.arange(0, ENTRIES)[None, :]
        if WRITE:
            top = tl.load(pairs + node * heads + head, mask=node >= 0, other=0.0)[:, None]
            total = tl.load(pairs + (node + nodes) * heads + head, mask=node >= 0, other=1.0)[:, None]
            for done in range(0, CHUNK, ENTRIES):
                at = (begin + done) * heads + head[:, None]
                _write(left, right, out, at, real, top, total, tiny, BACKWARD)
        else:
            top = tl.full((LANES, ENTRIES), 0.0 if BACKWARD else float("-inf"), tl.float32)
            total = tl.zeros((LANES, ENTRIES), tl.float32)
            for done in range(0, CHUNK, ENTRIES):
                top, total = _added(top, total, left, right, (begin + done) * heads + head[:, None], real, BACKWARD)
            top, total = _row(top, total)
            tl.store(partial + lane, top, mask=node >= 0)
            tl.store(partial + tl.cast(chunks, tl.int64) * heads + lane, total, mask=node >= 0)


@triton.jit
def _nodes_kernel(
    left, right, ptr, partial, pairs, out, chunks, nodes, heads, tiny,
    BACKWARD: tl.constexpr, LANES: tl.constexpr, ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The pair of every node and head; pairs (2, nodes, heads) of those with whole chunks, results of direct edges."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    node, head = lane // heads, lane % heads
    start, before, direct, first, last = pieces(ptr, node, nodes, CHUNK)
    most, number = tl.max(direct.to(tl.int32), 0), tl.arange(0, ENTRIES)[None, :]
    top = tl.full((LANES, ENTRIES), 0.0 if BACKWARD else float("-inf"), tl.float32)
    total = tl.zeros((LANES, ENTRIES), tl.float32)
    for done in range(0, most, ENTRIES):
        entry = direct_entry(start[:, None], before[:, None], last[:, None], done + number, CHUNK)
        real = done + number < direct[:, None]
        top, total = _added(top, total, left, right, entry * heads + head[:, None], real, BACKWARD)
    for done in range(0, tl.max((last - first).to(tl.int32), 0), ENTRIES):
        chunk = first[:, None] + done + number
        inside, place = chunk < last[:, None], partial + chunk * heads + head[:, None]
        tops = tl.load(place, mask=inside, other=0.0 if BACKWARD else float("-inf"))
        totals = tl.load(place + tl.cast(chunks, tl.int64) * heads, mask=inside, other=0.0)
        top, total = _joined(top, total, tops, totals)
    highest, whole = _row(top, total)
    shared = last > first
    tl.store(pairs + lane, highest, mask=shared)
    tl.store(pairs + tl.cast(nodes, tl.int64) * heads + lane, whole, mask=shared)
    for done in range(0, most, ENTRIES):
        entry = direct_entry(start[:, None], before[:, None], last[:, None], done + number, CHUNK)
        real = done + number < direct[:, None]
        _write(left, right, out, entry * heads + head[:, None], real, highest[:, None], whole[:, None], tiny, BACKWARD)


def _run(left: Tensor, right: Tensor | None, ptr: Tensor) -> Tensor:
    """Forward from logits; backward from the result and its gradient."""
    out = torch.empty_like(left, memory_format=torch.contiguous_format)
    entries, nodes = left.shape[0], ptr.shape[0] - 1
    if out.numel() == 0:
        return out
    heads, owner = left.shape[1:].numel(), segments.owners(ptr, entries)
    chunks, left = owner.shape[0], left.contiguous()
    operands = left, left if right is None else right.contiguous()
    partial, pairs = (torch.empty(2, n, heads, device=left.device) for n in (max(chunks, 1), nodes))
    rest = partial, pairs, out, chunks, nodes, heads, TINY
    known = {"BACKWARD": right is not None, "CHUNK": segments.CHUNK, "num_warps": NUM_WARPS, "num_stages": 1}
    at_once = min(TILE // NUM_WARPS, segments.CHUNK)
    of_chunks = {"ENTRIES": at_once, "LANES": TILE // at_once, **known}
    shared = (triton.cdiv(chunks * heads, TILE // at_once),)
    if chunks:
        _chunks_kernel[shared](*operands, owner, *rest, WRITE=False, **of_chunks)
    at_a_time = segments.entries_at_a_time(entries, nodes)
    lanes = TILE // at_a_time
    _nodes_kernel[(triton.cdiv(nodes * heads, lanes),)](*operands, ptr, *rest, LANES=lanes, ENTRIES=at_a_time, **known)
    if chunks:
        _chunks_kernel[shared](*operands, owner, *rest, WRITE=True, **of_chunks)
    return out


def softmax(logits: Tensor, ptr: Tensor) -> Tensor:
    """As `softmax.reference`."""
    return _run(logits, None, ptr)


def softmax_backward(grad: Tensor, out: Tensor, ptr: Tensor) -> Tensor:
    """As `softmax.reference_backward`."""
    return _run(out, grad, ptr)
