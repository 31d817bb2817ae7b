"""Sums, means, maxima, softmax: over a cut dimension they are sums or maxima over ranks, over others local."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.schedule.sharding.layout import PARTIAL, WHOLE, Cut
from wholestep.schedule.sharding.program import Program
from wholestep.schedule.sharding.registry import rule
from wholestep.schedule.sharding.rules.elementwise import elementwise
from wholestep.schedule.sharding.values import Called, Value

_NOT_SECOND = ("norm", "vector_norm", "linalg_vector_norm", "normalize", "softmax", "log_softmax")
"""Whose second argument is no dimension, or has its name in any case."""


def reduced_dims(call: Called, x: Value) -> list[int]:
    """The dimensions that a call reduces; all of them, unless it says so."""
    given = call.get("dim", call.get("axis"))
    if given is None and call.name not in _NOT_SECOND and len(call.args) > 1 and not isinstance(call.args[1], bool):
        given = call.args[1]  # x.max(0), x.std(-1), whose names depend on the types of what is given
    if given is None or (isinstance(given, tuple | list) and not given):
        return list(range(x.dim))
    return [dim % x.dim for dim in (given if isinstance(given, tuple | list) else (given,))]


def lands(x: Value, dims: list[int], keep: bool) -> int:
    """Where the dimension that is cut is, when others are gone."""
    assert x.cut is not None
    return x.cut.dim - (0 if keep else sum(dim < x.cut.dim for dim in dims))


def _keeps(call: Called) -> bool:
    return bool(call.get("keepdim", False))


@rule("sum", "mean")
def total(p: Program, call: Called) -> Any:
    x = call.first
    dims, keep, dtype = reduced_dims(call, x), _keeps(call), call.get("dtype")
    if x.is_partial:
        if dtype is not None and dtype != x.example.dtype:
            return p.again(call, WHOLE, p.reduced)
        return p.again(call, PARTIAL)
    if x.cut.dim not in dims:
        return p.again(call, x.cut.at(lands(x, dims, keep)))
    local = p.again(call, PARTIAL)
    return p.emit(torch.div, local, p.parts, layout=PARTIAL) if call.name == "mean" else local  # parts are equal


@rule("amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "prod", "var", "std", "var_mean", "norm", "logsumexp",
      "softmax", "log_softmax", "normalize", "vector_norm", "linalg_vector_norm", "count_nonzero", "median")  # fmt: skip
def reduction(p: Program, call: Called) -> Any:
    """Over a cut dimension: softmax and its kin, and a maximum that needs no gradient."""
    x = p.reduced(call.first)
    if len(call.values) > 1:
        return elementwise(p, call)  # torch.max(x, y)
    if x.cut is None:
        return p.again(call, WHOLE, p.reduced)
    dims, keep = reduced_dims(call, x), _keeps(call)
    if call.name == "normalize" and "dim" not in call.arguments:
        dims = [1]
    same_shape = call.name in ("softmax", "log_softmax", "normalize")
    if x.cut.dim not in dims:
        return p.again(call, x.cut.at(lands(x, dims, keep or same_shape)), p.reduced)
    if call.name in ("softmax", "log_softmax") and isinstance(call.get("dim"), int):
        return softmax_over_ranks(p, x, x.cut.dim, call.get("dtype"), log=call.name == "log_softmax")
    if call.name == "logsumexp":
        found = log_sum_exp(p, x, x.cut.dim) if len(dims) == 1 else p.refuse_cut(call.name, x)
        return found if keep else p.call(torch.squeeze, found, x.cut.dim)
    if call.name == "amax" and not x.learns:
        return p.largest(p.emit(torch.amax, x, dims, keep, layout=WHOLE))
    if call.name == "amin" and not x.learns:
        return p.call(torch.neg, p.largest(p.emit(torch.amax, p.call(torch.neg, x), dims, keep, layout=WHOLE)))
    if call.name == "argmax" and dims == [x.cut.dim] and x.cut.plain:
        return _first_largest(p, x, x.cut, keep)
    return p.refuse_cut(f"{call.name} over it", x)


def _first_largest(p: Program, x: Value, cut: Cut, keep: bool) -> Value:
    """The place of the largest along a cut dimension: of the ranks that have it, the first."""
    free = p.call("detach", x)
    value, place = p.emit(torch.max, free, cut.dim, keep, layout=WHOLE)
    first = p.emit(torch.mul, p.rank(), cut.size // p.parts, layout=WHOLE)
    place = p.emit(torch.add, place, first, layout=WHOLE)
    here = p.emit(torch.eq, value, p.largest(value), layout=WHOLE)
    here = p.emit(torch.logical_or, here, p.emit(torch.isnan, value, layout=WHOLE), layout=WHOLE)  # as torch has it
    back = p.emit(torch.where, here, p.emit(torch.neg, place, layout=WHOLE), -cut.size, layout=WHOLE)
    return p.call(torch.neg, p.largest(back))


def log_sum_exp(p: Program, x: Value, dim: int) -> Value:
    """log(sum(exp(x))) over a cut dimension, which stays with size 1; whole."""
    largest = peak(p, x, dim)
    terms = p.call(torch.exp, p.call(torch.sub, x, largest))
    return p.call(torch.add, p.call(torch.log, p.call(torch.sum, terms, dim, keepdim=True)), largest)


def peak(p: Program, x: Value, dim: int) -> Value:
    """The maximum over a cut dimension, without a gradient: what it is subtracted from does not depend on it."""
    free = p.call("detach", x)
    return p.largest(p.emit(torch.amax, free, [dim], True, layout=WHOLE))


def softmax_over_ranks(p: Program, x: Value, dim: int, dtype: torch.dtype | None, *, log: bool) -> Value:
    x = x if dtype is None else p.call("to", x, dtype)
    if log:
        return p.call(torch.sub, x, log_sum_exp(p, x, dim))
    terms = p.call(torch.exp, p.call(torch.sub, x, peak(p, x, dim)))
    return p.call(torch.div, terms, p.call(torch.sum, terms, dim, keepdim=True))
