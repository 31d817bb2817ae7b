"""How Inductor sees attention on the CPU when it drops out: the reference's own arithmetic, which it fuses.

No CPU kernel of torch has dropout, so the choice there is math. Called as one opaque operator it runs some twenty passes over
the probabilities, ten of them for the mask's bits; decomposed, Inductor makes them two. Elsewhere the operator stays whole.
"""

import torch
from torch import Tensor

from wholestep.ops.attention import reference


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
    *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.device.type != "cpu" or dropout_p == 0.0:
        return NotImplemented
    out, logsumexp = reference.forward(q, k, v, mask, causal, scale, dropout_p, key)
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    return with_strides(out, reference.empty_out(q, v)), logsumexp.contiguous(), nothing, nothing.clone()


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
    *,
    implementation: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type != "cpu" or dropout_p == 0.0:
        return NotImplemented
    grads = reference.backward(grad_out, q, k, v, mask, out, logsumexp, causal, scale, dropout_p, key)
    dq, dk, dv = (with_strides(g, torch.empty_like(t)) for g, t in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def with_strides(t: Tensor, like: Tensor) -> Tensor:
    """The values of `t` in the memory order of `like`: what follows was traced with those strides."""
    order = sorted(range(t.dim()), key=lambda d: like.stride(d), reverse=True)
    inverse = [order.index(d) for d in range(t.dim())]
    return t.permute(order).contiguous().permute(inverse)
