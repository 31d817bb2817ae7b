"""Dropout that keeps eight bytes: the key from which its mask is computed, whenever it is needed.

In: x, the probability p of dropping. Out: x / (1 - p) where kept, else 0. The mask is a function of (index, key), the key
one number drawn from torch's generator: `torch.manual_seed` repeats a run, and an activation checkpoint, which restores the
generator, draws the same key again. The masks are other ones than torch's dropout would draw from the same seed.

Outside of training nothing is drawn and nothing is dropped. In a step captured by Wholestep the key is the step's own.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep.ops  # noqa: F401  registers ws::dropout
from wholestep import compat
from wholestep.capture.modes import FunctionLevel
from wholestep.errors import BadOption
from wholestep.nn.origin import Casts, origin_of, remember

LOWEST, HIGHEST = -(2**63), 2**63 - 1
FUSED = (torch.float32, torch.float16, torch.bfloat16)


def draw_key(device: torch.device) -> Tensor:
    """64 random bits from torch's generator of that device, without waiting for it."""
    return torch.randint(LOWEST, HIGHEST, (), dtype=torch.int64, device=device)


def keys_are_given() -> bool:
    """Whether torch's own functions must be called, because something above replaces them by keyed or compiled ones."""
    return torch.compiler.is_compiling() or compat.in_function_transform() or compat.in_function_mode(FunctionLevel)


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """torch.nn.functional.dropout without a stored mask."""
    if not training or p == 0.0 or keys_are_given():
        return F.dropout(x, p, training)
    if not 0.0 <= p <= 1.0:
        raise BadOption(f"a dropout probability is between 0 and 1, got {p}")
    key = draw_key(x.device)
    out = drop(x, p, key)
    inner = origin_of(x)
    if inner is None or inner.copied or inner.casts != Casts.now(x.device.type):
        return out  # the layer after it keeps this output: the dropout itself keeps nothing it could be made from
    return remember(out, functools.partial(_after, inner.function, p), key, *inner.tensors)


def _after(inner: Callable[..., Tensor], p: float, key: Tensor, *tensors: Tensor | None) -> Tensor:
    return drop(inner(*tensors), p, key)


def drop(x: Tensor, p: float, key: Tensor) -> Tensor:
    """ws::dropout; on CUDA in one kernel, with the same bits."""
    fused = x.is_cuda and p < 1.0 and x.dtype in FUSED and not compat.is_fake(x) and _has_triton()
    out: Tensor = _Dropped.apply(x, p, key) if fused else torch.ops.ws.dropout(x, p, key)
    return out


class _Dropped(torch.autograd.Function):
    """Dropout is linear: its backward is itself on the gradient, with the same key."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, key: Tensor) -> Tensor:
        from wholestep.nn.dropout_triton import launch

        ctx.save_for_backward(key)
        ctx.p = p
        return launch(x.contiguous(), p, key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (key,) = ctx.saved_tensors
        return drop(grad, ctx.p, key), None, None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Dropout(nn.Dropout):
    """nn.Dropout without a stored mask."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training) if not self.inplace else super().forward(input)
