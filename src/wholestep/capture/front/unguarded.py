"""What a captured step depends on and Dynamo does not guard, looked at before every step.

Dynamo guards what the loss reads. It does not look at the update (the optimizer's groups, its step, its hooks), at hooks of
parameters and of all modules, at functions that were replaced on a class, at names that a subclass gained, and, depending
on the version, at `requires_grad`, `os.getenv` and at lists inside of tuples. `Unguarded` keeps those as they were.
"""

from __future__ import annotations

import abc
import builtins
import dis
import functools
import os
import sys
import types
from _abc import _get_dump  # what was registered with an abstract class, which nothing public tells
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.capture.front.absent_names import asks_for_names, looks_for_absence, tables_of
from wholestep.capture.front.unguardable import is_users, is_users_class, refuse_unguardable
from wholestep.capture.subject import Subject

_GLOBAL_HOOKS = [
    table
    for name, table in vars(nn.modules.module).items()
    if name.startswith("_global_") and name.endswith("hooks") and isinstance(table, dict)
]
_REQUIRES_GRAD, _BASES, _VALUES = attrgetter("requires_grad"), attrgetter("__mro__"), methodcaller("values")
_FUNCTIONS = (
    types.FunctionType, property, classmethod, staticmethod, functools.cached_property, functools.partialmethod,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.BuiltinFunctionType,
)  # fmt: skip
_ENVIRONMENT = {"getenv", "environ", "environb", "getenvb"}
_AUTOCAST = tuple(device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device))
_BUILTINS = frozenset(vars(builtins))
"""Names of Python's own: this file is imported before anything is trained."""


class Unguarded:
    """Those facts for one captured call."""

    def __init__(
        self, subject: Subject | None, read: Sequence[tuple[str, Any]], codes: Sequence[types.CodeType]
    ) -> None:
        """`subject`: None where nothing is trained. `read`: what Dynamo's guards look at, by name. `codes`: of all functions that
        were traced."""
        objects = [value for _, value in read]
        functions = list(_functions(objects if subject is None else [subject.loss_fn, *objects]))
        named = list(_named_classes(functions))
        refuse_unguardable(subject, read, codes, named)
        self.subject = subject
        self.classes = list(_classes([*objects, *named]))
        self.names = [list(vars(cls)) for cls in self.classes]
        self.bases = [*map(_BASES, self.classes)]
        self.tables = [*map(vars, self.classes)]
        self.contents = [list(table.values()) for table in self.tables]
        self.all_contents = [*chain.from_iterable(self.contents)]
        plain = [cls for cls in self.classes if _OLDER_TORCH or issubclass(cls, type)]
        self.numbers = set(_class_numbers(plain, codes))
        self.registered = [(cls, _registry(cls)) for cls in self.classes if isinstance(cls, abc.ABCMeta)]
        self.token = abc.get_cache_token()
        self.modules = [value for value in objects if isinstance(value, nn.Module)]
        self.kinds = list(map(type, self.modules))
        self.found = list(_found_classes(read))
        mentioned = {name for code in codes if is_users(code) for name in code.co_names}
        self.tuples = [(value, _content(value)) for value in objects if type(value) is tuple and _holds_mutable(value)]
        if _OLDER_TORCH:
            self.tuples += [(value, _content(value)) for value in _class_containers(self.classes, mentioned)]
        self.orders = [(value, list(value)) for value in objects if type(value) is OrderedDict and len(value) > 1]
        asks = asks_for_names(codes)
        self.counted = list(_counted_tables(self.modules, looks_for_absence(codes), mentioned))
        """Modules' own tables, thousands of them: one that gains a name is seen by its length."""
        if asks:
            attributed = (nn.Parameter, types.FunctionType)  # below a module, guards of these are skipped
            self.counted += [vars(value) for value in (*objects, *functions) if isinstance(value, attributed)]
        self.absent = list(_absent_from_modules(objects, codes)) if asks else []
        self.lengths = [*map(len, self.counted)]
        owners = {id(owner): owner for owner in (*map(type, objects), *functions)}.values()
        self.titled = [(owner, name) for name in _TITLES & mentioned for owner in owners]
        self.titles = [getattr(owner, name) for owner, name in self.titled]
        self.held = [value for value in objects if type(value) is torch.Tensor] if _OLDER_TORCH else []
        self.kinds_held = [*map(_kind, self.held)]
        self.hidden = list(_hidden_builtins(functions, mentioned))
        self.imported = {name: sys.modules.get(name) for name in _imported(codes)}
        self.added = {name: vars(builtins)[name] for name in mentioned & (vars(builtins).keys() - _BUILTINS)}
        self.environment = dict(os.environ) if _reads_environment(codes, functions) else None
        self.facts = self._facts()
        self.hooks = self._hooks()

    def _facts(self) -> list[Any]:
        validation = torch.distributions.Distribution._validate_args
        autocast = [*map(torch.get_autocast_dtype, _AUTOCAST)]
        if self.subject is None:
            return [None, [], validation, autocast]
        optimizer, parameters = self.subject.optimizer, self.subject.parameters.values()
        return [
            None if optimizer is None else optimizers.structure(optimizer),
            [*map(_REQUIRES_GRAD, parameters)],
            validation,
            autocast,
        ]

    def _hooks(self) -> list[Any]:
        own = () if self.subject is None else self.subject.gradient_hooks()
        return [*chain.from_iterable(map(_VALUES, _GLOBAL_HOOKS)), *own]

    def changed(self) -> str | None:
        """What is not as it was, in words; None where all is."""
        now = self._facts()
        if now != self.facts:
            what = (
                "the optimizer's groups or its step",
                "requires_grad of a parameter",
                "the validation of torch.distributions",
                "the type that autocast takes",
            )
            return next(name for name, a, b in zip(what, self.facts, now) if a != b)
        hooks = self._hooks()
        if len(hooks) != len(self.hooks) or not all(map(is_, hooks, self.hooks)):
            return "hooks of parameters, or of all modules"
        return self._changed_classes() or self._changed_values()

    def _changed_classes(self) -> str | None:
        if not _same([*chain.from_iterable(map(_VALUES, self.tables))], self.all_contents):
            changed = self._changed_contents()
            if changed is not None:
                return changed
        if [*map(_BASES, self.classes)] != self.bases:
            return "the bases of a class"
        if [*map(type, self.modules)] != self.kinds:
            return "the class of a module"
        for table, key, cls in self.found:
            if table.get(key) is not cls:
                return f"the class at {key!r} of a dictionary"
        if self.registered and abc.get_cache_token() != self.token:
            for cls, known in self.registered:
                if _registry(cls) != known:
                    return f"what counts as a {cls.__qualname__}"
        return None

    def _changed_contents(self) -> str | None:
        for cls, names, table, contents in zip(self.classes, self.names, self.tables, self.contents):
            if len(table) == len(contents) and all(map(is_, table.values(), contents)):
                continue
            added = (set(table) ^ set(names)) - _MADE_BY_PYTHON
            if added:
                return f"names of class {cls.__qualname__} ({', '.join(sorted(added)[:3])})"
            for name, value in zip(names, contents):
                if table.get(name) is not value and (isinstance(value, _FUNCTIONS) or (cls, name) in self.numbers):
                    return f"{cls.__qualname__}.{name}"
        return None

    def _changed_values(self) -> str | None:
        if self.environment is not None and dict(os.environ) != self.environment:
            return "the environment's variables"
        if any(_content(value) != content for value, content in self.tuples):
            return "what a tuple, or a container of a class, holds"
        if [*map(_kind, self.held)] != self.kinds_held:
            return "the type of a tensor, or whether it requires a gradient"
        if [getattr(owner, name) for owner, name in self.titled] != self.titles:
            return "the name or the text of a function or class"
        for value, order in self.orders:
            if list(value) != order and set(value) == set(order):
                return "the order of a dictionary"
        if [*map(len, self.counted)] != self.lengths:
            return "a name that was missing, or is"
        for table, missing in self.absent:
            if not table.keys().isdisjoint(missing):
                return f"{min(table.keys() & missing)}, which a module did not have"
        for table, name in self.hidden:
            if name in table:
                return f"{name}, which is a global variable now"
        for name, value in self.added.items():
            if vars(builtins).get(name) is not value:
                return f"{name}, which was added to Python's builtins"
        for name, module in self.imported.items():
            if sys.modules.get(name) is not module:
                return f"module {name}"
        return None


