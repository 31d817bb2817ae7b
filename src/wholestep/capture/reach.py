"""What a loss function reaches besides its arguments: closure variables, globals, attributes, modules, tensors.

In: a Subject. Out: `Place`s, each a spot that can be read again before every step (`table[key]`, or a closure cell),
and the modules that only the loss knows (a teacher). Guards watch the plain values found there, Binding the tensors,
Snapshot the modules. Only what the code names is followed into objects: a trainer's step counter that the loss never
reads is nobody's business.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from wholestep.capture.modes import is_user_file
from wholestep.capture.subject import Subject

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_NOT_FOLLOWED = (types.ModuleType, type, types.BuiltinFunctionType, torch.optim.Optimizer)
_DEEPEST = 4
_MOST_ENTRIES = 2000


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One spot a value is read from."""

    table: Any
    """A dict, a list, or a closure cell."""
    key: Any
    label: str

    def read(self) -> Any:
        if isinstance(self.table, types.CellType):
            try:
                return self.table.cell_contents
            except ValueError:  # an empty cell
                return None
        try:
            return self.table[self.key]
        except (KeyError, IndexError):
            return None


class _Walk:
    """Follows one loss function; every object once."""

    def __init__(self, subject: Subject) -> None:
        self.known = {id(m) for m in subject.root.modules()}
        self.seen: set[int] = set()
        self.modules: dict[str, nn.Module] = {}
        self.places: list[Place] = []

    def function(self, function: Any, label: str, depth: int, owner: type | None = None) -> None:
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        if isinstance(function, functools.partial):
            for part in (function.func, *function.args, *function.keywords.values()):
                self.value(part, f"{label} argument", depth + 1, ())
            return
        if isinstance(function, types.MethodType):
            names = _names_in(function.__func__, type(function.__self__))
            self.value(function.__self__, "self", depth, names)
            function = function.__func__
        code = getattr(function, "__code__", None)
        if code is None:
            self.value(function, label, depth, _names_in(type(function).__call__, type(function)))
            return
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        names = _names_in(function, owner)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            self._at(Place(cell, None, name), depth, names)
        for name in names:
            if name in function.__globals__:
                self._at(Place(function.__globals__, name, name), depth, names)
        for i, value in enumerate(function.__defaults__ or ()):
            self.value(value, f"default {i} of {label}", depth + 1, names)

    def value(self, value: Any, label: str, depth: int, names: Iterable[str]) -> None:
        """Follow an object; `names` are the attributes that the code around it mentions."""
        if isinstance(value, (*PLAIN, torch.Tensor, *_NOT_FOLLOWED)) or depth > _DEEPEST:
            return
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            code = getattr(value, "__code__", None)
            if code is None or _is_users(value):
                self.function(value, label, depth + 1)
            return
        library = type(value).__module__.split(".")[0] in ("torch", "numpy")
        if id(value) in self.seen or (library and not isinstance(value, nn.Module)):
            return
        self.seen.add(id(value))
        if isinstance(value, nn.Module):
            self.module(value, label)
        elif isinstance(value, dict):
            self._entries(value, list(value), label, depth, names)
        elif isinstance(value, list):
            self._entries(value, range(len(value)), label, depth, names)
        elif isinstance(value, tuple | set | frozenset):
            for i, entry in enumerate(value):
                self.value(entry, f"{label}.{i}", depth + 1, names)
        elif hasattr(value, "__dict__"):
            self._entries(vars(value), [n for n in names if n in vars(value)], label, depth, names)

    def module(self, module: nn.Module, label: str) -> None:
        """A module the subject does not hold."""
        if id(module) in self.known:
            return
        for path, part in module.named_modules():
            name = f"{label}.{path}" if path else label
            if id(part) not in self.known:
                self.known.add(id(part))
                self.modules[name] = part

    def _entries(self, table: Any, keys: Iterable[Any], label: str, depth: int, names: Iterable[str]) -> None:
        if len(table) <= _MOST_ENTRIES:
            for key in keys:
                self._at(Place(table, key, f"{label}.{key}"), depth + 1, names)

    def _at(self, place: Place, depth: int, names: Iterable[str]) -> None:
        value = place.read()
        if isinstance(value, _NOT_FOLLOWED):
            return
        self.places.append(place)
        self.value(value, place.label, depth, names)


def _is_users(function: Any) -> bool:
    """Written in the user's program, not in an installed library."""
    name = function.__code__.co_filename
    return is_user_file(name) and "site-packages" not in name


def _names_in(function: Any, owner: type | None) -> tuple[str, ...]:
    """Every name that a function's code mentions, and that methods of `owner` which it mentions mention in turn."""
    found: dict[str, None] = {}
    codes = [getattr(function, "__code__", None)]
    while codes:
        code = codes.pop()
        if code is None:
            continue
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            if name not in found:
                found[name] = None
                codes.append(getattr(getattr(owner, name, None), "__code__", None) if owner else None)
    return tuple(found)


def reached(subject: Subject) -> tuple[list[Place], dict[str, nn.Module]]:
    """The places that the loss (and the user's own modules) read outside arguments, and modules that `model` lacks."""
    walk = _Walk(subject)
    walk.function(subject.loss_fn, "loss_fn", 0)
    for cls in dict.fromkeys(type(module) for module in subject.root.modules()):
        forward = getattr(cls, "forward", None)
        if isinstance(forward, types.FunctionType) and _is_users(forward):
            walk.function(forward, cls.__name__, 1, cls)
    return walk.places, walk.modules


def tensor_places(subject: Subject, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[Place, int]]:
    """Every place where one of `tensors` is found (by identity), with its number."""
    wanted = {id(t): i for i, t in enumerate(tensors)}
    if not wanted:
        return
    places, modules = reached(subject)
    own = {path or type(m).__name__: m for path, m in subject.root.named_modules()}
    for label, module in {**modules, **own}.items():
        for table in (module._parameters, module._buffers, module.__dict__):
            for key, value in table.items():
                places.append(Place(table, key, f"{label}.{key}"))
                if isinstance(value, dict | list) and not key.startswith("_"):
                    places += [Place(value, k, f"{label}.{key}") for k in _keys(value)]
    for place in places:
        index = wanted.get(id(place.read()))
        if index is not None:
            yield place, index


def _keys(container: dict | list) -> Iterable[Any]:
    return list(container) if isinstance(container, dict) else range(len(container))
