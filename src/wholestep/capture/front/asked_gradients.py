"""Tensors that the loss asks a gradient of: penalties on gradients, scores, derivatives by coordinates.

`x.requires_grad_()`, `x.requires_grad = True`, `torch.zeros(n, requires_grad=True)` and `Variable(x, requires_grad=True)` mean a
leaf of the loss's own to whoever differentiates within the loss. Dynamo traces the first of them, for values that the loss made
(since torch 2.13). A tensor that is the caller's is told behind the graph, as in eager; the loss goes on with a leaf of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstDictVariable,
    TensorVariable,
    UserFunctionVariable,
)
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.misc import DebuggingVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from wholestep import compat
from wholestep.capture.front.assumed import assuming, follow_instruction

TRACED = compat.torch_version() >= (2, 13)
"""Whether Dynamo traces `requires_grad_` of values that the loss made."""


def _method(self: Any, tx: Any, requires_grad: Any = True) -> Any:
    """TensorVariable.method_requires_grad_."""
    asked = requires_grad if requires_grad is True else requires_grad.as_python_constant()
    value = self.as_proxy().node.meta["example_value"]
    if not getattr(assuming, "on", False) or not value.is_leaf or value.requires_grad == asked:
        return _plain_method(self, tx, requires_grad)
    if self.source is not None:
        if asked is not True or issubclass(self.class_type, nn.Parameter) or not _differentiable(value):
            return _plain_method(self, tx, requires_grad)
        told = DebuggingVariable(None, source=AttrSource(self.source, "requires_grad_"))
        tx.output.root_tx.debug_locals.append((told, []))
        leaf = self.call_method(tx, "detach", [], {})
        self.proxy, self.requires_grad = leaf.method_requires_grad_(tx).as_proxy(), True
        return self
    if TRACED:
        return _plain_method(self, tx, requires_grad)
    proxy = self.as_proxy()
    tx.output.create_proxy("call_method", "requires_grad_", (proxy, asked), {})
    self.requires_grad = proxy.node.meta["example_value"].requires_grad_(asked).requires_grad
    return self


def _differentiable(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _store(plain: Any) -> Any:
    """`x.requires_grad = True`."""

    def store(tx: Any, inst: Any) -> None:
        if getattr(assuming, "on", False) and inst.argval == "requires_grad":
            wanted, value = tx.stack[-2].realize(), tx.stack[-1].realize()
            asked = wanted.is_python_constant() and wanted.as_python_constant() is True
            if asked and isinstance(value, TensorVariable) and value.requires_grad is False:
                value.method_requires_grad_(tx)
                tx.popn(2)
                return
        plain(tx, inst)

    return store


def _make(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`torch.zeros(n, requires_grad=True)`: made, then asked."""
    wanted = kwargs.get("requires_grad") if getattr(assuming, "on", False) else None
    if wanted is None or not wanted.is_python_constant() or wanted.as_python_constant() is not True:
        return _plain_make(self, tx, args, kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "requires_grad"}
    made = _plain_make(self, tx, args, rest)
    return made.method_requires_grad_(tx) if isinstance(made, TensorVariable) else _plain_make(self, tx, args, kwargs)


def _variable(data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """torch.autograd.Variable: the tensor itself, cut off from what made it."""
    made = data.detach()
    return made.requires_grad_() if requires_grad else made


def _construct(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """A call of a class."""
    if self.value is torch.autograd.Variable and getattr(assuming, "on", False) and (args or "data" in kwargs):
        return tx.inline_user_function_return(UserFunctionVariable(_variable), list(args), kwargs)
    return _plain_construct(self, tx, args, kwargs)


def _of_any(plain: Any) -> Any:
    """Dynamo's handler of torch.autograd.grad, which knows tensors in lists and tuples alone; torch itself makes tuples of
    what yields them: `model.parameters()`, `fast.values()`."""

    def listed(tx: Any, value: Any) -> Any:
        known = value.realize()
        if isinstance(known, TensorVariable | BaseListVariable | ConstDictVariable) or known.is_python_constant():
            return value
        return BuiltinVariable(tuple).call_function(tx, [value], {})

    def handle(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(assuming, "on", False):
            return plain(self, tx, *args, **kwargs)
        named = {name: listed(tx, value) for name, value in kwargs.items()}
        return plain(self, tx, *(listed(tx, value) for value in args), **named)

    return handle


_plain_method, _plain_make = TensorVariable.method_requires_grad_, TorchInGraphFunctionVariable.call_function
_plain_construct = UserDefinedClassVariable.call_function
TensorVariable.method_requires_grad_ = _method
TorchInGraphFunctionVariable.call_function = _make
UserDefinedClassVariable.call_function = _construct
_handlers = TorchInGraphFunctionVariable._get_handlers()
if torch.autograd.grad in _handlers:  # since torch 2.13
    _handlers[torch.autograd.grad] = _of_any(_handlers[torch.autograd.grad])
follow_instruction("STORE_ATTR", _store)
