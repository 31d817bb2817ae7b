"""Normalisations. Over a dimension that is cut, mean and variance are sums over ranks, of one number per row."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

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


@rule("batch_norm", "instance_norm")
def channel_norm(p: Program, call: Called) -> Any:
    """Statistics per channel, and channels are cut: nothing is exchanged but running statistics, which are buffers and so whole."""
    x = p.reduced(call.first)
    cut = x.cut
    if cut is None or cut.dim != 1:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    running = [call.get(name) for name in ("running_mean", "running_var") if call.get(name) is not None]
    own = {value: p.part(p.reduced(value), cut.at(0)) for value in call.values if value.is_whole}
    found = p.again(call, cut, lambda value: own.get(value, p.reduced(value)))
    if call.get("training", call.name == "instance_norm") and call.get("use_input_stats", True):
        for value in running:
            p.emit("copy_", value, p.gathered(own[value], "running statistics are whole"), layout=WHOLE)
        p.made.clear()  # parts of what they were
    return found


@rule("group_norm")
def group_norm(p: Program, call: Called) -> Any:
    """Each rank has whole groups of channels."""
    x, groups = p.reduced(call.first), call.get("num_groups")
    cut = x.cut
    if cut is None or cut.dim != 1 or not cut.plain or not isinstance(groups, int) or groups % p.parts:
        p.refuse_cut(call.name, next(value for value in call.values if not value.is_whole))
    rest = {name: call.get(name) for name in ("weight", "bias") if call.get(name) is not None}
    rest = {
        name: value if value.cut is not None else p.part(p.reduced(value), cut.at(0)) for name, value in rest.items()
    }
    eps = call.get("eps", 1e-5)
    return p.emit(F.group_norm, x, groups // p.parts, **rest, eps=eps, layout=cut)
