"""Normalisations. Over a dimension that is cut, mean and variance are sums over ranks, of one number per row."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.schedule.sharding.layout import WHOLE
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.values import Called, Value

_NARROW = (torch.bfloat16, torch.float16)


@rule("layer_norm", "rms_norm")
def layer_norm(p: Program, call: Called) -> Any:
    x = p.reduced(call.first)
    weight, bias, shape = call.get("weight"), call.get("bias"), call.get("normalized_shape")
    if x.cut is None:
        if all(value is None or value.is_whole for value in (weight, bias)):
            return p.again(call, WHOLE, p.reduced)
        return _composed(p, call, x, weight, bias)
    if x.cut.dim >= x.dim - len(shape) or any(v is not None and not v.is_whole for v in (weight, bias)):
        return _composed(p, call, x, weight, bias)
    return p.again(call, x.cut, lambda value: p.entered(p.reduced(value)))


def _composed(p: Program, call: Called, x: Value, weight: Value | None, bias: Value | None) -> Value:
    """From sums, each by its own rule; in float32 where torch computes in it."""
    dims = tuple(range(-len(call.get("normalized_shape")), 0))
    dtype = x.example.dtype
    wide = p.call("float", x) if dtype in _NARROW else x
    eps = call.get("eps", 1e-5 if call.name == "layer_norm" else None)
    eps = torch.finfo(wide.example.dtype).eps if eps is None else eps
    if call.name == "layer_norm":
        wide = p.call(torch.sub, wide, p.reduced(p.call(torch.mean, wide, dims, keepdim=True)))
    square = p.reduced(p.call(torch.mean, p.call(torch.mul, wide, wide), dims, keepdim=True))
    found = p.call(torch.mul, wide, p.call(torch.rsqrt, p.call(torch.add, square, eps)))
    found = found if weight is None else p.call(torch.mul, found, weight)
    found = found if bias is None else p.call(torch.add, found, bias)
    return found if found.example.dtype == dtype else p.call("to", found, dtype)


@rule("batch_norm", "group_norm", "instance_norm")
def channel_norm(p: Program, call: Called) -> Any:
    """Statistics per channel: channels may be cut where no running statistics are kept."""
    x = p.reduced(call.first)
    cut = x.cut
    if call.name != "batch_norm" or cut is None or cut.dim != 1 or call.get("running_mean") is not None:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    return p.again(call, cut, lambda value: value if value.cut is not None else p.part(value, cut.at(0)))
