"""Code of the user's own that Dynamo would run itself while it traces, or pass over: refused by name.

- A class or a member of an enum is a constant to Dynamo, so `Settings["rate"]` and `len(Registry)` are computed once, for good,
  by the code that the class, its metaclass or the enum has for them.
- Numbers, texts, tuples, sets and members of enums are true as Python's own are, whatever `__bool__` their class has.
- `Config(...)` runs `__call__` of a metaclass of one's own, which Dynamo passes over, and `Mode("x")` runs `_missing_`, once.
- A property of a metaclass is computed by Dynamo, and again by every guard: it is traced; other descriptors there are refused.
- Annotations of functions, which Dynamo reads without a guard, are guarded.
- A function that is marked as constant for torch.compile (`assume_constant_result`) is none in eager: it is traced.
- An object that the loss makes is never made by a captured step, and made more than once by Dynamo: `__del__` would be counted.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, TypeSource
from torch._dynamo.variables import (
    BuiltinVariable,
    LazyVariableTracker,
    UserDefinedClassVariable,
    UserFunctionVariable,
    functions,
)
from torch._dynamo.variables.base import VariableTracker

from wholestep.capture.front.assumed import follow_instruction
from wholestep.capture.front.growing import growing
from wholestep.capture.front.unguardable import is_users, users_method, what_it_reads, where_is

_LOOKS = {"isinstance", "issubclass", "type", "getattr", "hasattr", "setattr", "super", "id", "callable"}
"""Builtin functions that ask a class for no operator; checks of instances are refused in `unguardable.py`."""
_OTHER_SIDE = {"ne": "eq", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "not": "bool"}
_WALKS = {"list", "tuple", "set", "sorted", "sum", "enumerate", "zip", "any", "all", "map", "max", "min"}
_JUDGED = (enum.Enum, int, float, str, bytes, tuple, set, frozenset)
_TRUTHS = (
    "POP_JUMP_IF_TRUE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_TRUE", "JUMP_IF_TRUE_OR_POP",
    "POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_BACKWARD_IF_FALSE", "JUMP_IF_FALSE_OR_POP",
    "UNARY_NOT", "TO_BOOL",
)  # fmt: skip
"""Instructions that ask whether a value is true, in all versions of Python."""


def _methods(function: Callable[..., Any]) -> Iterator[str]:
    """In which a builtin function, or an operator, may end."""
    name = getattr(function, "__name__", "").strip("_")
    yield from (f"__{name}__", f"__r{name}__")
    if name in _OTHER_SIDE:
        yield f"__{_OTHER_SIDE[name]}__"
    if name in _WALKS:
        yield from ("__iter__", "__getitem__")
    if name in ("str", "format"):
        yield from ("__str__", "__format__", "__repr__")


def _computed_once(function: Callable[..., Any], value: Any) -> types.FunctionType | None:
    """The method that Dynamo would run to fold a call of a builtin function with this constant."""
    if isinstance(value, type):
        found = [users_method(type(value), name) for name in _methods(function)]
        if "__getitem__" in _methods(function):
            found.append(users_method(value, "__class_getitem__"))
        return next(filter(None, found), None)
    if isinstance(value, enum.Enum):
        found = [users_method(type(value), name) for name in _methods(function)]
        return next((method for method in found if method is not None and what_it_reads(method)), None)
    return None


def _refuse(method: types.FunctionType, why: str) -> None:
    unimplemented(gb_type=f"{method.__qualname__} ({where_is(method)}) {why}", context="", explanation="", hints=[])


def _object(variable: Any) -> Any:
    """What Dynamo has before it, where that is an object that exists; None for all else."""
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return variable.peek_value()
        variable = variable.realize()
    return vars(variable).get("value")


def _folding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(growing, "on", False) and getattr(self.fn, "__name__", "") not in _LOOKS:
            for value in map(_object, args):
                method = _computed_once(self.fn, value) if isinstance(value, type | enum.Enum) else None
                if method is not None:
                    _refuse(method, "is code of a class or an enum, which is run once and not traced")
        return plain(self, tx, args, kwargs)

    return call


def _making(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(growing, "on", False):
            made = users_method(type(self.value), "__call__")
            if made is not None:
                _refuse(made, "makes the objects of a class and is not traced; make them outside of the loss")
            found = users_method(self.value, "_missing_") if issubclass(self.value, enum.Enum) else None
            if found is not None and what_it_reads(found):
                _refuse(found, "is code of an enum, which is run once and not traced")
            gone = users_method(self.value, "__del__")
            if gone is not None:
                _refuse(gone, "ends an object that the loss makes, and is not traced; make it outside of the loss")
        return plain(self, tx, args, kwargs)

    return call


def _judging(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Dynamo's handler of an instruction that asks whether a value is true."""

    def judge(tx: Any, inst: Any) -> None:
        if getattr(growing, "on", False):
            value = _object(tx.stack[-1])
            judged = users_method(type(value), "__bool__") if isinstance(value, _JUDGED) else None
            if judged is not None:
                _refuse(
                    judged, "says whether a number, text, tuple, set or member of an enum is true, and is not traced"
                )
        plain(tx, inst)

    return judge


