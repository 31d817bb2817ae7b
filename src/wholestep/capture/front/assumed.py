"""Branches on data of which one side is the exception: the graph takes the other side, and computes whether it may.

`if not valid.all(): raise ValueError(...)`, `assert (x > 0).all()`: torch.distributions validates its arguments so, and so do
people; `if mask.sum() == 0: return ...` is written for the batch in which nothing is masked. Dynamo cannot follow a branch on
data. Here it goes on where nothing is raised and no mask is empty, and a mark in its graph holds the condition. A captured
step computes all of them; where one does not hold the step changes nothing, and eager PyTorch takes it: which raises what it
raises, at its line, in its words, or goes on the other way.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo import symbolic_convert
from torch._dynamo.variables import SymNodeVariable, TensorVariable, builder
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wholestep import compat
from wholestep.capture.front import traced as marks

assuming = threading.local()
"""`assuming.on`: whether a capture is ours, and marks are honoured; `assuming.addressed`: what guards compare by address."""

_DISTRIBUTIONS = os.path.dirname(torch.distributions.__file__) + os.sep
_MOST_INSTRUCTIONS = 500
"""Of a branch that raises: its message is made in some dozens."""
_JUMPS = {
    "POP_JUMP_IF_TRUE": True, "POP_JUMP_FORWARD_IF_TRUE": True, "POP_JUMP_BACKWARD_IF_TRUE": True,
    "POP_JUMP_IF_FALSE": False, "POP_JUMP_FORWARD_IF_FALSE": False, "POP_JUMP_BACKWARD_IF_FALSE": False,
}  # fmt: skip
"""Instruction -> the truth at which it jumps; names differ between versions of Python."""


def _branch(jumps_at: bool, plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Dynamo's handler of a conditional jump, and ours before it."""

    def branch(tx: Any, inst: Any) -> None:
        truth = _assumed_truth(tx, inst, jumps_at) if getattr(assuming, "on", False) else None
        if truth is None:
            return plain(tx, inst)
        tx.output.create_proxy("call_function", marks.mark_assumed, (tx.pop().as_proxy(), truth), {})
        if truth == jumps_at:
            tx.jump(inst)
        return None

    return branch


def _assumed_truth(tx: Any, inst: Any, jumps_at: bool) -> bool | None:
    """What a condition on data is taken to be; None where it is none, or nothing speaks for either side."""
    value = tx.stack[-1].realize()
    if not _is_data(value):
        return None
    jump_raises, next_raises = _always_raises(tx, tx.indexof[inst.target]), _always_raises(tx, tx.instruction_pointer)
    if jump_raises != next_raises:
        return jumps_at if next_raises else not jumps_at
    if isinstance(value, SymNodeVariable):
        return _number_is_likely(value.sym_num, value.as_proxy().node)
    return _tensor_is_likely(value.as_proxy().node, in_validation=tx.f_code.co_filename.startswith(_DISTRIBUTIONS))


def _number_is_likely(number: Any, node: fx.Node) -> bool | None:
    """Where it is asked whether a count that only data tells is zero, or just one or two: it is not."""
    read = node.args[0] if node.target in (operator.eq, operator.ne) and node.args[1] == 1 else None
    if isinstance(read, fx.Node) and read.target == "item":  # bool(tensor)
        likely = _tensor_is_likely(read.args[0], in_validation=False)
        return likely if likely is None or node.target is operator.eq else not likely
    symbols, expression = free_unbacked_symbols(number), number.node.expr
    counts = all(number.node.shape_env.var_to_range[symbol].upper > 1 and symbol.is_integer for symbol in symbols)
    if not counts or not _asks_for_few(expression) or expression.free_symbols - symbols:
        return None
    found = expression.xreplace(dict.fromkeys(symbols, sympy.Integer(compat.MANY)))
    return found not in (sympy.false, sympy.Integer(0))


