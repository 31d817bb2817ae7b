"""What neither Dynamo nor `Unguarded` can follow, refused by name: such a loss runs in eager PyTorch."""

from __future__ import annotations

import dis
import functools
import gc
import operator
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from wholestep.capture.modes import is_own_file
from wholestep.capture.subject import Subject
from wholestep.errors import CaptureRefused

_TENSOR = {**vars(torch._C.TensorBase), **vars(torch.Tensor)}
_OPERATORS = {name for name in vars(operator) if name.startswith("__")} - set(vars(object))
_OPERATORS |= {f"__r{name[2:]}" for name in _OPERATORS}
"""Methods that no code names: `a ** b`."""
_MENTIONED = {
    "backward": "backward() is called inside of the loss, which fills p.grad; return the sum of the losses",
    "mkldnn": "the loss reads torch.backends.mkldnn, which is switched off while it is traced; read it outside of the loss",
    "getrecursionlimit": "the loss reads Python's limit of recursion, which Dynamo takes for fixed",
}
"""A name in code of the user's own -> why it is refused."""


_TYPED = ("<stdin>", "<string>", "<console>", "<ipython-input", "<python-input", "<doctest")
"""What stands for a file where code was typed at a prompt, piped in, given to `python -c` or to `exec`."""


def is_users(code: types.CodeType) -> bool:
    return is_own_file(code.co_filename) or (code.co_filename.startswith(_TYPED) and not _of_a_dataclass(code))


def _of_a_dataclass(code: types.CodeType) -> bool:
    """Methods that `dataclasses` writes; Python 3.10 does not tell them from others of their names."""
    return getattr(code, "co_qualname", "__create_fn__" if code.co_name.startswith("__") else "").startswith(
        "__create_fn__"
    )


def users_method(owner: type, name: str) -> types.FunctionType | None:
    """The method of that name, where the user wrote it."""
    found = next((vars(cls)[name] for cls in owner.__mro__ if name in vars(cls)), None)
    found = getattr(found, "__func__", found)
    return found if isinstance(found, types.FunctionType) and is_users(found.__code__) else None


def is_users_class(cls: type) -> bool:
    return _is_own_module(cls.__module__)


@functools.lru_cache(maxsize=4096)  # asked of every object that was read
def _is_own_module(name: str) -> bool:
    if name in sys.builtin_module_names:  # they have no file, as what was typed at a prompt has none
        return False
    return is_own_file(getattr(sys.modules.get(name), "__file__", None) or "")


def refuse_surroundings() -> None:
    """Modes that the caller entered around the step, of which a captured one would not know."""
    if torch._C._len_torch_function_stack():
        modes = [mode for mode in torch.overrides._get_current_function_mode_stack() if type(mode) is not DeviceContext]
        if modes:
            raise CaptureRefused(f"the step is called inside of a function mode of torch ({type(modes[0]).__name__})")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise CaptureRefused("the step is called inside of hooks of saved tensors, which see what eager PyTorch keeps")


def refuse_unguardable(
    subject: Subject | None,
    read: Sequence[tuple[str, Any]],
    codes: Sequence[types.CodeType],
    named: Iterable[type] = (),
) -> None:
    """`subject`: None where nothing is trained. `read`: what Dynamo's guards look at. `codes`: of all traced functions, which
    name the classes `named`."""
    mentioned = {name for code in codes if is_users(code) for name in code.co_names}
    for name, reason in _MENTIONED.items():
        if name in mentioned:
            raise CaptureRefused(reason)
    if {"warnings", "filters"} <= mentioned:
        raise CaptureRefused(
            "the loss reads warnings.filters, to which a trace adds one of its own; read it outside of the loss"
        )
    called = {name for code in codes for name in code.co_names} | _OPERATORS
    patched = [n for n, value in vars(torch.Tensor).items() if n in called and n in _TENSOR and _TENSOR[n] is not value]
    if patched:
        raise CaptureRefused(f"torch.Tensor.{patched[0]} was replaced")
    if not mentioned.isdisjoint(("isinstance", "issubclass")):
        for cls in named:
            _refuse_own_check(cls)
    _refuse_shared_attributes(read)
    for place, value in read:
        _refuse_own_subscript(value)
        if isinstance(value, functools._lru_cache_wrapper):
            _refuse_impure_cache(value)
        if isinstance(value, random.Random) and value is not random._inst:
            raise CaptureRefused(
                "the loss draws from a random.Random of your own; draw outside of it and pass it in the batch"
            )
        if isinstance(value, deque) and value.maxlen is not None and mentioned & {"append", "appendleft", "extend"}:
            raise CaptureRefused(
                "a deque with maxlen is appended to, of which Dynamo does not drop the oldest; use a list"
            )
        if isinstance(value, dict) and not value and _reads_attributes(place, value, read):
            raise CaptureRefused(
                f"an empty dictionary of class {type(value).__qualname__} has attributes that the loss reads, which Dynamo does "
                "not guard; give it a key, or keep them in a plain object"
            )
        optimizer = None if subject is None else subject.optimizer
        if value is optimizer and value is not None and "state" in mentioned:
            raise CaptureRefused("the loss reads optimizer.state; return what it needs as aux, or pass it in the batch")


