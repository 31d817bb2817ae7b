"""The implementations of ws::attention: math (the reference), torch's CPU flash kernel, and the CUDA ones of cuda.py.

In: tensors as in reference.py. Out: per implementation a forward -> (out, logsumexp, seed, offset), a backward ->
(dq, dk, dv) and a `supports(signature)` that returns the reason when it says no. Why: which one is fastest depends on
shape, dtype, mask and card, so choice.py measures those that apply.
"""

import torch
from torch import Tensor

from wholestep.ops.attention import cuda, reference
from wholestep.ops.attention.interface import (
    Asked,
    Forward,
    Grads,
    Implementation,
    Kept,
    Signature,
    expand_groups,
    last_contiguous,
    sum_groups,
)
from wholestep.ops.wide import wide_dtype

aten = torch.ops.aten

# ---- math ----------------------------------------------------------------------------------------------------


def math_supports(signature: Signature) -> str | None:
    return None


def math_forward(asked: Asked) -> Forward:
    return *reference.forward(*asked), None, None


def math_backward(grad_out: Tensor, asked: Asked, kept: Kept) -> Grads:
    return reference.backward(grad_out, *asked[:4], kept.out, kept.logsumexp, *asked[4:])


# ---- CPU flash -----------------------------------------------------------------------------------------------


def cpu_flash_supports(signature: Signature) -> str | None:
    if signature.dropout:
        return "the CPU flash kernel has no dropout"
    if signature.q_shape[-1] != signature.v_shape[-1]:
        return "the CPU flash kernel needs equal query and value widths"
    if 0 in signature.q_shape or 0 in signature.k_shape:
        return "empty tensors"
    return None


def cpu_flash_forward(asked: Asked) -> Forward:
    q, k, v, mask, causal, scale, _, _ = asked
    q, k, v, bias = *last_contiguous(q, k, v), _cpu_bias(mask, q)
    k, v = expand_groups(q, k, v)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, logsumexp, None, None


def cpu_flash_backward(grad_out: Tensor, asked: Asked, kept: Kept) -> Grads:
    q, k, v, mask, causal, scale, _, _ = asked
    groups, bias = k.shape[1], _cpu_bias(mask, q)
    q, k, v, grad_out, out = last_contiguous(q, k, v, grad_out, kept.out)  # `out` has the layout of q, which may be any
    k, v = expand_groups(q, k, v)
    # The kernel walks logsumexp in its own (B, T, H) order.
    logsumexp = kept.logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, logsumexp, 0.0, causal, attn_mask=bias, scale=scale
    )
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)


def _cpu_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The kernel takes an additive mask of 2 or 4 dimensions; -inf is fine there: a row of -inf gives output 0 and no
    NaN."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    else:
        bias = mask if mask.dtype == wide_dtype(q.dtype) else mask.to(q.dtype)
    return bias if bias.dim() in (2, 4) else bias.view((1,) * (4 - bias.dim()) + tuple(bias.shape))


MATH = Implementation("math", "any", math_supports, math_forward, math_backward)
CPU_FLASH = Implementation("cpu_flash", "cpu", cpu_flash_supports, cpu_flash_forward, cpu_flash_backward)
CUDNN = Implementation("cudnn", "cuda", cuda.cudnn_supports, cuda.cudnn_forward, cuda.cudnn_backward)
FLASH = Implementation("flash", "cuda", cuda.flash_supports, cuda.flash_forward, cuda.flash_backward)
EFFICIENT = Implementation(
    "efficient", "cuda", cuda.efficient_supports, cuda.efficient_forward, cuda.efficient_backward
)
# In the order of trust, which decides where nothing can be measured (inside a capture).
IMPLEMENTATIONS = {i.name: i for i in (CPU_FLASH, FLASH, EFFICIENT, CUDNN, MATH)}
