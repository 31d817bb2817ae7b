"""Numbers of numpy, which Dynamo takes for arrays without dimensions, and arrays, which it takes for tensors.

What Python asks of them (`isinstance(x, float)`, `hasattr(x, "to")`, `torch.is_tensor(x)`) is answered by what they are. What kind
a result without dimensions has, only numpy tells: a question about it is refused by name. So are a number of numpy as a key, and
one that the loss keeps, which would be an array. Whole numbers that vary go into numpy by value: torch keeps 32 bits of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    LazyVariableTracker,
    ListVariable,
    NumpyNdarrayVariable,
    NumpyVariable,
    SymNodeVariable,
    TupleVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from wholestep import compat
from wholestep.capture.front.growing import growing


def _refuse(what: str) -> None:
    unimplemented(gb_type=f"{what}; make it a Python number: float(x)", context="", explanation="", hints=[])


def _wrapping(plain: Callable[..., Any]) -> Callable[..., Any]:
    def wrap(self: Any, value: Any) -> Any:
        made = plain(self, value)
        if isinstance(value, np.generic | np.ndarray) and getattr(growing, "on", False):
            self.install_guards(GuardBuilder.TYPE_MATCH)
            if isinstance(made, NumpyNdarrayVariable):
                made.__dict__["kind"] = type(value)
        return made

    return wrap


def _has_no_dimensions(value: NumpyNdarrayVariable) -> bool:
    return value.as_proxy().node.meta["example_value"].dim() == 0


def _kind(value: NumpyNdarrayVariable) -> type:
    kind = value.__dict__.get("kind")
    if kind is None and _has_no_dimensions(value):
        _refuse("it is asked what kind a result of numpy without dimensions has")
    return kind or np.ndarray


def _asking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not getattr(growing, "on", False) or self.fn not in _ANSWERS or len(args) not in (1, 2, 3) or kwargs:
            return plain(self, tx, args, kwargs)
        value = args[0].realize() if isinstance(args[0], LazyVariableTracker) else args[0]
        found = _ANSWERS[self.fn](tx, value, *args[1:]) if isinstance(value, NumpyNdarrayVariable) else None
        return plain(self, tx, args, kwargs) if found is None else found

    return call


def _type(tx: Any, value: Any, *_: Any) -> Any:
    kind = _kind(value)
    return NumpyVariable(kind) if compat.torch_version() < (2, 13) else VariableTracker.build(tx, kind)


def _isinstance(tx: Any, value: Any, classes: Any) -> Any:
    return VariableTracker.build(tx, issubclass(_kind(value), classes.as_python_constant()))


def _getattr(tx: Any, value: Any, name: Any, *default: Any) -> Any:
    """None leaves it to Dynamo."""
    if default and not hasattr(_kind(value), name.as_python_constant()):
        return default[0]
    return None


_ANSWERS: dict[Any, Callable[..., Any]] = {type: _type, isinstance: _isinstance, getattr: _getattr}


def _having(plain: Callable[..., Any]) -> Callable[..., Any]:
    def has(self: Any, tx: Any, name: str) -> Any:
        known = getattr(growing, "on", False)
        return VariableTracker.build(tx, hasattr(_kind(self), name)) if known else plain(self, tx, name)

    return has


def _hashing(plain: Callable[..., Any]) -> Callable[..., Any]:
    def hashed(self: Any, *args: Any) -> Any:
        if getattr(growing, "on", False) and _has_no_dimensions(self):
            _refuse("a number of numpy is a key")
        return plain(self, *args)

    return hashed


def _has_hash(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def is_hashable(self: Any) -> bool:
        return (getattr(growing, "on", False) and _has_no_dimensions(self)) or plain(self)

    return is_hashable


def _leaving(plain: Callable[..., int]) -> Callable[..., int]:
    def add(self: Any, value: Any) -> int:
        if isinstance(value, NumpyNdarrayVariable) and getattr(growing, "on", False) and _has_no_dimensions(value):
            _refuse("a number of numpy is kept or returned by the loss")
        return plain(self, value)

    return add


def _whole_by_value(variable: Any) -> Any:
    variable = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    if isinstance(variable, SymNodeVariable) and variable.python_type() is int:
        return ConstantVariable.create(variable.evaluate_expr())
    if isinstance(variable, ListVariable | TupleVariable):
        return variable.clone(items=[*map(_whole_by_value, variable.items)])
    return variable


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if getattr(growing, "on", False):
            args, kwargs = [*map(_whole_by_value, args)], {k: _whole_by_value(v) for k, v in kwargs.items()}
        return plain(self, tx, args, kwargs)

    return call


def _of_tensors(plain: Callable[..., Any]) -> Callable[..., Any]:
    def handle(self: Any, tx: Any, value: Any) -> Any:
        if getattr(growing, "on", False) and isinstance(value.realize(), NumpyNdarrayVariable):
            return VariableTracker.build(tx, False)
        return plain(self, tx, value)

    return handle


VariableBuilder._wrap = _wrapping(VariableBuilder._wrap)
BuiltinVariable.call_function = _asking(BuiltinVariable.call_function)
NumpyNdarrayVariable.call_obj_hasattr = _having(NumpyNdarrayVariable.call_obj_hasattr)
NumpyVariable.call_function = _calling(NumpyVariable.call_function)
PyCodegen.add_graph_output = _leaving(PyCodegen.add_graph_output)
for _name, _around in (("hash_impl", _hashing), ("get_python_hash", _hashing), ("is_hashable", _has_hash)):
    if hasattr(NumpyNdarrayVariable, _name):  # names differ between versions of torch
        setattr(NumpyNdarrayVariable, _name, _around(getattr(NumpyNdarrayVariable, _name)))
_handlers = TorchInGraphFunctionVariable._get_handlers()
_handlers[torch.is_tensor] = _of_tensors(_handlers[torch.is_tensor])
