"""How Inductor sees attention on the CPU when it drops out: the reference's own arithmetic, which it fuses.

No CPU kernel of torch has dropout, so the choice there is math. Called as one opaque operator it runs some twenty passes over
the probabilities, ten of them for the mask's bits; decomposed, Inductor makes them two. Elsewhere the operator stays whole.
"""

from typing import Any

import torch
from torch import Tensor

from wholestep.ops.attention import reference
from wholestep.ops.attention.interface import Asked, asked_and_kept


def attention(*arguments: Any, implementation: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked = Asked(*arguments)
    if _stays_whole(asked):
        return NotImplemented
    out, logsumexp = reference.forward(*asked)
    nothing = torch.zeros((), dtype=torch.int64, device=asked.q.device)
    dense = with_strides(out, reference.empty_out(asked.q, asked.v))
    return dense, logsumexp.contiguous(), nothing, nothing.clone()


def attention_backward(grad_out: Tensor, *arguments: Any, implementation: str = "") -> tuple[Tensor, Tensor, Tensor]:
    asked, kept = asked_and_kept(arguments)
    if _stays_whole(asked):
        return NotImplemented
    grads = reference.backward(grad_out, *asked[:4], kept.out, kept.logsumexp, *asked[4:])
    dq, dk, dv = (with_strides(g, torch.empty_like(t)) for g, t in zip(grads, asked[:3], strict=True))
    return dq, dk, dv


def _stays_whole(asked: Asked) -> bool:
    return asked.q.device.type != "cpu" or asked.dropout_p == 0.0


def with_strides(t: Tensor, like: Tensor) -> Tensor:
    """The values of `t` in the memory order of `like`: what follows was traced with those strides."""
    order = sorted(range(t.dim()), key=lambda d: like.stride(d), reverse=True)
    inverse = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(inverse)
