"""Containers that a loss looks into, and which Dynamo orders or compares in another way than Python does.

- An OrderedDict of which only the order changes (`move_to_end`) would be left as it was: it is written anew.
- Objects as keys are compared by who they are, or field by field, whatever `__eq__` their class has; a text of a number that varies
  is another key than it will be: refused.
- `dict(x)` of what has keys and is no Mapping to Dynamo (a ParameterDict) would take the keys themselves for pairs, without a word
  where these are texts of two letters: it is made of keys and values.
- `__getattr__ = dict.__getitem__` (configs whose keys are attributes), which Dynamo does not call: followed as Python's own.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo import variables
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstDictVariable,
    UserDefinedObjectVariable,
    UserFunctionVariable,
    user_defined,
)
from torch._dynamo.variables.misc import StringFormatVariable

from wholestep.capture.front import mends
from wholestep.capture.front.growing import growing


def _refuse(what: str) -> None:
    unimplemented(gb_type=what, context="", explanation="", hints=[])


def _in_another_order(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def has_new_items(self: Any) -> bool:
        now, before = [key.vt for key in self.items], list(self.original_items)
        if now != before and set(now) == set(before) and getattr(growing, "on", False):
            self.should_reconstruct_all = True  # torch 2.11 does not say so itself where it moves a key
        return plain(self)

    return has_new_items


def _compared_as_keys(plain: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def equal(self: Any, other: Any) -> bool:
        if getattr(growing, "on", False) and isinstance(other, type(self)) and _value(self) is not _value(other):
            for key in (self, other):
                _refuse_own_equality(key.vt)
        return plain(self, other)

    return equal


def _value(key: Any) -> Any:
    return getattr(key.vt, "value", key.vt)


def _hashed(plain: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, key: Any) -> None:
        plain(self, key)
        if getattr(growing, "on", False):
            if isinstance(self.vt, StringFormatVariable):
                _refuse("a text that is made of a number that varies is a key")
            if isinstance(self.vt, user_defined.FrozenDataClassVariable) and not _by_all_fields(self.vt.value):
                _refuse_own_equality(self.vt)

    return init


def _by_all_fields(value: Any) -> bool:
    """Whether a dataclass has the `__eq__` and the `__hash__` that Dynamo takes it to have."""
    methods = (type(value).__eq__, type(value).__hash__)
    generated = all("__create_fn__" in getattr(method, "__qualname__", "") for method in methods)
    return generated and all(field.compare and field.hash is not False for field in dataclasses.fields(value))


def _refuse_own_equality(key: Any) -> None:
    """Two keys of equal hash are about to be compared."""
    if not isinstance(key, UserDefinedObjectVariable):
        return
    method = type(key.value).__eq__
    followed = isinstance(key, user_defined.FrozenDataClassVariable) and _by_all_fields(key.value)
    if isinstance(method, types.FunctionType) and not followed:
        _refuse(
            f"objects of class {type(key.value).__qualname__} are keys, and are compared by an __eq__ that is not traced"
        )


def _entries(mapping: Any) -> list[tuple[Any, Any]]:
    return [(key, mapping[key]) for key in mapping.keys()]  # noqa: SIM118


def _held(mapping: Any) -> list[tuple[Any, Any]]:
    return list(dict.items(mapping))


def _way_of(given: Any) -> Callable[[Any], Any] | None:
    """How Python makes a dictionary of an object, where Dynamo would not: of a dictionary by what it holds, whatever `items` its
    class has, unless it is walked over in a way of its own; of what else has keys by these."""
    kind = type(given)
    own_walk, own_items = (isinstance(getattr(kind, n, None), types.FunctionType) for n in ("__iter__", "items"))
    if issubclass(kind, dict) and not own_walk:
        return _held if own_items else None
    return None if inspect.getattr_static(given, "keys", None) is None else _entries  # no code of the user's runs


def _made_of_entries(plain: Callable[..., Any]) -> Callable[..., Any]:
    def make(tx: Any, made: type, *args: Any, **kwargs: Any) -> Any:
        given = args[0].realize() if len(args) == 1 and getattr(growing, "on", False) else None
        way = _way_of(given.value) if isinstance(given, UserDefinedObjectVariable) else None
        if way is not None:
            args = (tx.inline_user_function_return(UserFunctionVariable(way), [given], {}),)
        return plain(tx, made, *args, **kwargs)

    return make


if hasattr(ConstDictVariable, "has_new_items"):
    ConstDictVariable.has_new_items = _in_another_order(ConstDictVariable.has_new_items)
mends.HashedVariable.__eq__ = _compared_as_keys(mends.HashedVariable.__eq__)
mends.HashedVariable.__init__ = _hashed(mends.HashedVariable.__init__)
_maker = getattr(variables, "DictBuiltinVariable", BuiltinVariable)  # torch 2.13 has a class of its own for it
_maker.call_custom_dict = staticmethod(_made_of_entries(_maker.call_custom_dict))


def _item(self: dict, name: str) -> Any:
    return dict.__getitem__(self, name)


def _get(self: dict, name: str) -> Any:
    return dict.get(self, name)


KEYS_AS_ATTRIBUTES: dict[Any, Callable[..., Any]] = {dict.__getitem__: _item, dict.get: _get}
"""What a class may have for its `__getattr__` -> the same in Python."""


def _answering(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def look(self: Any) -> Any:
        found = plain(self)
        return KEYS_AS_ATTRIBUTES.get(found, found) if getattr(growing, "on", False) else found

    return look


UserDefinedObjectVariable._check_for_getattr = _answering(UserDefinedObjectVariable._check_for_getattr)
