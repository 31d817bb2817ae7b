"""Undo: the Python state that a loss can reach, as it is now, to be put back after code ran that should not have counted.

References of `verify`, and a trace of the user's own code, run a loss for real: it counts, appends, assigns. In: the loss
function and the model. `restore` puts every container, attribute, closure variable, class attribute, named global and random
generator back that was found by following references. Data of tensors is not part of it: whoever runs the code knows which
tensors it writes.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

_ATOMS = (
    int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, types.CodeType,
    types.BuiltinFunctionType, types.MethodDescriptorType, torch.Tensor, torch.optim.Optimizer, range, slice,
)  # fmt: skip
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_MOST = 200_000
_MOST_ENTRIES = 20_000
_LIBRARIES = (os.path.dirname(os.__file__), "site-packages", "dist-packages")


class PythonRandom:
    """The global generators of Python and numpy, as they are now."""

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class RandomStates:
    """Every global generator: torch's on all devices, Python's, numpy's."""

    def __init__(self) -> None:
        self.cpu, self.of_python = torch.get_rng_state(), PythonRandom()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        self.of_python.restore()
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)


class Undo:
    """What is reachable from `roots`, to be put back."""

    def __init__(self, *roots: Any) -> None:
        self.random = RandomStates()
        self._seen: dict[int, Any] = {}  # held, so that no address is used twice
        self._puts: list[functools.partial] = []
        waiting = list(roots)
        while waiting and len(self._seen) < _MOST:
            value = waiting.pop()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            waiting.extend(self._keep(value))

    def restore(self) -> None:
        for put in self._puts:
            put()
        self.random.restore()

    def detach_new(self) -> None:
        """Tensors that were stored since lose their history, as those that a captured step leaves have none."""
        for put in self._puts:
            if put.func is _put_dict:
                live, kept = put.args
                for key, value in list(live.items()):
                    if value is not kept.get(key):
                        live[key] = _detached(value)
            elif put.func is _put_list:
                live = put.args[0]
                for i, value in enumerate(list(live)):
                    if i >= len(put.args[1]) or value is not put.args[1][i]:
                        live[i] = _detached(value)

    def _keep(self, value: Any) -> Iterator[Any]:
        """Note how to put `value` back; yields what it refers to."""
        if isinstance(value, dict):
            if type(value) not in _DICTS and _installed(
                getattr(sys.modules.get(type(value).__module__), "__file__", None)
            ):
                return  # a mapping of a library's, which may load what it is asked for
            self._puts.append(functools.partial(_put_dict, value, dict(value)))
            if len(value) <= _MOST_ENTRIES:
                yield from value.values()
            if type(value) is not dict and hasattr(value, "__dict__"):
                yield vars(value)
        elif isinstance(value, list | collections.deque):
            self._puts.append(functools.partial(_put_list, value, list(value)))
            if len(value) <= _MOST_ENTRIES:
                yield from value
        elif isinstance(value, set):
            self._puts.append(functools.partial(_put_set, value, set(value)))
        elif isinstance(value, tuple | frozenset):
            if len(value) <= _MOST_ENTRIES:
                yield from value
        elif isinstance(value, types.CellType):
            yield from self._keep_cell(value)
        elif isinstance(value, types.FunctionType):
            yield from self._keep_function(value)
        elif isinstance(value, types.MethodType):
            yield value.__self__
            yield value.__func__
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, type):
            yield from self._keep_class(value)
        elif isinstance(value, types.ModuleType):
            if not _installed(getattr(value, "__file__", None)):
                yield vars(value)
        else:
            yield from self._keep_object(value)

    def _keep_cell(self, cell: Any) -> Iterator[Any]:
        try:
            content = cell.cell_contents
        except ValueError:  # empty
            return
        self._puts.append(functools.partial(setattr, cell, "cell_contents", content))
        yield content

    def _keep_function(self, function: types.FunctionType) -> Iterator[Any]:
        if function.__dict__:
            yield function.__dict__
        if _installed(function.__code__.co_filename):
            return
        yield from function.__closure__ or ()
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        scope = function.__globals__
        for name in _names(function.__code__):
            if name in scope:
                self._puts.append(functools.partial(_put_item, scope, name, scope[name]))
                yield scope[name]

    def _keep_class(self, cls: type) -> Iterator[Any]:
        module = sys.modules.get(cls.__module__)
        if _installed(getattr(module, "__file__", None)) or cls.__module__ == "builtins":
            return
        self._puts.append(functools.partial(_drop_new, cls, set(vars(cls))))
        for name, value in list(vars(cls).items()):
            if isinstance(value, types.FunctionType):
                yield value
            elif isinstance(value, staticmethod | classmethod):
                yield value.__func__
            elif not name.startswith("__") and not hasattr(value, "__get__"):
                self._puts.append(functools.partial(_put_attribute, cls, name, value))
                yield value
        yield from cls.__bases__

    def _keep_object(self, value: Any) -> Iterator[Any]:
        if isinstance(value, random.Random):
            self._puts.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._puts.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.random.RandomState | torch.Generator):
            self._puts.append(functools.partial(value.set_state, value.get_state()))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= 1 << 24 and value.flags.writeable:
                self._puts.append(functools.partial(np.copyto, value, value.copy()))
        else:
            if not isinstance(value, nn.Module) and type(value).__module__.startswith(("torch.", "numpy")):
                return
            for name in _slots(type(value)):
                held = getattr(value, name, _NOTHING)
                self._puts.append(functools.partial(_put_attribute, value, name, held))
                if held is not _NOTHING:
                    yield held
            if hasattr(value, "__dict__"):
                yield vars(value)
            yield type(value)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if type(value) in (tuple, list):
        return type(value)(map(_detached, value))
    return value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _slots(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield (
                    name if not name.startswith("__") or name.endswith("__") else f"_{base.__name__.lstrip('_')}{name}"
                )


def _installed(path: str | None) -> bool:
    """Part of Python, of an installed package, or of this one."""
    own = os.path.dirname(os.path.dirname(__file__))
    return path is None or any(part in path for part in _LIBRARIES) or path.startswith(own)


def _put_dict(live: dict, kept: dict) -> None:
    if len(live) == len(kept) and all(k is j and live[k] is kept[j] for k, j in zip(live, kept)):
        return
    live.clear()
    live.update(kept)


def _put_list(live: Any, kept: list) -> None:
    if len(live) == len(kept) and all(a is b for a, b in zip(live, kept)):
        return
    live.clear()
    live.extend(kept)


def _put_set(live: set, kept: set) -> None:
    if live != kept:
        live.clear()
        live.update(kept)


def _put_item(table: dict, key: str, value: Any) -> None:
    if table.get(key) is not value:
        table[key] = value


_NOTHING = object()


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    if getattr(owner, name, _NOTHING) is value:
        return
    if value is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _drop_new(cls: type, names: set[str]) -> None:
    for name in [n for n in vars(cls) if n not in names and not n.startswith("__")]:
        delattr(cls, name)
