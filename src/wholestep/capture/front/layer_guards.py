"""Guards of one layer, asked of another: where each looks, what it compares, and the same guard at another place.

In: guards that Dynamo recorded while it traced a layer. Out: for each, what it has seen there and what it would see in the
same place of the next layer. A kind of guard that is not known here makes the layer one that is traced.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, NNModuleSource, TypeSource
from torch._guards import Guard, Source


class Unlike(Exception):
    """The layer is to be traced."""


def unwrapped(source: Source) -> Source:
    while isinstance(source, NNModuleSource):
        source = source.base
    return source


def readable(name: str) -> str:
    """As Dynamo writes places of modules."""
    return re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]", r".\2", name)


def is_under(source: Any, place: Source) -> bool:
    while source is not None:
        if source == place:
            return True
        index = getattr(source, "index", None)
        if isinstance(index, Source) and is_under(index, place):
            return True
        source = getattr(source, "base", None)
    return False


def of_class(source: Any, kinds: set[Source]) -> bool:
    """Whether it belongs to the class of an object whose class is guarded."""
    while source is not None:
        if isinstance(source, TypeSource) and source.base in kinds:
            return True
        source = getattr(source, "base", None)
    return False


def keywords_of(guard: Guard) -> dict[str, Any]:
    made = guard.create_fn
    return dict(made.keywords) if isinstance(made, functools.partial) else {}


def sources_of(guard: Guard) -> list[Source]:
    return [guard.originating_source, *(v for v in keywords_of(guard).values() if isinstance(v, Source))]


def kind_of(guard: Guard) -> tuple:
    keywords = keywords_of(guard)
    keywords.pop("value", None)  # of a tensor's guard
    return guard.create_fn_name(), guard.originating_source, tuple(sorted(keywords.items(), key=lambda entry: entry[0]))


def moved(guard: Guard, place: Callable[[Any], Any]) -> Guard:
    made, keywords = guard.create_fn, keywords_of(guard)
    if isinstance(made, functools.partial) and any(isinstance(v, Source) for v in keywords.values()):
        made = functools.partial(made.func, *made.args, **{name: place(v) for name, v in keywords.items()})
    return Guard(place(guard.originating_source), made, stack=guard.stack, user_stack=guard.user_stack)


def seen_by(guard: Guard, value: Callable[[Source], Any]) -> Any:
    """What a guard looks at, such that an equal one passes the guard; raises Unlike for guards that are not known here."""
    kind, source, keywords = guard.create_fn_name(), guard.originating_source, keywords_of(guard)
    if kind == "TENSOR_MATCH":
        return None
    if kind == "HASATTR":
        return hasattr(*_asked(source, keywords.get("attr"), value))
    if kind == "DUPLICATE_INPUT":
        return value(source) is value(keywords["source_b"])
    reads = _READS.get(kind)
    if reads is None:
        raise Unlike
    return reads(value(source), **keywords)


def _asked(source: Any, attribute: str | None, value: Callable[[Source], Any]) -> tuple[Any, str]:
    """The object and the name of HASATTR: the name was part of the place in torch 2.11."""
    if attribute is not None:
        return value(source), attribute
    source = unwrapped(source)
    if not isinstance(source, AttrSource):
        raise Unlike
    return value(source.base), source.member


class Identity:
    """An object, equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def constant(value: Any) -> Any:
    """Equal for what is the same constant: neither 1 and True nor 0.0 and -0.0 are."""
    return Identity(value) if isinstance(value, types.CodeType) else (_types(value), value)


def _types(value: Any) -> Any:
    if isinstance(value, tuple | list | set | frozenset | dict):
        return (type(value), [_types(v) for v in value])
    return (type(value), repr(value)) if isinstance(value, float | complex) else type(value)


def _code(value: Any) -> Any:
    return Identity(value.__code__ if type(value) is types.FunctionType else value)


class Pairs:
    """Objects at the same places of two layers."""

    def __init__(self) -> None:
        self.there: dict[int, Any] = {}
        self.here: dict[int, Any] = {}

    def add(self, old: Any, new: Any) -> bool:
        """Whether these are two objects; raises Unlike if one is paired with something else, or holds other names."""
        if isinstance(old, _VALUES) and isinstance(new, _VALUES):
            return False
        if self.there.setdefault(id(old), new) is not new or self.here.setdefault(id(new), old) is not old:
            raise Unlike
        if old is new:
            return False
        if names_of(old) != names_of(new):
            raise Unlike
        return True


_VALUES = (
    int, float, complex, str, bytes, tuple, frozenset, range, slice, types.NoneType, type, types.ModuleType,
    types.BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip
"""Of these it does not matter which object they are."""


def names_of(value: Any) -> Any:
    """Keys and attributes, present or missing: guards tell of what was found, not of all that was looked for."""
    if isinstance(value, dict | set):
        return [constant(key) if isinstance(key, _VALUES) else Identity(key) for key in value]
    slots = [name for cls in type(value).__mro__ for name in vars(cls).get("__slots__", ())]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def places_of(sources: Iterable[Source], layer: Source) -> list[Source]:
    """These and those that they are found through, as far as they are the layer's."""
    found: dict[Source, None] = {}
    for source in sources:
        place: Source | None = source
        while place is not None and place not in found and is_under(place, layer):
            if not isinstance(place, TypeSource):
                found[place] = None
            place = getattr(place, "base", None)
    return list(found)


_READS: dict[str, Callable[..., Any]] = {
    "TYPE_MATCH": type,
    "ID_MATCH": Identity,
    "BUILTIN_MATCH": Identity,
    "FUNCTION_MATCH": Identity,
    "CLASS_MATCH": Identity,
    "MODULE_MATCH": Identity,
    "NONE_MATCH": Identity,
    "BOOL_MATCH": Identity,
    "CLOSURE_MATCH": _code,
    "CONSTANT_MATCH": constant,
    "EQUALS_MATCH": constant,
    "SEQUENCE_LENGTH": lambda value: (type(value), len(value)),
    "EMPTY_NN_MODULE_HOOKS_DICT": lambda value: (type(value), len(value)),
    "DICT_KEYS_MATCH": lambda value: (type(value), list(map(constant, value))),
    "DICT_CONTAINS": lambda value, key, invert=False: key in value,
    "DICT_NOT_CONTAINS": lambda value, key: key in value,
    "NOT_PRESENT_IN_GENERIC_DICT": lambda value, attr: attr in vars(value),
}
"""Kind of guard -> what it compares."""
assert "TYPE_MATCH" in vars(GuardBuilder), "Dynamo's guards have other names"


def equal(a: Any, b: Any) -> bool:
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # values that cannot be compared
        return False