def _following(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, fn: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, fn, *args, **kwargs)
        code = getattr(fn, "__code__", None)
        if self.is_constant and getattr(growing, "on", False) and code is not None and is_users(code):
            self.is_constant = False

    return init


def _of_a_metaclass(plain: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(self: Any, tx: Any, name: str, found: Any, source: Any) -> Any:
        method: Any = found.fget if isinstance(found, property) else users_method(type(found), "__get__")
        code = getattr(method, "__code__", None)
        if not getattr(growing, "on", False) or code is None or not is_users(code):
            return plain(self, tx, name, found, source)
        if not isinstance(found, property):  # told later: Dynamo catches what is raised while it looks into a class
            growing.stale = (
                f"{method.__qualname__} ({where_is(method)}) is a descriptor of a metaclass, and is not traced"
            )
            return plain(self, tx, name, found, source)
        place = None
        if self.source is not None:
            kinds = type(self.value).__mro__
            owner = next(i for i, kind in enumerate(kinds) if name in vars(kind))
            of_kind = GetItemSource(TypeMROSource(TypeSource(self.source)), owner)
            place = AttrSource(DictGetItemSource(TypeDictSource(of_kind), name), "fget")
        return VariableTracker.build(tx, method, place).call_function(tx, [self], {})

    return resolve


def _annotated(plain: Callable[..., Any]) -> Callable[..., Any]:
    def read(tx: Any, fn: Any, source: Any, name: str) -> Any:
        code = getattr(fn, "__code__", None)
        if (
            name == "__annotations__"
            and source
            and getattr(growing, "on", False)
            and code is not None
            and is_users(code)
        ):
            return VariableTracker.build(tx, fn.__annotations__, AttrSource(source, name))
        return plain(tx, fn, source, name)

    return read


UserFunctionVariable.__init__ = _following(UserFunctionVariable.__init__)
BuiltinVariable.call_function = _folding(BuiltinVariable.call_function)
for _table in (symbolic_convert.compare_op_handlers, vars(symbolic_convert)):  # bound before the line above
    for _name, _bound in list(_table.items()):
        if isinstance(_bound, types.MethodType) and isinstance(_bound.__self__, BuiltinVariable):
            _table[_name] = types.MethodType(BuiltinVariable.call_function, _bound.__self__)
if hasattr(UserDefinedClassVariable, "resolve_meta_data_descriptor"):
    from torch._dynamo.source import TypeDictSource, TypeMROSource

    UserDefinedClassVariable.resolve_meta_data_descriptor = _of_a_metaclass(
        UserDefinedClassVariable.resolve_meta_data_descriptor
    )
if hasattr(functions, "fn_var_getattr"):
    functions.fn_var_getattr = _annotated(functions.fn_var_getattr)
UserDefinedClassVariable.call_function = _making(UserDefinedClassVariable.call_function)
for _instruction in _TRUTHS:
    follow_instruction(_instruction, _judging)
