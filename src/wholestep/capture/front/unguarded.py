"""What a captured step depends on and Dynamo does not guard, looked at before every step.

Dynamo guards what the loss reads. It does not look at the update (the optimizer's groups, its step, its hooks), at hooks of
parameters and of all modules, at functions that were replaced on a class, at names that a subclass gained, and, depending
on the version, at `requires_grad`, `os.getenv` and at lists inside of tuples. `Unguarded` keeps those as they were.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from wholestep.capture import optimizers
from wholestep.capture.modes import is_user_file
from wholestep.capture.subject import Subject
from wholestep.errors import CaptureRefused

_GLOBAL_HOOKS = [
    table
    for name, table in vars(nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("hooks") and isinstance(table, dict)
]
_REQUIRES_GRAD, _HOOKS = attrgetter("requires_grad"), attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_FUNCTIONS = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property, functools.partialmethod)
_ENVIRONMENT = {"getenv", "environ", "environb", "getenvb"}


class Unguarded:
    """Those facts for one captured call."""

    def __init__(self, subject: Subject, values: Iterable[Any], codes: Iterable[types.CodeType]) -> None:
        self.subject = subject
        objects = list(values)
        refuse_impure_caches(objects)
        self.parameters = list(subject.parameters.values())
        self.classes = list(_classes(objects))
        self.names = [list(vars(cls)) for cls in self.classes]
        self.functions = [(cls, n, f) for cls in self.classes for n, f in vars(cls).items() if isinstance(f, _FUNCTIONS)]
        self.tuples = [(value, _content(value)) for value in objects if type(value) is tuple and _holds_mutable(value)]
        self.environment = dict(os.environ) if _reads_environment(codes) else None
        self.facts = self._facts()
        self.hooks = self._hooks()

    def _facts(self) -> list[Any]:
        optimizer = self.subject.optimizer
        return [
            None if optimizer is None else optimizers.structure(optimizer),
            [*map(_REQUIRES_GRAD, self.parameters)],
            [bool(hooks) for hooks in map(_LATE_HOOKS, self.parameters)],
        ]

    def _hooks(self) -> list[Any]:
        own = [hook for hooks in map(_HOOKS, self.parameters) if hooks for hook in hooks.values()]
        return own + [hook for table in _GLOBAL_HOOKS for hook in table.values()]

    def changed(self) -> str | None:
        """What is not as it was, in words; None where all is."""
        now = self._facts()
        if now != self.facts:
            what = ("the optimizer's groups or its step", "requires_grad of a parameter", "post-accumulate-grad hooks")
            return next(name for name, a, b in zip(what, self.facts, now) if a != b)
        hooks = self._hooks()
        if len(hooks) != len(self.hooks) or not all(map(is_, hooks, self.hooks)):
            return "hooks of parameters, or of all modules"
        for cls, names in zip(self.classes, self.names):
            if list(vars(cls)) != names:
                added = set(vars(cls)) ^ set(names)
                return f"names of class {cls.__qualname__} ({', '.join(sorted(added)[:3]) or 'their order'})"
        for cls, name, function in self.functions:
            if vars(cls).get(name) is not function:
                return f"{cls.__qualname__}.{name}"
        if self.environment is not None and dict(os.environ) != self.environment:
            return "the environment's variables"
        if any(_content(value) != content for value, content in self.tuples):
            return "what a tuple holds"
        return None


def _classes(values: Iterable[Any]) -> Iterator[type]:
    """The classes of what was read, and what they inherit from, as far as Python can change them."""
    seen: set[type] = set()
    for value in values:
        for cls in (value if isinstance(value, type) else type(value)).__mro__:
            if cls not in seen and cls.__flags__ & _HEAP_TYPE and not _is_internal(cls):
                seen.add(cls)
                yield cls


_HEAP_TYPE = 1 << 9
_INTERNAL = (
    "torch._", "torch.fx", "torch.autograd", "torch.utils", "torch.jit", "abc", "typing", "collections", "enum", "builtins", "_abc", "_collections",
)  # fmt: skip


def _is_internal(cls: type) -> bool:
    """Classes that make a program, not a model; `nn` is not among them, since people patch `nn.Linear.forward`."""
    return cls.__module__.startswith(_INTERNAL) or issubclass(cls, torch.Tensor) or cls.__module__ in ("torch", "wholestep")


def _holds_mutable(value: Any, depth: int = 0) -> bool:
    if isinstance(value, tuple) and depth < 4:
        return any(_holds_mutable(v, depth + 1) for v in value)
    return isinstance(value, list | dict | set)


def _content(value: Any, depth: int = 0) -> Any:
    """Plain values by value, containers by content, all else by identity."""
    if depth > 6:
        return id(value)
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), [_content(v, depth + 1) for v in value])
    if isinstance(value, dict):
        return {k: _content(v, depth + 1) for k, v in value.items()}
    return value if isinstance(value, int | float | str | bool | bytes | None) else id(value)


def _reads_environment(codes: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's own mentions the environment."""
    return any(
        not _ENVIRONMENT.isdisjoint(code.co_names) and is_user_file(code.co_filename) and "site-packages" not in code.co_filename
        for code in codes
    )


def refuse_impure_caches(values: Iterable[Any]) -> None:
    """`lru_cache` keeps what a function returned once; Dynamo runs the function. Equal only if it reads nothing that changes."""
    for value in values:
        if isinstance(value, functools._lru_cache_wrapper):
            name = _what_it_reads(value.__wrapped__)
            if name is not None:
                function = value.__wrapped__
                raise CaptureRefused(
                    f"{function.__qualname__} is cached (lru_cache) and reads {name}, which may change",
                    where=f"{os.path.basename(function.__code__.co_filename)}:{function.__code__.co_firstlineno}",
                )


def _what_it_reads(function: Any) -> str | None:
    """A variable of its surroundings that is neither a function, a class, a module nor a plain constant."""
    code = getattr(function, "__code__", None)
    if code is None or "site-packages" in code.co_filename or not is_user_file(code.co_filename):
        return None
    if code.co_freevars:
        return code.co_freevars[0]
    fixed = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
    for name in code.co_names:
        value = function.__globals__.get(name)
        if value is not None and not isinstance(value, fixed):
            return name
    return None
