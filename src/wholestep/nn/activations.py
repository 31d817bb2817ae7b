"""GELU, SiLU and gated products whose output the next linear layer need not keep.

In: the pre-activation x (and the other factor of a gated product). Out: the activation, with an origin. Torch's own GELU
and SiLU keep x alone already; what doubles their memory is the Linear after them. Here that Linear, if it is lean, keeps
x too. The gated product of SwiGLU keeps gate and up, where plain PyTorch keeps four tensors of that size.

Nothing is inverted and nothing is approximated: x is kept and f(x) computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.nn.origin import remember
from wholestep.nn.replay import replayed


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """torch.nn.functional.gelu with an origin; `approximate` is "none" or "tanh"."""
    function = functools.partial(F.gelu, approximate=approximate)
    return remember(function(x), function, x)


def silu(x: Tensor) -> Tensor:
    """torch.nn.functional.silu with an origin."""
    return remember(F.silu(x), F.silu, x)


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """activation(gate) * up, keeping gate and up."""
    derivative = _swiglu_derivative if activation is F.silu and gate.shape == up.shape else None
    return replayed(functools.partial(_gated, activation), gate, up, derivative=derivative)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, keeping gate and up."""
    return gated(gate, up)


def _gated(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _swiglu_derivative(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


class GELU(nn.GELU):
    """nn.GELU that tells the next lean layer how to compute it again."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, self.approximate)


class SiLU(nn.SiLU):
    """nn.SiLU that tells the next lean layer how to compute it again."""

    def forward(self, input: Tensor) -> Tensor:
        return silu(input) if not self.inplace else F.silu(input, inplace=True)


class SwiGLU(nn.Module):
    """silu(gate) * up of one tensor that holds gate and up side by side, or of two."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        if up is None:
            gate, up = gate.chunk(2, dim=-1)
        return swiglu(gate, up)
