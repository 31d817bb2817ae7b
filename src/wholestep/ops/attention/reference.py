"""Attention in plain PyTorch: the specification of ws::attention and of its backward, on any device and dtype.

Legend: B batch, H query heads, G key/value heads (H % G == 0), R = H // G query heads per key head, T queries, S keys,
D head width. q (B, H, T, D), k (B, G, S, D), v (B, G, S, Dv), mask broadcastable to (B, H, T, S): bool (True = attend)
or float (added). Causal is aligned at the top left: query t sees keys 0..t. A row that sees no key gives output 0,
logsumexp -inf and no gradient. Dropout acts on the probabilities, with the counter-based mask of `key` over (B, H, T,
S). bf16 and fp16 compute in float32.

    s = scale q k' + mask;  l = logsumexp(s);  p = exp(s - l) / rowsum(exp(s - l));  o = dropout(p) v
    dv = dropout(p)' do;  ds = p * (dropout(do v') - rowsum(do * o));  dq = scale ds k;  dk = scale ds' q
"""

import torch
from torch import Tensor

from wholestep.ops.random_bits import keep_mask
from wholestep.ops.wide import wide_dtype


def empty_out(q: Tensor, v: Tensor) -> Tensor:
    """The output in q's layout; q's own strides when q is dense and Dv == D."""
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q)
    order = sorted(range(4), key=lambda d: q.stride(d), reverse=True)
    return torch.empty_permuted((*q.shape[:3], v.shape[-1]), order, dtype=q.dtype, device=q.device)


def visible(mask: Tensor | None, causal: bool, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
    """The bool mask (True = attend) of a bool mask and causality together; None when every key is visible or the mask
    is additive."""
    seen = mask if mask is not None and mask.dtype == torch.bool else None
    if causal:
        triangle = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril()
        seen = triangle if seen is None else seen & triangle
    return seen


def scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """(B, H, T, S) in the compute dtype, -inf where hidden. Grouped heads fold into rows: (B, G, R * T, D) @ (B, G, D,
    S)."""
    dtype = wide_dtype(q.dtype)
    batch, heads, num_queries, width = q.shape
    groups, num_keys = k.shape[1], k.shape[2]
    rows = q.to(dtype).reshape(batch, groups, heads // groups * num_queries, width)
    s = (torch.matmul(rows, k.to(dtype).transpose(-1, -2)) * scale).view(batch, heads, num_queries, num_keys)
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.to(dtype)
    seen = visible(mask, causal, num_queries, num_keys, q.device)
    return s if seen is None else s.masked_fill(~seen, float("-inf"))


def probabilities(s: Tensor, logsumexp: Tensor) -> Tensor:
    """exp(s - logsumexp), 0 on rows that see nothing (there -inf - -inf would be NaN).

    A large logsumexp is rounded by more than softmax is, by the same amount for the whole row: its sum, which should be 1,
    tells by how much.
    """
    finite = logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)
    p = torch.exp(s - finite.unsqueeze(-1))
    total = p.sum(dim=-1, keepdim=True)
    return p / total.masked_fill(total == 0.0, 1.0)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, logsumexp in the compute dtype)."""
    s = scores(q, k, mask, causal, scale)
    logsumexp = torch.logsumexp(s, dim=-1)
    p = _dropped(probabilities(s, logsumexp), dropout_p, key)
    batch, groups, num_keys, width = v.shape
    rows = q.shape[1] // groups * q.shape[2]
    out = torch.matmul(p.view(batch, groups, rows, num_keys), v.to(p.dtype)).view(*q.shape[:3], width)
    return out.to(q.dtype), logsumexp


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), recomputing the probabilities from logsumexp; the folded rows sum the heads of a group by
    themselves."""
    dtype = wide_dtype(q.dtype)
    p = probabilities(scores(q, k, mask, causal, scale), logsumexp)
    grad, rows_of = grad_out.to(dtype), (k.shape[0], k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
    delta = (grad * out.to(dtype)).sum(dim=-1, keepdim=True)
    grad_rows = grad.reshape(*rows_of, v.shape[-1])
    dv = torch.matmul(_dropped(p, dropout_p, key).view(*rows_of, k.shape[2]).transpose(-1, -2), grad_rows)
    dp = _dropped(torch.matmul(grad_rows, v.to(dtype).transpose(-1, -2)).view(p.shape), dropout_p, key)
    ds = (p * (dp - delta) * scale).view(*rows_of, k.shape[2])
    dq = torch.matmul(ds, k.to(dtype)).view(q.shape)
    dk = torch.matmul(ds.transpose(-1, -2), q.to(dtype).reshape(*rows_of, q.shape[-1]))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _dropped(p: Tensor, dropout_p: float, key: Tensor | None) -> Tensor:
    if dropout_p == 0.0:
        return p
    if dropout_p == 1.0:
        return torch.zeros_like(p)
    assert key is not None, "dropout needs a key"
    return (p * (1.0 / (1.0 - dropout_p))).masked_fill(~keep_mask(p.shape, dropout_p, key, p.device), 0.0)
