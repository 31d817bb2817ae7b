"""Element by element, with broadcasting: operands that are whole give their part, or are entered where they are spread out."""

from __future__ import annotations

import math
from typing import Any

from wholestep.schedule.sharding.layout import PARTIAL, WHOLE, Cut
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import ELEMENTWISE, rule
from wholestep.schedule.sharding.values import Called, Value

_LINEAR = ("neg", "positive", "clone")
"""Of one operand, and exact for a partial sum."""


@rule(
    ELEMENTWISE, "floor_divide", "where", "masked_fill", "logsigmoid", "log_sigmoid", "tanhshrink", "softsign", "hardswish", "copy",
    "lerp", "isclose", "float_power",
)  # fmt: skip
def elementwise(p: Program, call: Called) -> Any:
    partial = _kept_partial(p, call)
    if partial is not None:
        return partial
    call = p.with_values(call, p.reduced)
    tensors = call.values
    rank = max(value.dim for value in tensors)
    cut = agreed(p, tensors, rank)
    if cut is None:
        return p.again(call, layout=tensors[0].layout)
    if call.writes and call.first.cut is None:
        p.refuse(f"a whole value is changed in place by one that is {cut}", "compute a new value instead")
    return p.again(call, cut, lambda value: local(p, value, cut, rank))


def agreed(p: Program, values: list[Value], rank: int) -> Cut | None:
    """The cut of the result of broadcasting, in which all cut operands have to agree."""
    found: Cut | None = None
    holder: Value | None = None
    for value in values:
        if value.cut is None:
            continue
        cut = value.cut.at(value.cut.dim + rank - value.dim)
        if found is None or holder is None:
            found, holder = cut, value
        elif cut.dim != found.dim:
            one, other = f"{holder.cut}{p.because(holder)}", f"{value.cut}{p.because(value)}"
            p.refuse(f"one input is {one}, another {other}", p.gather_hint(value))
        elif not cut.like(found):
            few, many = (value, found) if len(cut.blocks) < len(found.blocks) else (holder, cut)
            text = f"its inputs are cut in other blocks: {cut.blocks[:6]} and {found.blocks[:6]}"
            p.recut(few, many.blocks, text, "cut both parameters in the same blocks: blocks=")
    return found


def local(p: Program, value: Value, cut: Cut, rank: int) -> Value:
    """An operand for a result with this cut: its part, or, where it has nothing along that dimension, all of it."""
    if value.cut is not None:
        return value
    dim = cut.dim - (rank - value.dim)
    if dim >= 0 and value.shape[dim] != 1:
        return p.part(value, cut.at(dim))
    return p.entered(value)


def _kept_partial(p: Program, call: Called) -> Any:
    """A partial sum stays one through linear arithmetic; None where it has to be summed up before."""
    plain, values = call.name.removesuffix("_"), call.values
    if call.writes or not any(value.is_partial for value in values):
        return None
    if plain in ("add", "sub", "iadd", "isub") and len(values) == 2 and all(value.is_partial for value in values):
        return p.again(call, PARTIAL) if values[0].example.dtype == values[1].example.dtype else None
    if plain in _LINEAR and len(values) == 1:
        return p.again(call, PARTIAL)
    scaled = plain == "mul" or (plain == "div" and call.get("self") in values and call.get("self").is_partial)
    others = [value for value in values if not value.is_partial]
    if not scaled or len(values) - len(others) != 1 or any(not value.is_whole for value in others):
        return None
    grows = math.prod(call.result or ()) > math.prod(next(value.shape for value in values if value.is_partial))
    return None if grows else p.again(call, PARTIAL, p.entered)


@rule(
    "contiguous",
    "detach",
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "bool",
    "cpu",
    "data",
)
def converted(p: Program, call: Called) -> Any:
    """In another type, device or memory order. A partial sum is summed up before it is rounded, or would be."""
    x = call.first
    if not x.is_partial:
        return p.again(call, x.layout)
    dtype = p.again(call, PARTIAL)
    if dtype.example.dtype == x.example.dtype:
        return dtype
    p.graph.erase_node(dtype.node)
    return p.again(call, WHOLE, p.reduced)


@rule("zeros_like", "ones_like", "full_like", "empty_like", "zero_", "fill_")
def constant(p: Program, call: Called) -> Any:
    """The same number everywhere."""
    x = call.first
    if len(call.values) != 1 or (call.writes and x.is_partial):
        p.refuse_cut(call.name, x)
    return p.again(call, WHOLE if x.is_partial else x.layout)


@rule("prelu")
def prelu(p: Program, call: Called) -> Any:
    """One slope, or one per channel (dimension 1)."""
    x, weight = p.reduced(call.first), p.reduced(call.at(1))
    if x.cut is None or weight.cut is not None:
        p.refuse_cut("prelu", weight)
    if weight.shape == (1,) or x.cut.dim != 1:
        return p.emit(call.target, x, p.entered(weight), layout=x.cut)
    return p.emit(call.target, x, p.part(weight, x.cut.at(0)), layout=x.cut)
