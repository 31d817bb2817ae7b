"""Code that is in Dynamo's graph as one call: functions that it was told not to look into, derivatives of operators of one's own.

What such code reads has no guards, so it may read nothing that changes; what it is made of belongs to the hash of the graph.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from wholestep.capture.front.replay import user_line
from wholestep.capture.front.unguardable import is_users, what_it_reads, where_is
from wholestep.errors import CaptureRefused

_TORCHS_OWN = {"aten", "prims", "prim", "ws", "quantized", "_c10d_functional", "inductor", "higher_order", "profiler"}

Derivative = tuple[Any, Any, Any]
"""(an operator's definition, its derivative, what it keeps for it)."""


def derivatives(module: fx.GraphModule) -> list[Derivative]:
    """Of operators that were defined in Python."""
    names = {n.target._schema.name for n in module.graph.nodes if _is_others(n.target)}
    found = [definition for definition in map(OPDEFS.get, sorted(names)) if definition is not None]
    return [(definition, definition._backward_fn, definition._setup_context_fn) for definition in found]


def replaced(known: list[Derivative]) -> bool:
    """Whether an operator has another derivative now."""
    return any(d._backward_fn is not backward or d._setup_context_fn is not setup for d, backward, setup in known)


def _is_others(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _TORCHS_OWN


def refuse_opaque(module: fx.GraphModule) -> None:
    """Refuse code that is called without being traced, and reads what may change."""
    functions = [f for _, *both in derivatives(module) for f in both if f is not None]
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, types.FunctionType):
            functions.append(node.target)
            if node.target.__name__.startswith("flat_apply"):
                where = user_line(node.meta.get("stack_trace") or "")
                raise CaptureRefused("a function is traced without guards (nonstrict_trace)", where=where)
    for function in functions:
        name = what_it_reads(function)
        if name is not None:
            told = f"{function.__qualname__} is called without being traced, and reads {name}, which may change"
            raise CaptureRefused(told, where=where_is(function))


def written(function: Any, seen: frozenset[Any] = frozenset()) -> Iterator[str]:
    """What a function is made of, and functions of the user's own that it names."""
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return
    yield from _code(code)
    for name in code.co_names:
        other = function.__globals__.get(name)
        if isinstance(other, types.FunctionType) and is_users(other.__code__):
            yield from written(other, seen | {code})


def _code(code: types.CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield repr(constant)