def _same(now: list[Any], before: list[Any]) -> bool:
    """Equal entry by entry: lists compare by identity first, in a quarter of the time that asking for identity takes."""
    try:
        return now == before
    except Exception:  # an entry that cannot be compared, and is another one
        return False


def _class_numbers(classes: Iterable[type], codes: Sequence[types.CodeType]) -> Iterator[tuple[type, str]]:
    """Plain values of the user's classes that traced code mentions: torch 2.11 does not guard all of them."""
    mentioned = {name for code in codes for name in code.co_names}
    for cls in classes:
        if not cls.__module__.startswith(("torch", "transformers")):
            for name, value in vars(cls).items():
                plain = name in mentioned and isinstance(value, int | float | str | None)
                if plain or name == "__match_args__":  # which `match` reads without a word
                    yield cls, name


def _class_containers(classes: Iterable[type], mentioned: set[str]) -> Iterator[Any]:
    """Lists, dictionaries and sets of the user's own classes that traced code mentions."""
    for cls in filter(is_users_class, classes):
        yield from (v for name, v in vars(cls).items() if name in mentioned and isinstance(v, list | dict | set))


_OLDER_TORCH = compat.torch_version() < (2, 13)
"""Whose guards leave out classes, and tensors that are written over where a module holds them."""
_kind = attrgetter("dtype", "ndim", "requires_grad")
_TITLES = {"__name__", "__qualname__", "__doc__"}


def _found_classes(read: Sequence[tuple[str, Any]]) -> Iterator[tuple[dict, Any, type]]:
    """Classes in dictionaries, as registries have them."""
    for _, value in read:
        if type(value) is dict and len(value) <= 256:
            for key, entry in value.items():
                if isinstance(entry, type) and key != "__class__":
                    yield value, key, entry