_SUBSCRIPTS = ((tuple, "__getitem__"), (int, "__index__"))
"""By which Dynamo itself reads what a tuple holds, or a list at a place that a number tells."""


def _refuse_own_subscript(value: Any) -> None:
    for kind, name in _SUBSCRIPTS:
        method = users_method(type(value), name) if isinstance(value, kind) else None
        if method is not None:
            told = f"{method.__qualname__} is code of a number or a tuple, which is not traced where Dynamo itself reads a place"
            raise CaptureRefused(told, where=where_is(method))


def _refuse_shared_attributes(read: Sequence[tuple[str, Any]]) -> None:
    """Two objects with one `__dict__`: what is written to one of them shows in the other."""
    owners: dict[int, Any] = {}
    for _, value in read:
        if not isinstance(value, type | types.FunctionType) and is_users_class(type(value)):
            table = getattr(value, "__dict__", None)
            if isinstance(table, dict) and owners.setdefault(id(table), value) is not value:
                raise CaptureRefused(
                    f"two objects of class {type(value).__qualname__} share their attributes (__dict__)"
                )


def _reads_attributes(place: str, value: dict, read: Sequence[tuple[str, Any]]) -> bool:
    """Whether anything but keys and methods is read of a dictionary whose class is not Python's own."""
    if type(value).__module__ in ("builtins", "collections"):
        return False
    of_class = (type, dict, tuple, property, classmethod, staticmethod, types.FunctionType)
    return any(
        (other.startswith(f"{place}.") and other != f"{place}.__dict__")
        or (f"type({place})" in other and not isinstance(found, of_class))
        for other, found in read
    )


def _refuse_own_check(cls: type) -> None:
    """`isinstance(x, cls)` runs code of the user's own, which Dynamo does not see, or looks for names that `x` may gain."""
    if getattr(cls, "_is_protocol", False):
        raise CaptureRefused(f"whether an object has what the protocol {cls.__qualname__} asks for is not guarded")
    for owner, name in ((type(cls), "__instancecheck__"), (type(cls), "__subclasscheck__"), (cls, "__subclasshook__")):
        found = getattr(owner, name, None)
        code = getattr(getattr(found, "__func__", found), "__code__", None)
        if code is not None and is_users(code):
            where = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
            raise CaptureRefused(f"{owner.__qualname__} has a {name} of its own, which is not traced", where=where)


def refuse_hooked_accumulators(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Hooks on the nodes where autograd adds up gradients; nothing but the garbage collector can tell of them."""
    for name, parameter in parameters:
        with torch.enable_grad():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        own = parameter._backward_hooks
        if any(isinstance(held, dict) and held and held is not own for held in gc.get_referents(node)):
            raise CaptureRefused(
                f"the node that adds up the gradient of {name} has a hook; a hook on the parameter is captured"
            )


# ---- functions that are called, or were called once, without being traced ----


def _refuse_impure_cache(value: Any) -> None:
    """`lru_cache` keeps what a function returned once; Dynamo runs the function. Equal only if it reads nothing that changes."""
    function = value.__wrapped__
    name = what_it_reads(function)
    if name is not None:
        raise CaptureRefused(
            f"{function.__qualname__} is cached (lru_cache) and reads {name}, which may change",
            where=where_is(function),
        )


def where_is(function: Any) -> str:
    return f"{os.path.basename(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def what_it_reads(function: Any, seen: frozenset[Any] = frozenset()) -> str | None:
    """A variable of its surroundings, or of those of functions that it calls, that is no function, class, module or constant."""
    code = getattr(function, "__code__", None)
    if code is None or code in seen or not is_users(code):
        return None
    if code.co_freevars:
        return code.co_freevars[0]
    for name in _global_names(code):
        value = function.__globals__.get(name)
        if isinstance(value, types.FunctionType):
            inner = what_it_reads(value, seen | {code})
            if inner is not None:
                return inner
        elif value is not None and not _is_fixed(value):
            return name
    return None


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Variables of the module that a function reads, and functions inside of it; `x.t()` reads no variable `t`."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_fixed(value: Any) -> bool:
    """A class or module holds what may change if it is the user's own and holds plain values, as settings do."""
    if isinstance(value, types.ModuleType):
        return not is_own_file(getattr(value, "__file__", None) or "")
    if isinstance(value, type):
        return not _holds_values(value)
    return isinstance(value, types.BuiltinFunctionType)


def _holds_values(cls: type) -> bool:
    """Whether a class of the user's own has attributes that are plain values, as a class of settings has."""
    plain = int | float | str | list | dict | set
    return is_users_class(cls) and any(
        isinstance(value, plain) for name, value in vars(cls).items() if not name.startswith("__")
    )
