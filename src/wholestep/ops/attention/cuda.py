"""torch's CUDA attention kernels (cuDNN, flash, efficient) behind the interface of ws::attention.

In and out as in implementations.py. Why: the wrappers even out what differs between the kernels: grouped heads, mask
forms, rows that see no key, paddings, and where the Philox state of dropout lives. Importing this file touches no GPU.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.ops.attention import reference
from wholestep.ops.attention.interface import (
    Asked,
    Forward,
    Grads,
    Kept,
    Signature,
    expand_groups,
    last_contiguous,
    sum_groups,
)

aten = torch.ops.aten
LOW_PRECISION = (torch.float16, torch.bfloat16)
# Finite stand-ins for -inf in an additive mask, so that a row without keys gives finite numbers which are then set to
# 0. They must survive a multiplication by log2(e) inside the kernels, so finfo.min is too large.
FLOOR = {torch.float16: -30000.0, torch.bfloat16: -1e30, torch.float32: -1e30}
# cuDNN's statistics were (B, H, T, 1) in some releases and (B, H, T) in others: the forward notes what the backward
# wants.
CUDNN_STATISTICS_DIM = {"dim": 3}


@dataclass(frozen=True, slots=True)
class Bias:
    """An additive mask without -inf, and which rows see a key at all (True = sees; None = all do)."""

    values: Tensor | None
    rows: Tensor | None
    causal: bool


def _bias(mask: Tensor | None, causal: bool, q: Tensor, num_keys: int, align: int) -> Bias:
    """Turn mask and causality into one (B, H, T, S) view whose rows start at multiples of `align` elements."""
    if mask is None:
        return Bias(None, None, causal)
    floor = FLOOR[q.dtype]
    seen = reference.visible(mask, causal, q.shape[2], num_keys, q.device)
    if mask.dtype == torch.bool:
        assert seen is not None
        values = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, floor)
    else:
        seen = mask > float("-inf") if seen is None else seen & (mask > float("-inf"))
        values = mask.to(torch.float32).clamp(min=floor).to(q.dtype)
        values = torch.where(seen, values, floor)
    if seen.shape[-1] != num_keys:
        values = values.expand(*values.shape[:-1], num_keys)
    padded = -(-num_keys // align) * align
    # Even where nothing is padded the copy gives contiguous rows, which broadcast masks may lack.
    values = F.pad(values, (0, padded - num_keys))[..., :num_keys] if padded != num_keys else values.contiguous()
    values = values.expand(q.shape[0], q.shape[1], q.shape[2], num_keys)
    return Bias(values, seen.any(dim=-1, keepdim=True), False)


def _zero_rows(t: Tensor, rows: Tensor | None) -> Tensor:
    return t if rows is None else t.masked_fill(~rows, 0.0)


def _zero_rows_of_result(out: Tensor, rows: Tensor | None) -> Tensor:
    """Like `_zero_rows`, in place: the kernel has just made this tensor."""
    return out if rows is None else out.masked_fill_(~rows, 0.0)


def _silence_rows(logsumexp: Tensor, rows: Tensor | None) -> Tensor:
    """+inf for rows that see no key: the backward computes exp(score - logsumexp), and between two numbers near the floor
    that difference is rounding error of any size (seen on an H200: NaN gradients)."""
    return logsumexp if rows is None else logsumexp.masked_fill(~rows.squeeze(-1), float("inf"))


def _like_out(grad_out: Tensor, out: Tensor) -> Tensor:
    """The gradient in the layout of the output; an expanded gradient (from a sum) becomes real memory."""
    return grad_out if grad_out.stride() == out.stride() else torch.empty_like(out).copy_(grad_out)


def _scalar_on(t: Tensor, device: torch.device) -> Tensor:
    """A 0-d int64 copy on the device; outside a capture torch keeps some Philox states on the host."""
    return t.reshape(()).to(device=device, dtype=torch.int64, non_blocking=True, copy=True)


# ---- cuDNN ---------------------------------------------------------------------------------------------------


def _common_reason(signature: Signature, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if signature.dtype not in dtypes:
        return f"dtype {signature.dtype}"
    if signature.q_shape[-1] % 8 or signature.v_shape[-1] % 8:
        return f"head width {signature.q_shape[-1]} is not a multiple of 8"
    if 0 in signature.q_shape or 0 in signature.k_shape:
        return "empty tensors"
    return None


def cudnn_supports(signature: Signature) -> str | None:
    if signature.causal and signature.mask_dtype is None and signature.q_shape[2] != signature.k_shape[2]:
        return "cuDNN's causal mask is trusted only for equal query and key lengths"
    if signature.q_shape[2] < 2 or signature.k_shape[2] < 2:
        return "cuDNN attention needs more than one query and key"
    return _common_reason(signature, LOW_PRECISION)


def cudnn_forward(asked: Asked) -> Forward:
    q, k, v, mask, causal, scale, dropout_p, _ = asked
    q, k, v = last_contiguous(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 8)
    results = aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias.values, True, dropout_p, bias.causal, False, scale=scale
    )
    out, logsumexp, seed, offset = results[0], results[1], results[6], results[7]
    CUDNN_STATISTICS_DIM["dim"] = logsumexp.dim()
    logsumexp = logsumexp.reshape(q.shape[:3])
    if dropout_p == 0.0:
        return _zero_rows_of_result(out, bias.rows), logsumexp, None, None
    return _zero_rows_of_result(out, bias.rows), logsumexp, _scalar_on(seed, q.device), _scalar_on(offset, q.device)


def cudnn_backward(grad_out: Tensor, asked: Asked, kept: Kept) -> Grads:
    q, k, v, mask, causal, scale, dropout_p, _ = asked
    out, logsumexp, seed, offset = kept
    q, k, v, out = last_contiguous(q, k, v, out)
    bias = _bias(mask, causal, q, k.shape[2], 8)
    grad_out = _like_out(_zero_rows(grad_out, bias.rows), out)
    logsumexp = _silence_rows(logsumexp, bias.rows)
    statistics = logsumexp.unsqueeze(-1) if CUDNN_STATISTICS_DIM["dim"] == 4 else logsumexp
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out, q, k, v, out, statistics, seed, offset, bias.values, None, None, q.shape[2], k.shape[2],
        dropout_p, bias.causal, scale=scale,
    )  # fmt: skip


# ---- flash ---------------------------------------------------------------------------------------------------


def flash_supports(signature: Signature) -> str | None:
    if signature.mask_dtype is not None:
        return "flash attention takes no mask"
    if signature.causal and signature.q_shape[2] != signature.k_shape[2]:
        return "flash attention aligns a causal mask at the bottom right when query and key lengths differ"
    if signature.q_shape[-1] != signature.v_shape[-1]:
        return "flash attention needs equal query and value widths"
    if signature.q_shape[-1] > 256:
        return "flash attention needs a head width of at most 256"
    return _common_reason(signature, LOW_PRECISION)


def flash_forward(asked: Asked) -> Forward:
    q, k, v, _, causal, scale, dropout_p, _ = asked
    q, k, v = last_contiguous(q, k, v)
    results = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, False, scale=scale)
    out, logsumexp, state = results[0], results[1][..., : q.shape[2]], results[6]
    if dropout_p == 0.0:
        return out, logsumexp, None, None
    if state.numel() == 2:  # uint64 [seed, offset] on the device
        words = state.view(torch.int64)
        return out, logsumexp, words[0].clone(), words[1].clone()
    return out, logsumexp, _scalar_on(state, q.device), _scalar_on(results[7], q.device)


def flash_backward(grad_out: Tensor, asked: Asked, kept: Kept) -> Grads:
    q, k, v, _, causal, scale, dropout_p, _ = asked
    out, logsumexp, seed, offset = kept
    q, k, v, out = last_contiguous(q, k, v, out)
    state = torch.stack((seed, offset)).view(torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(
        _like_out(grad_out, out), q, k, v, out, logsumexp, None, None, q.shape[2], k.shape[2],
        dropout_p, causal, state, torch.empty((), dtype=torch.uint64, device=q.device), scale=scale,
    )  # fmt: skip


# ---- efficient -----------------------------------------------------------------------------------------------

# The efficient kernels keep logsumexp padded to a multiple of 32 queries; padded entries are +inf, whose probabilities
# are 0.
LOGSUMEXP_ALIGN = 32


def efficient_supports(signature: Signature) -> str | None:
    return _common_reason(signature, (*LOW_PRECISION, torch.float32))


def efficient_forward(asked: Asked) -> Forward:
    q, k, v, mask, causal, scale, dropout_p, _ = asked
    q, k, v = last_contiguous(q, k, v)
    k, v = expand_groups(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 16)
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias.values, True, dropout_p, bias.causal, scale=scale
    )
    logsumexp = logsumexp[..., : q.shape[2]]
    if dropout_p == 0.0:
        return _zero_rows_of_result(out, bias.rows), logsumexp, None, None
    return _zero_rows_of_result(out, bias.rows), logsumexp, _scalar_on(seed, q.device), _scalar_on(offset, q.device)


def efficient_backward(grad_out: Tensor, asked: Asked, kept: Kept) -> Grads:
    q, k, v, mask, causal, scale, dropout_p, _ = asked
    out, logsumexp, seed, offset = kept
    groups = k.shape[1]
    q, k, v, out = last_contiguous(q, k, v, out)
    k, v = expand_groups(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 16)
    # The kernel takes (B, T, H, D) memory for the output.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    logsumexp = _silence_rows(logsumexp, bias.rows)
    logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % LOGSUMEXP_ALIGN), value=float("inf"))
    if dropout_p > 0.0 and not torch.cuda.is_current_stream_capturing():
        # Outside a capture the kernel reads the state on the host, inside one through device pointers.
        seed, offset = seed.cpu(), offset.cpu()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        _zero_rows(grad_out, bias.rows), q, k, v, bias.values, out, logsumexp, seed, offset, dropout_p,
        [True, True, True, False], bias.causal, scale=scale,
    )  # fmt: skip
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)
