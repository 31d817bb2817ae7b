"""The implementations of ws::attention: math (the reference), torch's CPU flash kernel, and on CUDA cuDNN, flash and
efficient.

In: tensors as in reference.py. Out: per implementation a forward -> (out, logsumexp, seed, offset), a backward -> (dq,
dk, dv) and a `supports(signature)` that returns the reason when it says no. Why: which one is fastest depends on shape,
dtype, mask and card, so choice.py measures those that apply. The wrappers even out what differs between them: grouped
heads, mask forms, rows that see no key, paddings, and where the Philox state of dropout lives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.kernels.attention import reference

aten = torch.ops.aten
LOW_PRECISION = (torch.float16, torch.bfloat16)
# Finite stand-ins for -inf in an additive mask, so that a row without keys gives finite numbers which are then set to
# 0. They must survive a multiplication by log2(e) inside the kernels, so finfo.min is too large.
FLOOR = {torch.float16: -30000.0, torch.bfloat16: -1e30, torch.float32: -1e30}
# cuDNN's statistics were (B, H, T, 1) in some releases and (B, H, T) in others: the forward notes what the backward
# wants.
CUDNN_STATISTICS_DIM = {"dim": 3}

Forward = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a choice may depend on. Strides are left out on purpose: forward and backward must choose alike, and a pass
    in between may change the layout of a saved tensor."""

    device: str
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    mask_dtype: torch.dtype | None
    mask_shape: tuple[int, ...] | None
    causal: bool
    dropout: bool


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to compute attention."""

    name: str
    device_type: str  # "cpu", "cuda" or "any"
    supports: Callable[[Signature], str | None]
    forward: Callable[..., Forward]
    backward: Callable[..., Grads]


# ---- math ----------------------------------------------------------------------------------------------------


def math_supports(signature: Signature) -> str | None:
    return None


def math_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> Forward:
    return *reference.forward(q, k, v, mask, causal, scale, dropout_p, key), None, None


def math_backward(
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
) -> Grads:
    return reference.backward(grad_out, q, k, v, mask, out, logsumexp, causal, scale, dropout_p, key)


# ---- CPU flash -----------------------------------------------------------------------------------------------


def cpu_flash_supports(signature: Signature) -> str | None:
    if signature.dropout:
        return "the CPU flash kernel has no dropout"
    if signature.q_shape[-1] != signature.v_shape[-1]:
        return "the CPU flash kernel needs equal query and value widths"
    if 0 in signature.q_shape or 0 in signature.k_shape:
        return "empty tensors"
    return None


def cpu_flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> Forward:
    q, k, v, bias = *_last_contiguous(q, k, v), _cpu_bias(mask, q)
    k, v = _expand_groups(q, k, v)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, logsumexp, None, None


def cpu_flash_backward(
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
) -> Grads:
    groups, bias = k.shape[1], _cpu_bias(mask, q)
    q, k, v, grad_out = _last_contiguous(q, k, v, grad_out)
    k, v = _expand_groups(q, k, v)
    # The kernel walks logsumexp in its own (B, T, H) order.
    logsumexp = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _cpu_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The kernel takes an additive mask of 2 or 4 dimensions; -inf is fine there: a row of -inf gives output 0 and no
    NaN."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    else:
        bias = mask if mask.dtype == reference.compute_dtype(q.dtype) else mask.to(q.dtype)
    return bias if bias.dim() in (2, 4) else bias.view((1,) * (4 - bias.dim()) + tuple(bias.shape))


# ---- what the CUDA kernels share -----------------------------------------------------------------------------


def _last_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels read rows: the last dimension must have stride 1."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _expand_groups(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat each key head for its query heads, for kernels without grouped heads."""
    repeat = q.shape[1] // k.shape[1]
    if repeat == 1:
        return k, v
    return k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    """The transpose of `_expand_groups`, summed in float32 (float64 for float64)."""
    if grad.shape[1] == groups:
        return grad
    parts = grad.unflatten(1, (groups, -1))
    return parts.sum(dim=2, dtype=reference.compute_dtype(grad.dtype)).to(grad.dtype)


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


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> Forward:
    q, k, v = _last_contiguous(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 8)
    results = aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias.values, True, dropout_p, bias.causal, False, scale=scale
    )
    out, logsumexp, seed, offset = results[0], results[1], results[6], results[7]
    CUDNN_STATISTICS_DIM["dim"] = logsumexp.dim()
    logsumexp = logsumexp.reshape(q.shape[:3])
    if dropout_p == 0.0:
        return _zero_rows(out, bias.rows), logsumexp, None, None
    return _zero_rows(out, bias.rows), logsumexp, _scalar_on(seed, q.device), _scalar_on(offset, q.device)


def cudnn_backward(
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
) -> Grads:
    q, k, v = _last_contiguous(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 8)
    grad_out = _like_out(_zero_rows(grad_out, bias.rows), out)
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


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> Forward:
    q, k, v = _last_contiguous(q, k, v)
    results = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal, False, scale=scale)
    out, logsumexp, state = results[0], results[1][..., : q.shape[2]], results[6]
    if dropout_p == 0.0:
        return out, logsumexp, None, None
    if state.numel() == 2:  # uint64 [seed, offset] on the device
        words = state.view(torch.int64)
        return out, logsumexp, words[0].clone(), words[1].clone()
    return out, logsumexp, _scalar_on(state, q.device), _scalar_on(results[7], q.device)


def flash_backward(
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
) -> Grads:
    q, k, v = _last_contiguous(q, k, v)
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


def efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    key: Tensor | None,
) -> Forward:
    q, k, v = _last_contiguous(q, k, v)
    k, v = _expand_groups(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 16)
    out, logsumexp, seed, offset = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias.values, True, dropout_p, bias.causal, scale=scale
    )
    logsumexp = logsumexp[..., : q.shape[2]]
    if dropout_p == 0.0:
        return _zero_rows(out, bias.rows), logsumexp, None, None
    return _zero_rows(out, bias.rows), logsumexp, _scalar_on(seed, q.device), _scalar_on(offset, q.device)


def efficient_backward(
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
) -> Grads:
    groups = k.shape[1]
    q, k, v = _last_contiguous(q, k, v)
    k, v = _expand_groups(q, k, v)
    bias = _bias(mask, causal, q, k.shape[2], 16)
    # The kernel takes (B, T, H, D) memory for the output.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % LOGSUMEXP_ALIGN), value=float("inf"))
    if dropout_p > 0.0 and not torch.cuda.is_current_stream_capturing():
        # Outside a capture the kernel reads the state on the host, inside one through device pointers.
        seed, offset = seed.cpu(), offset.cpu()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        _zero_rows(grad_out, bias.rows), q, k, v, bias.values, out, logsumexp, seed, offset, dropout_p,
        [True, True, True, False], bias.causal, scale=scale,
    )  # fmt: skip
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


MATH = Implementation("math", "any", math_supports, math_forward, math_backward)
CPU_FLASH = Implementation("cpu_flash", "cpu", cpu_flash_supports, cpu_flash_forward, cpu_flash_backward)
CUDNN = Implementation("cudnn", "cuda", cudnn_supports, cudnn_forward, cudnn_backward)
FLASH = Implementation("flash", "cuda", flash_supports, flash_forward, flash_backward)
EFFICIENT = Implementation("efficient", "cuda", efficient_supports, efficient_forward, efficient_backward)
# In the order of trust, which decides where nothing can be measured (inside a capture).
IMPLEMENTATIONS = {i.name: i for i in (CPU_FLASH, FLASH, EFFICIENT, CUDNN, MATH)}
