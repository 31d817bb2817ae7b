"""Looking at who an object is (`is`, `==`, `id`, keys of dictionaries): no guard of a layer tells what would be seen in another.

In: what Dynamo does while it captures for us. Out: `looked.times`, by which a trace can tell whether it depends on that.
"""

from __future__ import annotations

import operator
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    LazyVariableTracker,
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
)

from wholestep.capture.front import mends
from wholestep.capture.front.assumed import assuming, follow_instruction
from wholestep.capture.front.distinct import keep_two


class _Looked(threading.local):
    times = 0


looked = _Looked()
"""How often an object was looked at by its identity, in this thread."""

_OBJECTS = (UnspecializedNNModuleVariable, UserDefinedObjectVariable, UserFunctionVariable)
_PLAIN = (int, float, str, bytes, torch.Tensor, types.NoneType, type, types.BuiltinFunctionType)


def _is_object(value: Any) -> bool:
    if isinstance(value, LazyVariableTracker):
        if not value.is_realized():
            return not isinstance(value.original_value(), _PLAIN)
        value = value.realize()
    return isinstance(value, _OBJECTS)


def _note_compared(values: Sequence[Any]) -> None:
    """Two objects; which tensors are one and the same is found otherwise (`Pairs`)."""
    if getattr(assuming, "on", False) and not any(isinstance(v, ConstantVariable) for v in values):
        looked.times += any(map(_is_object, values))


def _note_asked(value: Any) -> None:
    if getattr(assuming, "on", False):
        looked.times += _is_object(value) or isinstance(value, TensorVariable)


def _comparing(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def compare(tx: Any, inst: Any) -> None:
        _note_compared(tx.stack[-2:])
        keep_two(tx.stack[-2:], _HOW[inst.opname])
        plain(tx, inst)

    return compare


def _noting_keys(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, vt: Any) -> None:
        _note_asked(vt)
        plain(self, vt)

    return init


_ASKS = (id, hash)
_COMPARES = {
    operator.is_: "is", operator.is_not: "is", operator.eq: "==", operator.ne: "==", operator.contains: "in",
}  # fmt: skip
_HOW = {"IS_OP": "is", "COMPARE_OP": "==", "CONTAINS_OP": "in"}


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in _ASKS:
            _note_asked(args[0])
        elif self.fn in _COMPARES and len(args) == 2:
            _note_compared(args)
            keep_two(args[::-1] if self.fn is operator.contains else args, _COMPARES[self.fn])
        return plain(self, tx, args, kwargs)

    return call


for _name in _HOW:
    follow_instruction(_name, _comparing)
mends.HashedVariable.__init__ = _noting_keys(mends.HashedVariable.__init__)  # a dictionary's key, a member of a set
BuiltinVariable.call_function = _calling(BuiltinVariable.call_function)
