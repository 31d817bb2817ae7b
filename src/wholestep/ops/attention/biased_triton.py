"""The Triton bodies of biased attention: a program takes one bias (w, h) and a run of batch entries that share it, whole squares
of scores at a time. So the bias is read once, its gradient is summed in registers, and nothing is added by atomics. Import only
where Triton exists."""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.attention.biased import TILE_BYTES, tile_bytes

EXACT = "bf16x6"
"""Six products of thirds in bfloat16 are as exact as float32's own, which leave the tensor cores and keep 8 to 13 KB a thread
outside of the registers, gigabytes on a whole card."""
PROGRAMS = 2048
"""About as many as keep a large GPU busy; more would write more partial sums of the bias's gradient."""


@triton.jit
def _tile(
    base, batch_stride, head_stride, row_stride, b, h,
    ROWS: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(pointers, mask) of one head of one entry of the batch."""
    rows, columns = tl.arange(0, BR), tl.arange(0, BD)
    where = base + b.to(tl.int64) * batch_stride + h * head_stride + rows[:, None] * row_stride + columns[None, :]
    return where, (rows < ROWS)[:, None] & (columns < D)[None, :]


@triton.jit
def _load(
    base, batch_stride, head_stride, row_stride, b, h,
    ROWS: tl.constexpr, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    where, inside = _tile(base, batch_stride, head_stride, row_stride, b, h, ROWS, D, BR, BD)
    return tl.load(where, mask=inside, other=0.0)


@triton.jit
def _bias_tile(
    bias, w, h, w_stride, h_stride, t_stride, s_stride,
    T: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, BT), tl.arange(0, BS)
    where = bias + w.to(tl.int64) * w_stride + h * h_stride + rows[:, None] * t_stride + columns[None, :] * s_stride
    inside = (rows < T)[:, None] & (columns < S)[None, :]
    # rows of nothing see zeros, so that they are no NaN; columns of nothing are seen by nobody
    return tl.where((columns < S)[None, :], tl.load(where, mask=inside, other=0.0).to(tl.float32), float("-inf"))


@triton.jit
def _forward_kernel(
    q, k, v, bias, out, logsumexp, batch, heads, tables, per, scale,
    qb, qh, qt, kb, kh, ks, vb, vh, vs, ob, oh, ot, bw, bh, bt, bs,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    w, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    added = _bias_tile(bias, w, h, bw, bh, bt, bs, T, S, BT, BS)
    rows = tl.arange(0, BT)
    first = tl.program_id(1) * per
    for turn in range(first, tl.minimum(first + per, batch // tables)):
        b = turn * tables + w
        queries = _load(q, qb, qh, qt, b, h, T, D, BT, BD)
        keys = _load(k, kb, kh, ks, b, h, S, D, BS, BD)
        values = _load(v, vb, vh, vs, b, h, S, D, BS, BD)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + added
        most = tl.max(s, 1)
        most = tl.where(most == float("-inf"), 0.0, most)
        p = tl.exp(s - most[:, None])
        total = tl.sum(p, 1)
        mixed = (
            tl.dot(p.to(values.dtype), values, input_precision=PRECISION) / tl.where(total == 0.0, 1.0, total)[:, None]
        )
        where, inside = _tile(out, ob, oh, ot, b, h, T, D, BT, BD)
        tl.store(where, mixed.to(out.dtype.element_ty), mask=inside)
        tl.store(logsumexp + (b.to(tl.int64) * heads + h) * T + rows, most + tl.log(total), mask=rows < T)


@triton.jit
def _backward_kernel(
    grad, q, k, v, out, bias, logsumexp, dq, dk, dv, partial, batch, heads, tables, per, scale,
    gb, gh, gt, qb, qh, qt, kb, kh, ks, vb, vh, vs, ob, oh, ot, bw, bh, bt, bs,
    dqb, dqh, dqt, dkb, dkh, dks, dvb, dvh, dvs,
    T: tl.constexpr, S: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    w, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    added = _bias_tile(bias, w, h, bw, bh, bt, bs, T, S, BT, BS)
    summed = tl.zeros((BT, BS), tl.float32)
    rows, columns = tl.arange(0, BT), tl.arange(0, BS)
    first = tl.program_id(1) * per
    for turn in range(first, tl.minimum(first + per, batch // tables)):
        b = turn * tables + w
        queries = _load(q, qb, qh, qt, b, h, T, D, BT, BD)
        keys = _load(k, kb, kh, ks, b, h, S, D, BS, BD)
        values = _load(v, vb, vh, vs, b, h, S, D, BS, BD)
        given = _load(grad, gb, gh, gt, b, h, T, D, BT, BD)
        made = _load(out, ob, oh, ot, b, h, T, D, BT, BD)
        level = tl.load(logsumexp + (b.to(tl.int64) * heads + h) * T + rows, mask=rows < T, other=float("inf"))
        level = tl.where(level == float("-inf"), float("inf"), level)  # rows that see nothing, or are nothing: p = 0
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale + added
        p = tl.exp(s - level[:, None])
        share = tl.sum(given.to(tl.float32) * made.to(tl.float32), 1)
        ds = p * (tl.dot(given, tl.trans(values), input_precision=PRECISION) - share[:, None])
        summed += ds
        where, inside = _tile(dv, dvb, dvh, dvs, b, h, S, D, BS, BD)
        found = tl.dot(tl.trans(p.to(given.dtype)), given, input_precision=PRECISION)
        tl.store(where, found.to(dv.dtype.element_ty), mask=inside)
        narrow = ds.to(queries.dtype)
        where, inside = _tile(dq, dqb, dqh, dqt, b, h, T, D, BT, BD)
        found = tl.dot(narrow, keys, input_precision=PRECISION) * scale
        tl.store(where, found.to(dq.dtype.element_ty), mask=inside)
        where, inside = _tile(dk, dkb, dkh, dks, b, h, S, D, BS, BD)
        found = tl.dot(tl.trans(narrow), queries, input_precision=PRECISION) * scale
        tl.store(where, found.to(dk.dtype.element_ty), mask=inside)
    place = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * T * S
    where = partial + place + rows[:, None] * S + columns[None, :]
    tl.store(where, summed, mask=(rows < T)[:, None] & (columns < S)[None, :])


def _dense_rows(t: Tensor) -> Tensor:
    """Read along the width of a head."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _launch_shape(q: Tensor, k: Tensor, bias: Tensor) -> tuple[int, int, dict[str, object]]:
    """(runs per bias, entries per run, the rest of what both kernels are told)."""
    (batch, heads, length, width), tables = q.shape, bias.shape[0]
    turns = batch // tables
    per = max(1, turns * tables * heads // PROGRAMS)
    longest = max(length, k.shape[2])
    blocks = [max(16, triton.next_power_of_2(size)) for size in (length, k.shape[2], width)]
    wide = q.dtype == torch.float32
    exact = wide and torch.get_float32_matmul_precision() == "highest"
    options = dict(zip(("BT", "BS", "BD"), blocks, strict=True))
    options |= {"T": length, "S": k.shape[2], "D": width, "PRECISION": EXACT if exact else "tf32x3"}
    stages = 1 if wide else 3 if 2 * tile_bytes(q, k) <= TILE_BYTES else 2
    options |= {"num_warps": 4 if longest <= 64 else 8, "num_stages": stages}
    return triton.cdiv(turns, per), per, options


def forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads = q.shape[:2]
    out = torch.empty_like(q)
    logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
    q, k, v = map(_dense_rows, (q, k, v))
    target = out if out.stride(-1) == 1 else torch.empty_like(out, memory_format=torch.contiguous_format)
    runs, per, options = _launch_shape(q, k, bias)
    _forward_kernel[bias.shape[0] * heads, runs](
        q, k, v, bias, target, logsumexp, batch, heads, bias.shape[0], per, scale,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *target.stride()[:3], *bias.stride(), **options,
    )  # fmt: skip
    return out if target is out else out.copy_(target), logsumexp


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads = q.shape[:2]
    made = [torch.empty_like(t) for t in (q, k, v)]
    q, k, v, grad, out = map(_dense_rows, (q, k, v, grad, out))
    targets = [t if t.stride(-1) == 1 else torch.empty_like(t, memory_format=torch.contiguous_format) for t in made]
    runs, per, options = _launch_shape(q, k, bias)
    partial = bias.new_empty((runs, *bias.shape), dtype=torch.float32)
    _backward_kernel[bias.shape[0] * heads, runs](
        grad, q, k, v, out, bias, logsumexp, *targets, partial, batch, heads, bias.shape[0], per, scale,
        *grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *bias.stride(),
        *targets[0].stride()[:3], *targets[1].stride()[:3], *targets[2].stride()[:3], **options,
    )  # fmt: skip
    for wanted, target in zip(made, targets, strict=True):
        if wanted is not target:
            wanted.copy_(target)
    return made[0], made[1], made[2], partial.sum(0).to(bias.dtype)
