"""LayerNorm and RMSNorm whose output the linear layers after them need not keep.

In: x, weight, bias, eps. Out: the normalised tensor, with an origin. Torch's LayerNorm keeps x and two numbers per row;
each of these norms keeps x as well, and a lean Linear after it keeps the same x instead of the norm's output. The output
is never inverted, so a weight of zero is nothing special.

RMS norms written out in Python (Hugging Face) go through `replayed`: x is kept, not its float32 copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.nn.origin import remember
from wholestep.nn.replay import replayed


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """torch.nn.functional.layer_norm with an origin."""
    function = functools.partial(_layer_norm, tuple(shape), eps)
    return remember(function(x, weight, bias), function, x, weight, bias)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """torch.nn.functional.rms_norm, keeping x and weight alone."""
    return replayed(functools.partial(_rms_norm, tuple(shape), eps), x, weight)


def rms_norm_in_float(x: Tensor, weight: Tensor, eps: float, *, by_hand: bool = True) -> Tensor:
    """weight * (x / rms(x) in float32, back in x's dtype): Llama, Mistral, Qwen. `by_hand`: without a second autograd."""
    derivative = functools.partial(_rms_in_float_derivative, eps) if by_hand and x.dtype == weight.dtype else None
    return replayed(functools.partial(_rms_in_float, eps), x, weight, derivative=derivative)


def rms_norm_weight_dtype(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x / rms(x) in float32, rounded only to a half-precision weight): T5."""
    return replayed(functools.partial(_rms_weight_dtype, eps), x, weight)


def rms_norm_one_plus(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), all in float32 and then back in x's dtype: Gemma."""
    return replayed(functools.partial(_rms_one_plus, eps), x, weight)


def _layer_norm(shape: tuple[int, ...], eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps)


def _rms_norm(shape: tuple[int, ...], eps: float | None, x: Tensor, weight: Tensor | None) -> Tensor:
    return F.rms_norm(x, shape, weight, eps)


def _over_rms(eps: float, x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _rms_in_float(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    return weight * _over_rms(eps, x).to(x.dtype)


def _rms_in_float_derivative(eps: float, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """What autograd does with the chain above, operator by operator and in its order, so that the bits are its bits."""
    wide = x.to(torch.float32)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    d_weight = (grad * (wide * root).to(x.dtype)).sum_to_size(weight.shape)
    d_over = (grad * weight).to(torch.float32)
    d_root = (d_over * wide).sum(-1, keepdim=True)
    d_mean = -0.5 * d_root * root.pow(3)
    d_wide = (d_mean / x.shape[-1]).expand_as(wide) * (2.0 * wide)
    return (d_over * root + d_wide).to(x.dtype), d_weight


def _rms_weight_dtype(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    # x is not cast first, as in T5: the same values, and the gradient rounds where T5's does
    over = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + eps)
    return weight * (over.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else over)


def _rms_one_plus(eps: float, x: Tensor, weight: Tensor) -> Tensor:
    return (_over_rms(eps, x) * (1.0 + weight.float())).type_as(x)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm that tells the next lean layers how to compute it again."""

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that keeps its input alone, and tells the next lean layers how to compute it again."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)
