"""Attention on stand-ins: tensors laid out as those of a call, what a kernel gets wrong on them, and the call that is timed.

In: tensors of which only shapes, strides, types and device are read (they may have no data). Out: random ones; a reason, where an
implementation disagrees with the reference; forward and backward as one call.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from wholestep.ops.attention import reference
from wholestep.ops.attention.interface import Asked, Implementation, Kept

# Relative error of the norm that tells a wrong kernel from a low-precision one (bf16 rounds to 4e-3).
TOLERANCE = 5e-2


def stand_in(asked: Asked, parts: int) -> Asked | None:
    """Random tensors of the same layout, of a `parts`-th of the batch; None where that is nothing."""
    rows = asked.q.shape[0] // parts
    if rows == 0 < asked.q.shape[0]:
        return None
    q, k, v = (random_like(t, rows) for t in asked[:3])
    return asked._replace(q=q, k=k, v=v, mask=None if asked.mask is None else random_mask(asked.mask, rows))


def random_like(t: Tensor, rows: int | None = None) -> Tensor:
    """Random values in the same memory layout, from a generator of its own; `rows` of them along the first dimension."""
    generator = torch.Generator(device=t.device).manual_seed(t.numel())
    return _laid_out_like(t, rows, t.dtype).normal_(generator=generator).expand(_shape(t, rows))


def random_mask(mask: Tensor, rows: int) -> Tensor:
    """Hides a quarter of the keys; every query sees the first one."""
    few = rows if mask.dim() == 4 and mask.shape[0] > 1 else None
    generator = torch.Generator(device=mask.device).manual_seed(mask.numel())
    chances = _laid_out_like(mask, few, torch.float32).uniform_(generator=generator)
    seen = chances > 0.25
    seen[..., 0] = True
    if mask.dtype != torch.bool:
        zero = torch.zeros((), dtype=mask.dtype, device=mask.device)
        return torch.where(seen, zero, float("-inf")).expand(_shape(mask, few))
    return seen.expand(_shape(mask, few))


def _shape(t: Tensor, rows: int | None) -> tuple[int, ...]:
    return tuple(t.shape) if rows is None else (rows, *t.shape[1:])


def _laid_out_like(t: Tensor, rows: int | None, dtype: torch.dtype) -> Tensor:
    """Empty, with the strides of `t`; a dimension along which `t` repeats itself has size 1."""
    sizes = [1 if stride == 0 else size for size, stride in zip(_shape(t, rows), t.stride(), strict=True)]
    return torch.empty_strided(sizes, t.stride(), dtype=dtype, device=t.device)


def disagreement(implementation: Implementation, asked: Asked) -> str | None:
    """Why the implementation is wrong on this machine: it is compared with the reference on one batch row and one head
    group, without dropout."""
    q, k, mask, v = asked.q, asked.k, asked.mask, asked.v * 0.5 + 0.25
    plain = Asked(q, k, v, mask, asked.causal, q.shape[-1] ** -0.5)
    grad = random_like(reference.empty_out(q, v))
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    out, logsumexp, _, _ = implementation.forward(plain)
    grads = implementation.backward(grad, plain, Kept(out, logsumexp, zero, zero))
    rows = q.shape[1] // k.shape[1]
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[:1, :rows]
    part = plain._replace(q=q[:1, :rows].float(), k=k[:1, :1].float(), v=v[:1, :1].float(), mask=mask)
    want, logsumexp = reference.forward(*part)
    want_grads = reference.backward(grad[:1, :rows].float(), *part[:4], want, logsumexp, *part[4:])
    for name, got, expected in zip(("out", "dq", "dk", "dv"), (out, *grads), (want, *want_grads), strict=True):
        error = (got[:1, : expected.shape[1]].float() - expected).norm() / expected.norm().clamp(min=1e-6)
        if not bool(error <= TOLERANCE):
            return f"{name} differs from the reference by {float(error):.1e}"
    return None


def forward_and_backward(implementation: Implementation, asked: Asked) -> Callable[[], object]:
    """The call that is timed."""
    grad = random_like(reference.empty_out(asked.q, asked.v))
    key = torch.zeros((), dtype=torch.int64, device=asked.q.device)
    keyed = asked._replace(scale=0.125, key=key)

    def call() -> object:
        out, logsumexp, seed, offset = implementation.forward(keyed)
        kept = Kept(out, logsumexp, key if seed is None else seed, key if offset is None else offset)
        return implementation.backward(grad, keyed, kept)

    return call
