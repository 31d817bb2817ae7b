"""ws::biased_attention: attention with a learned bias on its scores, which gets a gradient, over sequences of a tile's length.

q, k, v (B, H, T, D); bias (W, H, T, S), W a divisor of B: entry b of the batch is given bias[b % W]. So one table serves all
windows (W = 1, relative positions), or one per window of a picture (shifted windows: the table plus that window's mask), and
the sums over the batch that its gradient needs stay inside the kernel.

    s = scale q k' + bias;  o = softmax(s) v;  ds = p * (do v' - rowsum(do * o));  dbias[w] = sum of ds over b with b % W == w

A row that sees no key (-inf everywhere) gives output 0 and no gradient. bf16 and fp16 compute in float32. On a GPU one Triton
program holds a whole square of scores (`biased_triton.py`); elsewhere it is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.aten import attention as costs
from wholestep.ops.attention import reference
from wholestep.ops.attention.operator import in_layout
from wholestep.ops.multi_tensor import triton_reason
from wholestep.ops.record import Precision, record
from wholestep.ops.wide import wide_dtype

LONGEST, WIDEST = 128, 128
TILE_BYTES = 16 << 10
"""Sequences, head widths and heads of one entry that a program can hold: larger ones do not fit into shared memory, and what
does not fit into registers either makes the driver keep memory beside the allocator."""
KNOWN = frozenset((torch.float32, torch.bfloat16, torch.float16))


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> bool:
    """Whether the kernel is made for such operands: short, every head with keys of its own."""
    if q.dtype not in KNOWN or bias.dtype not in KNOWN:
        return False
    if q.shape[:2] != k.shape[:2] or v.shape != k.shape or q.shape[0] % max(1, bias.shape[0]):
        return False
    if max(q.shape[2], k.shape[2]) > LONGEST or q.shape[3] > WIDEST or min(q.numel(), k.numel()) == 0:
        return False
    return tile_bytes(q, k) <= TILE_BYTES


def tile_bytes(q: Tensor, k: Tensor) -> int:
    """One head of one entry, as a kernel holds it: in powers of two."""
    rows, width = (max(16, 1 << (size - 1).bit_length()) for size in (max(q.shape[2], k.shape[2]), q.shape[3]))
    return rows * width * q.element_size()


def spread(bias: Tensor, batch: int) -> Tensor:
    """The bias of every entry of the batch: (B, H, T, S)."""
    return bias if bias.shape[0] == batch else bias.repeat(batch // bias.shape[0], 1, 1, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.is_cuda and takes(q, k, v, bias) and triton_reason() is None:
        from wholestep.ops.attention.biased_triton import forward

        return forward(q, k, v, bias, scale)
    out, logsumexp = reference.forward(q, k, v, spread(bias, q.shape[0]), False, scale, 0.0, None)
    return in_layout(out, q, lambda: torch.empty_like(q)), logsumexp.contiguous()


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.is_cuda and takes(q, k, v, bias) and triton_reason() is None:
        from wholestep.ops.attention.biased_triton import backward

        return backward(grad, q, k, v, out, bias, logsumexp, scale)
    wide = spread(bias, q.shape[0])
    dq, dk, dv = reference.backward(grad, q, k, v, wide, out, logsumexp, False, scale, 0.0, None)
    p = reference.probabilities(reference.scores(q, k, wide, False, scale), logsumexp)
    given = grad.to(p.dtype)
    ds = p * (given @ v.to(p.dtype).transpose(-1, -2) - (given * out).sum(-1, keepdim=True))
    dbias = ds.unflatten(0, (q.shape[0] // bias.shape[0], bias.shape[0])).sum(0).to(bias.dtype)
    made = [in_layout(g, t, lambda t=t: torch.empty_like(t)) for g, t in ((dq, q), (dk, k), (dv, v))]  # type: ignore[misc]
    return made[0], made[1], made[2], dbias.contiguous()


_forward = torch.library.custom_op(
    "ws::biased_attention", _attend, mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor bias, float scale) -> (Tensor out, Tensor logsumexp)",
)  # fmt: skip
_backward = torch.library.custom_op(
    "ws::biased_attention_backward", _attend_backward, mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor bias, Tensor logsumexp, float scale) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
)  # fmt: skip


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q.dtype))


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), bias.new_empty(bias.shape)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[0], bias, output[1])
    ctx.scale = scale  # type: ignore[attr-defined]


def _differentiated(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor | None, _: object
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    return *torch.ops.ws.biased_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None  # type: ignore[attr-defined]


_forward.register_autograd(_differentiated, setup_context=_keep)


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return reference.forward(q, k, v, spread(bias, q.shape[0]), False, scale, 0.0, None)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, bias: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """By autograd, through softmax written out."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (q, k, v, bias)]
        scores = leaves[0] @ leaves[1].mT * scale + spread(leaves[3], q.shape[0])
        return torch.autograd.grad(scores.softmax(-1) @ leaves[2], leaves, grad)


def _cases() -> Iterator[tuple[Any, ...]]:
    for windows, queries, keys in ((1, 5, 5), (2, 3, 7), (4, 1, 1)):
        q, (k, v) = torch.randn(4, 2, queries, 8), torch.randn(2, 4, 2, keys, 8).unbind()
        yield q, k, v, torch.randn(windows, 2, queries, keys), 0.3


def _backward_cases() -> Iterator[tuple[Any, ...]]:
    for q, k, v, bias, scale in _cases():
        out, logsumexp = _plain(q, k, v, bias, scale)
        yield torch.randn_like(out), q, k, v, out, bias, logsumexp, scale


# the bias, fourth and sixth, is added to scores that are float32
record(
    "ws::biased_attention",
    reference=_plain,
    cases=_cases,
    tolerance=1e-5,
    kind="attention",
    flops=costs.attention,
    precision=Precision("attention", "low", 3),
)
record(
    "ws::biased_attention_backward",
    reference=_plain_backward,
    cases=_backward_cases,
    tolerance=1e-5,
    kind="attention",
    flops=costs.attention_backward,
    precision=Precision("attention", "low", 5),
)