def _absent_from_modules(objects: Iterable[Any], codes: Iterable[types.CodeType]) -> Iterator[tuple[dict, set[str]]]:
    """Modules of Python that were read, and the texts in code of the user's own that are no name in them, but may be later."""
    texts = {text for code in codes if is_users(code) for text in code.co_consts if isinstance(text, str)}
    tables = {id(value): vars(value) for value in objects if isinstance(value, types.ModuleType)}
    return ((table, texts - table.keys()) for table in tables.values())


def _counted_tables(modules: Sequence[nn.Module], looks: bool, mentioned: set[str]) -> Iterator[dict]:
    """Tables of modules whose number of names matters: Dynamo does not guard that one is empty which is only walked over."""
    for module in modules:
        if looks:
            yield from tables_of(module)
        elif not mentioned.isdisjoint(_WALKS):
            yield from (module._parameters, module._buffers, module._modules)
        elif isinstance(module, _CONTAINERS):
            yield from (module._parameters, module._modules)
            if isinstance(module, nn.ParameterDict):
                yield module._keys


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_WALKS = {
    "buffers",
    "named_buffers",
    "parameters",
    "named_parameters",
    "modules",
    "named_modules",
    "children",
    "state_dict",
}
_WALKS |= {"named_children", "_buffers", "_parameters", "_modules"}


def _functions(objects: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Functions of the user's own among what was read, and the methods of its classes."""
    seen: set[Any] = set()
    for value in objects:
        if isinstance(value, types.MethodType | functools.partial):
            value = value.__func__ if isinstance(value, types.MethodType) else value.func
        classes = () if isinstance(value, types.FunctionType) else filter(is_users_class, type(value).__mro__)
        for function in (value, *chain.from_iterable(vars(cls).values() for cls in classes)):
            if isinstance(function, types.FunctionType) and function not in seen and is_users(function.__code__):
                seen.add(function)
                yield function


def _named_classes(functions: Iterable[types.FunctionType]) -> Iterator[type]:
    """Classes of the user's own that functions name: Dynamo takes them for constants."""
    for value in chain.from_iterable(map(_mentioned_by, functions)):
        if isinstance(value, type) and is_users_class(value):
            yield value


def _mentioned_by(function: types.FunctionType) -> Iterator[Any]:
    """What the variables of a function's closure and module hold, as far as it mentions them."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
    yield from map(function.__globals__.get, function.__code__.co_names)


def _hidden_builtins(functions: Iterable[types.FunctionType], mentioned: set[str]) -> Iterator[tuple[dict, str]]:
    """Globals of traced functions, and the names of builtins that they do not hide, but may later."""
    names = [name for name in mentioned if hasattr(builtins, name)]
    tables = {id(function.__globals__): function.__globals__ for function in functions}
    return ((table, name) for table in tables.values() for name in names if name not in table)


def _imported(codes: Iterable[types.CodeType]) -> Iterator[str]:
    """Modules that code of the user's own imports while it runs."""
    for code in codes:
        if is_users(code):
            names = [i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME"]
            yield from names
            yield from (known for name in names for known in list(sys.modules) if known.endswith(f".{name}"))


def _classes(values: Iterable[Any]) -> Iterator[type]:
    """The classes of what was read, and what they inherit from, as far as Python can change them."""
    seen: set[type] = {torch.Tensor}
    yield torch.Tensor
    for value in values:
        own = value.__mro__ if isinstance(value, type) else ()
        for cls in (*own, *type(value).__mro__):  # the class of a class too: what it holds, its classes have
            if cls not in seen and cls.__flags__ & _HEAP_TYPE and not _is_internal(cls):
                seen.add(cls)
                yield cls


def _registry(cls: type) -> set[Any]:
    """What was registered with an abstract class, as weak references."""
    return set(_get_dump(cls)[0])


_HEAP_TYPE = 1 << 9
_MADE_BY_PYTHON = {"__slotnames__", "__annotations__", "__annotate__", "__annotations_cache__", "__static_attributes__"}
"""Names that Python itself adds to a class when something asks for them."""
_INTERNAL = (
    "torch._", "torch.fx", "torch.autograd", "torch.utils", "torch.jit", "abc", "typing", "collections", "enum", "builtins",
    "_abc", "_collections",
)  # fmt: skip


def _is_internal(cls: type) -> bool:
    """Classes that make a program, not a model; people patch `nn.Linear.forward`, edit a GraphModule, which has its own class."""
    if issubclass(cls, nn.Module):
        return False
    return cls.__module__.startswith(_INTERNAL) or cls.__module__ in ("torch", "wholestep")


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


def _reads_environment(codes: Iterable[types.CodeType], functions: Iterable[types.FunctionType]) -> bool:
    """Whether code of the user's own mentions the environment, or `getenv` by another name."""
    if any(not _ENVIRONMENT.isdisjoint(code.co_names) and is_users(code) for code in codes):
        return True
    return any(value is os.getenv or value is os.getenvb for function in functions for value in _mentioned_by(function))