def _asks_for_few(expression: Any) -> bool:
    """`n`, `a - b == 0`, `n <= 1`."""
    if not isinstance(expression, sympy.Rel):
        return bool(expression.is_symbol)
    number, bound = expression.args[::-1] if expression.lhs.is_Integer else expression.args
    return bool(bound.is_zero or (number.is_symbol and bound.is_Integer and 0 <= bound <= _FEW))


_FEW = 2


def _tensor_is_likely(node: fx.Node, *, in_validation: bool) -> bool | None:
    """`mask.any()`, `mask.sum() == 0` and the like ask whether a mask has any or a few places: it has more. Numbers are finite."""
    name = _name(node).strip("_")  # `__eq__` in torch 2.11
    if name in _FINITE:
        return _FINITE[name]
    if name in ("any", "all"):
        finite = _FINITE.get(_name(node.args[0]))
        if finite is not None or name == "any":
            return finite is not False
        # `if not symmetric.all(): return symmetric`: what is not valid is told, and raised about by the caller
        return True if in_validation else None
    if name in _COMPARES and len(node.args) == 2 and node.args[1] in range(_FEW + 1):
        return getattr(operator, name)(compat.MANY, node.args[1]) if _is_count(node.args[0]) else None
    return True if _is_count(node) else None


_COMPARES = ("eq", "ne", "gt", "ge", "lt", "le")
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}


def _name(node: Any) -> str:
    target = getattr(node, "target", "")
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _is_count(node: Any) -> bool:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return _name(node) in ("sum", "count_nonzero") and isinstance(value, torch.Tensor) and value.dtype == torch.int64


def _is_data(value: Any) -> bool:
    """A tensor of one entry, or a number that was read from one."""
    if isinstance(value, TensorVariable):
        example = value.as_proxy().node.meta.get("example_value")
        return isinstance(example, torch.Tensor) and all(isinstance(n, int) and n == 1 for n in example.shape)
    return isinstance(value, SymNodeVariable) and bool(free_unbacked_symbols(value.sym_num))


def _always_raises(tx: Any, index: int) -> bool:
    """Whether every way from an instruction ends in `raise`."""
    seen: set[int] = set()
    ways = [index]
    while ways:
        at = ways.pop()
        if at in seen:
            continue
        seen.add(at)
        if at >= len(tx.instructions) or len(seen) > _MOST_INSTRUCTIONS:
            return False
        inst = tx.instructions[at]
        if inst.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if inst.opname.startswith(("RETURN", "YIELD")):
            return False
        if inst.target is not None:
            ways.append(tx.indexof[inst.target])
        if not inst.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "JUMP_NO_INTERRUPT")):
            ways.append(at + 1)
    return True


def follow_instruction(name: str, make: Callable[[Callable[[Any, Any], None]], Callable[[Any, Any], None]]) -> None:
    """Put a handler, made from Dynamo's own, into the tables of every class of Dynamo's that walks through instructions."""
    base = symbolic_convert.InstructionTranslatorBase
    if not hasattr(base, name):
        return
    handler = make(getattr(base, name))
    setattr(base, name, handler)
    opcode = symbolic_convert.dis.opmap.get(name)
    kinds = [base] if opcode is not None else []
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        kind.dispatch_table[opcode] = handler


def _for_many(plain: Callable[..., Any]) -> Callable[..., Any]:
    def get_fake_value(node: fx.Node, tx: Any, *args: Any, **options: Any) -> Any:
        if not getattr(assuming, "on", False):
            return plain(node, tx, *args, **options)
        with compat.counts_are_large(tx.fake_mode):
            return plain(node, tx, *args, **options)

    return get_fake_value


builder.get_fake_value = _for_many(builder.get_fake_value)  # what an operator gives, for tensors without data
for _jump, _jumps_at in _JUMPS.items():
    follow_instruction(_jump, functools.partial(_branch, _jumps_at))
