"""A linear layer that does not keep its input when the input can be computed again.

In: y with an origin (see origin.py), weight, bias. Out: y W' + b, the very bits of torch's own function. Kept for the
backward: the weight, and what the origin needs - which the layer that made y keeps anyway - instead of y. The backward
computes y again, then the two products that every linear layer needs; there is no third.

An input without an origin, or a weight that takes no gradient (PyTorch keeps no input then), goes to torch's function.

Legend: y (..., I), weight (O, I), bias (O), g the gradient of the output (..., O).
    dW = g' y    db = sum g    dy = g W
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.nn.origin import Origin, Shared, compute_again, origin_of, plain, without_autocast


def linear(y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear, without keeping y where y is the output of a lean layer."""
    origin = origin_of(y)
    if origin is None or not weight.requires_grad or not plain(weight, bias):
        return F.linear(y, weight, bias)
    out: Tensor = _FromOrigin.apply(y, weight, bias, True, origin)
    return out


def linear_in_out(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same with the weight stored as (I, O): the Conv1D of Hugging Face's GPT-2."""
    origin = origin_of(y)
    if origin is None or not weight.requires_grad or not plain(weight, bias):
        return _in_out(y, weight, bias)
    out: Tensor = _FromOrigin.apply(y, weight, bias, False, origin)
    return out


class Linear(nn.Linear):
    """nn.Linear that keeps no input which can be computed again."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _in_out(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, _rows(y), weight).view(*y.shape[:-1], weight.shape[1])


def _rows(t: Tensor) -> Tensor:
    """(..., N) -> (rows, N), also of an empty tensor, for which reshape(-1, N) has no answer."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


class _FromOrigin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None, out_in: bool, origin: Origin) -> Tensor:
        # Not the origin itself: ctx would hold its tensors past the backward that frees the saved ones.
        ctx.save_for_backward(weight, *origin.tensors)
        ctx.function, ctx.casts, ctx.copied, ctx.shared = origin.function, origin.casts, origin.copied, origin.shared
        origin.shared.add_reader()
        ctx.out_in, ctx.dtype, ctx.bias_dtype = out_in, y.dtype, None if bias is None else bias.dtype
        if out_in:
            return F.linear(y, weight, bias)
        assert bias is not None
        return _in_out(y, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        needs_y, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_y = d_weight = d_bias = None
        with without_autocast(grad.device.type):
            rows = _rows(grad)
            if needs_weight:
                y = _rows(_input_again(ctx, tuple(tensors)).to(grad.dtype))
                d_weight = (rows.t() @ y if ctx.out_in else y.t() @ rows).to(weight.dtype)
                del y  # before dy, which is as large
            if needs_bias:
                d_bias = rows.sum(0).to(ctx.bias_dtype)
            if needs_y:
                w = weight.to(grad.dtype) if ctx.out_in else weight.to(grad.dtype).t()
                d_y = (rows @ w).view(*grad.shape[:-1], w.shape[1]).to(ctx.dtype)
        return d_y, d_weight, d_bias, None, None


def _input_again(ctx: Any, tensors: tuple[Tensor | None, ...]) -> Tensor:
    if torch.is_grad_enabled():  # this backward will be differentiated: y needs a graph of its own
        return compute_again(ctx.function, ctx.casts, tensors, ctx.copied)
    shared: Shared = ctx.shared
    return shared.serve(lambda: compute_again(ctx.function, ctx.casts, tensors, ctx.copied))
