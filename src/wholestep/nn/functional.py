"""Pairs of a cheap function and a linear layer, for models written by hand: only what goes into the pair is kept.

In: the input of the cheap function, its parameters, the weight and bias of the linear layer. Out: what plain PyTorch gives
for the two in a row, bit for bit. A norm or an activation that feeds several linear layers is better called once, with
`linear` for each of them: `y = layer_norm(x, ...); q, k = linear(y, wq), linear(y, wk)`.
"""

from __future__ import annotations

from torch import Tensor

from wholestep.nn.activations import gelu, silu, swiglu
from wholestep.nn.linear_layers import linear
from wholestep.nn.norms import layer_norm, rms_norm


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """linear(gelu(x)), keeping x."""
    return linear(gelu(x, approximate), weight, bias)


def silu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(silu(x)), keeping x."""
    return linear(silu(x), weight, bias)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(silu(gate) * up), keeping gate and up."""
    return linear(swiglu(gate, up), weight, bias)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor:
    """linear(layer_norm(x)) over the last dimension, keeping x and two numbers per row."""
    return linear(layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps), weight, bias)


def rms_norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, eps: float | None = None
) -> Tensor:
    """linear(rms_norm(x)) over the last dimension, keeping x."""
    return linear(rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias)
