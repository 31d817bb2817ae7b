"""Containers that a loss writes to or looks into, and which Dynamo replays or compares in another way than Python does.

- An OrderedDict of which only the order changes (`move_to_end`) would be left as it was: it is written anew.
- A set of a class of the user's own is not written to at all; objects as keys are compared by who they are, or field by field,
  whatever `__eq__` they have; an object that is given the attributes of another one shares them only while it is traced: refused.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import ConstDictVariable, UserDefinedObjectVariable, user_defined
from torch._dynamo.variables.misc import StringFormatVariable

from wholestep import compat
from wholestep.capture.front.assumed import follow_instruction
from wholestep.capture.front.growing import growing

_SETS: Any = getattr(user_defined, "UserDefinedSetVariable", ())


def _refuse(what: str) -> None:
    unimplemented(gb_type=what, context="", explanation="", hints=[])


def _in_another_order(plain: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def has_new_items(self: Any) -> bool:
        now, before = [key.vt for key in self.items], list(self.original_items)
        return plain(self) or (now != before and set(now) == set(before) and getattr(growing, "on", False))

    return has_new_items


def _with_sets(plain: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(growing, "on", False):
            for kept in self.id_to_variable.values():
                if isinstance(kept, _SETS) and kept.source is not None and _is_written(self, kept):
                    _refuse(
                        f"a set of class {type(kept.value).__qualname__} is written to, which is not replayed; use a set"
                    )
        return plain(self, *args, **kwargs)

    return write


def _is_written(effects: Any, kept: Any) -> bool:
    held = getattr(kept, "_base_vt", None) or getattr(kept, "_set_vt", None)
    return held is not None and effects.is_modified(held)


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


def _sharing(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def store(tx: Any, inst: Any) -> None:
        if getattr(growing, "on", False) and inst.argval == "__dict__" and tx.stack[-2].source is not None:
            _refuse("an object is given the __dict__ of another one; copy what it holds")
        plain(tx, inst)

    return store


if hasattr(ConstDictVariable, "has_new_items"):
    ConstDictVariable.has_new_items = _in_another_order(ConstDictVariable.has_new_items)
SideEffects.codegen_update_mutated = _with_sets(SideEffects.codegen_update_mutated)
compat.HashedVariable.__eq__ = _compared_as_keys(compat.HashedVariable.__eq__)
compat.HashedVariable.__init__ = _hashed(compat.HashedVariable.__init__)
follow_instruction("STORE_ATTR", _sharing)
