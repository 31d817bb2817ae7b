"""Losses. Cross-entropy over a cut vocabulary: maxima and sums over ranks, one number per row; logits are never gathered."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from wholestep.schedule.sharding.layout import PARTIAL, WHOLE
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.rules.elementwise import elementwise
from wholestep.schedule.sharding.rules.embeddings import own_places
from wholestep.schedule.sharding.rules.reductions import log_sum_exp
from wholestep.schedule.sharding.values import Called, Value

_NARROW = (torch.bfloat16, torch.float16)


@rule("cross_entropy", "nll_loss")
def cross_entropy(p: Program, call: Called) -> Any:
    x, target, weight = p.reduced(call.first), call.get("target"), call.get("weight")
    classes = 1 if x.dim > 1 else 0
    if x.cut is None:
        return p.again(call, WHOLE, p.reduced)
    old = call.get("size_average") is not None or call.get("reduce") is not None
    if (
        x.cut.dim != classes
        or target.is_float
        or not target.is_whole
        or (weight is not None and not weight.is_whole)
        or old
    ):
        p.refuse_cut(f"{call.name} with anything but classes cut", x)
    dtype = x.example.dtype
    autocast = call.name == "cross_entropy" and torch.is_autocast_enabled(x.example.device.type)
    wide = p.call("float", x) if dtype in _NARROW else x
    rows = _per_row(p, call, wide, classes, target, weight)
    found = _averaged(p, call, *rows)
    return p.call("to", found, dtype) if dtype in _NARROW and not autocast else found


def _per_row(
    p: Program, call: Called, x: Value, classes: int, target: Value, weight: Value | None
) -> tuple[Value, Value]:
    """(the loss of every row, what it counts in the mean); 0 for rows that are ignored."""
    assert x.cut is not None
    ignored = p.emit(torch.eq, target, call.get("ignore_index", -100), layout=WHOLE)
    safe = p.emit("masked_fill", target, ignored, 0, layout=WHOLE)
    own, place = own_places(p, safe, x.cut)
    logit = p.emit(torch.gather, x, classes, p.emit("unsqueeze", place, classes, layout=WHOLE), layout=PARTIAL)
    logit = p.emit("squeeze", logit, classes, layout=PARTIAL)
    other = p.emit(torch.logical_not, own, layout=WHOLE)
    chosen = p.reduced(p.emit("masked_fill", logit, other, 0.0, layout=PARTIAL))
    counts = p.emit(torch.ones_like, chosen, layout=WHOLE, requires_grad=False)
    if weight is not None:
        counts = p.emit(operator.getitem, weight, (safe,), layout=WHOLE)
    counts = p.emit("masked_fill", counts, ignored, 0.0, layout=WHOLE)
    if call.name == "nll_loss":
        return p.call(torch.mul, p.call(torch.neg, chosen), counts), counts
    lse = p.call(torch.squeeze, log_sum_exp(p, x, classes), classes)
    rows = p.call(torch.mul, p.call(torch.sub, lse, chosen), counts)
    smoothing = call.get("label_smoothing", 0.0)
    if smoothing > 0:
        smooth = p.emit("masked_fill", _smooth(p, x, classes, lse, weight), ignored, 0.0, layout=WHOLE)
        share = p.call(torch.mul, smooth, smoothing / x.shape[classes])
        rows = p.call(torch.add, p.call(torch.mul, rows, 1.0 - smoothing), share)
    return p.emit("masked_fill", rows, ignored, 0.0, layout=WHOLE), counts


def _smooth(p: Program, x: Value, classes: int, lse: Value, weight: Value | None) -> Value:
    """sum over classes of weight * (lse - x)."""
    if weight is None:
        total = p.reduced(p.call(torch.sum, x, classes))
        return p.call(torch.sub, p.call(torch.mul, lse, float(x.shape[classes])), total)
    shaped = p.call(torch.reshape, weight, (-1, *([1] * (x.dim - 1 - classes))))
    total = p.reduced(p.call(torch.sum, p.call(torch.mul, x, shaped), classes))
    return p.call(torch.sub, p.call(torch.mul, lse, p.call(torch.sum, weight)), total)


def _averaged(p: Program, call: Called, rows: Value, counts: Value) -> Value:
    reduction = call.get("reduction", "mean")
    if reduction == "none":
        return rows
    total = p.call(torch.sum, rows)
    return total if reduction == "sum" else p.call(torch.div, total, p.call(torch.sum, counts))


@rule(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "binary_cross_entropy",
    "soft_margin_loss",
)  # fmt: skip
def by_element(p: Program, call: Called) -> Any:
    """A loss of every element, and their mean or sum."""
    if any(name in call.arguments for name in ("weight", "pos_weight", "size_average", "reduce")):
        p.refuse_cut(f"{call.name} with weights", next(value for value in call.values if not value.is_whole))
    arguments = {name: value for name, value in call.arguments.items() if name not in ("self", "target", "reduction")}
    x, target = p.reduced(call.first), p.reduced(call.get("target"))
    if x.shape != target.shape:
        p.refuse_cut(f"{call.name} of other shapes", x)
    function = getattr(F, call.name)
    one = Called(function, (x, target), {**arguments, "reduction": "none"}, call.name, {"self": x}, False, None)
    rows = elementwise(p, one)
    reduction = call.get("reduction", "mean")
    return rows if reduction == "none" else p.call(torch.mean if reduction == "mean" else torch.sum, rows)
