"""What a call in a graph of torch functions computes, whichever way it was written: a node in, a name and named arguments out.

`x + b`, `torch.add(x, b)` and `x.add(b)` are one call, `add(self=x, other=b)`; arguments that are as by default are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

COMMUTES = frozenset(
    ("add", "mul", "maximum", "minimum", "eq", "ne", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
     "bitwise_xor")
)  # fmt: skip
"""Calls of two operands whose order does not matter, bit for bit."""
_OPERATORS = {
    "truediv": "div", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_", "ipow": "pow_", "and_": "bitwise_and",
    "or_": "bitwise_or", "xor": "bitwise_xor", "imatmul": "matmul_", "invert": "bitwise_not", "iand": "bitwise_and_",
    "ior": "bitwise_or_", "ixor": "bitwise_xor_", "mod": "remainder", "imod": "remainder_", "floordiv": "floor_divide",
    "ifloordiv": "floor_divide_", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "pos": "positive",
    "ilshift": "bitwise_left_shift_", "irshift": "bitwise_right_shift_",
}  # fmt: skip
_SAME = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "__matmul__": "matmul", "__add__": "add",
    "__radd__": "add", "__mul__": "mul", "__rmul__": "mul",
}  # fmt: skip
_STATE = ("_enter_", "_exit_", "_set_grad_enabled", "set_grad_enabled", "mark_cudnn", "_saved_tensors_hooks")
"""Calls that change how those after them compute."""
_TORCH = (
    "torch",
    "torch.functional",
    "torch.nn.functional",
    "torch._tensor",
    "torch._VF",
    "torch.special",
    "torch.linalg",
    "math",
)
"""Modules whose functions are torch's, or plain arithmetic."""
_LISTS = ("size", "dims", "repeats", "shape")
"""Arguments that a method also takes one by one: `x.view(2, -1)`."""
_ATTRIBUTES = ("T", "mT", "H", "mH", "real", "imag")
"""Attributes of a tensor that are computed from it."""
_IRRELEVANT = ("_stacklevel",)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One call."""

    name: str
    arguments: dict[str, Any]
    """By name; values are nodes or constants."""
    opaque: bool = False
    """Whether it is somebody's own, of which nothing is known: it may write to whatever it is given."""

    @property
    def commutes(self) -> bool:
        return self.name in COMMUTES and self.arguments.keys() == {"self", "other"}

    @property
    def writes(self) -> bool:
        """Whether it changes a tensor in place, or may."""
        in_place = self.name.endswith("_") and not self.name.endswith("__")
        known = in_place or self.name == "setitem" or bool(self.arguments.get("inplace")) or "out" in self.arguments
        return known or self.opaque

    @property
    def sets_state(self) -> bool:
        return self.name.rpartition(".")[2].startswith(_STATE)


def call_of(node: fx.Node) -> Call | None:
    """The call that a node makes; None for inputs, outputs and attributes."""
    if node.op not in ("call_method", "call_function"):
        return None
    return call_to(node.target, node.args, dict(node.kwargs))


def call_to(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call of a function, or of a method by its name."""
    if isinstance(target, str):
        plain = target.removeprefix("__").removesuffix("__")
        written = _OPERATORS.get(plain, _OPERATORS.get(f"{plain}_", target)) if plain != target else target
        name: str = _SAME.get(target, written)
        return Call(name, _bound(name, None, args, kwargs))
    if target is getattr and len(args) == 2 and args[1] in _ATTRIBUTES:
        return Call(args[1], {"self": args[0]})
    name, opaque = _named(target)
    return Call(name, _bound(name, target if inspect.isfunction(target) else None, args, kwargs), opaque)


def _named(target: Any) -> tuple[str, bool]:
    """The name of a function, and whether it is opaque. Only torch's own go by their short names: `mine::gelu` is another one."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        overloads = [target] if isinstance(target, OpOverload) else [getattr(target, o) for o in target.overloads()]
        space, _, name = str(overloads[0]._schema.name).partition("::")
        return name if space == "aten" else f"{space}::{name}", any(one._schema.is_mutable for one in overloads)
    name, module = getattr(target, "__name__", str(target)), getattr(target, "__module__", None) or "torch"
    if module in ("_operator", "operator"):
        name = _OPERATORS.get(name, name)
    elif not (module in _TORCH or module.startswith("torch._C")):
        return f"{module}.{name}", not module.startswith("wholestep.")
    return _SAME.get(name, name), False


def _bound(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, without those that are as by default."""
    for parameters in _signatures(name, function):
        given = _bind(parameters, args, kwargs)
        if given is not None:
            defaults = dict(parameters)
            found = {n: _plain(v) for n, v in given.items() if n not in _IRRELEVANT}
            return {n: v for n, v in found.items() if n not in defaults or not same(v, defaults[n])}
    return {str(i): _plain(v) for i, v in enumerate(args)} | {n: _plain(v) for n, v in kwargs.items()}


_REQUIRED = object()


@functools.lru_cache(maxsize=4096)
def _signatures(name: str, function: Any) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Possible lists of (parameter, default): of a Python function its own, else those of the operator of that name."""
    if function is not None:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return ()
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            return ()
        return (tuple((_renamed(p.name), _REQUIRED if p.default is p.empty else p.default) for p in parameters),)
    packet = getattr(torch.ops.aten, name, None) if not name.startswith("_") and name != "getitem" else None
    if packet is None or not hasattr(packet, "overloads"):
        return ()
    found = []
    for overload in packet.overloads():
        listed = getattr(packet, overload)._schema.arguments
        found.append(tuple((_schema_name(a), a.default_value if a.has_default_value() else _REQUIRED) for a in listed))
    return tuple(dict.fromkeys(map(tuple, found), None)) if _hashable(found) else tuple(found)


def _hashable(value: Any) -> bool:
    try:
        hash(tuple(value))
    except TypeError:
        return False
    return True


class _KeywordOnly(str):
    """The name of a parameter that is never given by its place: `x.sum(1)` is about a dimension, not a type."""


def _schema_name(argument: Any) -> str:
    name = _renamed(argument.name)
    return _KeywordOnly(name) if argument.kwarg_only else name


def _renamed(name: str) -> str:
    return "self" if name == "input" else name


def _bind(
    parameters: tuple[tuple[str, Any], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    names = [name for name, _ in parameters]
    if len(args) > sum(not isinstance(name, _KeywordOnly) for name in names) or (
        len(args) == 2 and len(names) > 1 and names[1] in _LISTS
    ):
        if len(names) < 2 or names[1] not in _LISTS or len(args) < 2:
            return None
        given = args[1:] if not isinstance(args[1], list | tuple) else args[1]
        args = (args[0], tuple(given))
    found = dict(zip(names, args))
    for name, value in kwargs.items():
        name = _renamed(name)
        if name not in names or name in found:
            return None
        found[name] = value
    missing = [name for name, default in parameters if default is _REQUIRED and name not in found]
    return None if missing else found


def _plain(value: Any) -> Any:
    """Lists, sizes and fx's own lists as tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value


def same(one: Any, other: Any) -> bool:
    """Whether two constants, or two values of a graph, are the same; 1 and True and 1.0 are not."""
    if isinstance(one, fx.Node) or isinstance(other, fx.Node):
        return one is other
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, slice) and isinstance(other, slice):
        return all(map(same, (one.start, one.stop, one.step), (other.start, other.stop, other.step)))
    if type(one) is float and type(other) is float:
        return one.hex() == other.hex()  # NaN is itself, and -0.0 is not 0.0: x + 0.0 and x + -0.0 differ
    return type(one) is type(other) and bool(one == other)
