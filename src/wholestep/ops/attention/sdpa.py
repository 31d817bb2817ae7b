"""A drop-in for torch.nn.functional.scaled_dot_product_attention that emits ws::attention.

In: what torch's function takes, plus `key` (0-d int64) when dropout_p > 0. Out: the attention output. Why: the tracing
function mode replaces torch's function by this one, so that the captured graph holds one device-neutral node with its
own backward.
"""

import math

import torch
from torch import Tensor

from wholestep.ops.attention import biased
from wholestep.ops.attention.reference import visible
from wholestep.ops.wide import wide_dtype


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    key: Tensor | None = None,
    on_gpu: bool | None = None,
) -> Tensor:
    """Attention over the last two dimensions with any number of leading ones; see torch's function for the
    arguments. `on_gpu`: where it will run, if not where its operands are."""
    if dropout_p > 0.0 and key is None:
        raise ValueError("scaled_dot_product_attention: dropout_p > 0 needs key, a 0-d int64 tensor")
    q, k, v, mask = _autocast(q, k, v, attn_mask)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v, mask, leading = _four_dimensional(q, k, v, mask, enable_gqa)
    if mask is not None and mask.requires_grad:
        far = q.is_cuda if on_gpu is None else on_gpu
        bias = _bias(q, k, v, mask) if far and not is_causal and dropout_p == 0.0 else None
        if bias is not None:
            out = torch.ops.ws.biased_attention(q, k, v, bias, scale)[0]
        else:
            out = _composed(q, k, v, mask, is_causal, scale, dropout_p, key)
    else:
        out = torch.ops.ws.attention(q, k, v, mask, is_causal, scale, dropout_p, key if dropout_p > 0.0 else None)[0]
    return out if leading is None else out.reshape(*leading, *out.shape[-2:])


def _autocast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The casts that torch's autocast would have made on its own function."""
    device_type = q.device.type
    if not torch.is_autocast_enabled(device_type) or q.dtype == torch.float64:
        return q, k, v, mask
    dtype = torch.get_autocast_dtype(device_type)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), mask


def _four_dimensional(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[int, ...] | None]:
    """Broadcast and fold the leading dimensions into (batch, heads); the last item is the leading shape to restore,
    None when 4-D."""
    grouped = enable_gqa and q.dim() >= 3 and q.shape[-3] != k.shape[-3]
    if grouped and k.shape[-3] != v.shape[-3]:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        grouped = False
    keep = 3 if grouped else 2
    leading = torch.broadcast_shapes(q.shape[:-keep], k.shape[:-keep], v.shape[:-keep])
    q, k, v = (t if t.shape[:-keep] == leading else t.expand(*leading, *t.shape[-keep:]) for t in (q, k, v))
    leading = q.shape[:-2]
    if len(leading) == 2:
        return q, k, v, mask, None
    if mask is not None and mask.dim() > 2:
        mask = mask.expand(*leading, *mask.shape[-2:])
    fold = _fold_grouped if grouped else _fold
    return fold(q), fold(k), fold(v), mask if mask is None or mask.dim() <= 2 else fold(mask), tuple(leading)


def _fold(t: Tensor) -> Tensor:
    """(..., T, D) -> (batch, heads, T, D): missing dimensions become 1, further ones join the batch."""
    while t.dim() < 4:
        t = t.unsqueeze(0) if t.dim() == 2 else t.unsqueeze(1)
    return t if t.dim() == 4 else t.flatten(0, t.dim() - 4)


def _fold_grouped(t: Tensor) -> Tensor:
    """Like `_fold`, but the third dimension from the end is the heads even in a 3-D tensor."""
    return t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, t.dim() - 4)


def _bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor | None:
    """The mask as ws::biased_attention takes it, where it has a kernel for these sizes."""
    if not all(type(size) is int for t in (q, k, v, mask) for size in t.shape):
        return None
    table = mask[(None,) * (4 - mask.dim())]
    wanted = table.shape[0], q.shape[1], q.shape[2], k.shape[2]
    table = table if table.shape == wanted else table.expand(wanted)
    return table if biased.takes(q, k, v, table) else None


def _composed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float, dropout_p: float, key: Tensor | None
) -> Tensor:
    """Softmax attention from differentiable operators: the only form that gives the mask (a learned bias) its
    gradient."""
    dtype = wide_dtype(q.dtype)
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    s = torch.matmul(q.to(dtype), k.to(dtype).transpose(-1, -2)) * scale + mask.to(dtype)
    seen = visible(None, causal, q.shape[2], k.shape[2], q.device)
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
    # A row of -inf has no softmax: compute it on zeros, then force its probabilities to 0, so that no NaN reaches the
    # gradient.
    empty = (s == float("-inf")).all(dim=-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    if dropout_p > 0.0:
        p = torch.ops.ws.dropout(p, dropout_p, key)
    return torch.matmul(p, v.to(dtype)).to(q.dtype)
