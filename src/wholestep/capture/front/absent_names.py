"""Names that an object lacks, where code of the user's own may meet that in a way which Dynamo does not guard.

`try: w = batch.weight` with `except AttributeError`, `vars(config).get("weight")`, a `__getattr__` of one's own,
`getattr(function, "weight", 1.0)`: the object may gain the name, or another object that has it may take its place, as every
batch does. So the names are guarded, at the place.
"""

from __future__ import annotations

import argparse
import functools
import types
from collections import ChainMap, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch._C._dynamo import guards as tree
from torch._dynamo.guards import get_verbose_code_parts

from wholestep.capture.front.unguardable import is_users, is_users_class

_TABLES = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_MOST_NAMES = 1024


def guard_names(guards: Any, codes: Iterable[types.CodeType], read: Mapping[Any, Any] | None = None) -> None:
    """Add guards to those of a capture; `read`: the places that they look at, and what is there, where that is known already."""
    everywhere, asks = looks_for_absence(codes) or reads_tables(codes), asks_for_names(codes)
    if read is None and not (everywhere or asks or any(code.co_name == "__getattr__" for code in codes)):
        return
    make = functools.partial(_same_names, everywhere=everywhere, asks=asks)
    for place in dict.fromkeys(places_of(guards)) if read is None else read:
        if read is None or _wanted(read[place], everywhere, asks):
            guards.add(place.make_guard(make))


def places_of(guards: Iterable[Any]) -> Iterator[Any]:
    """What guards look at, and what that is reached through."""
    for guard in guards:
        place = guard.originating_source
        while place is not None:
            yield place
            place = getattr(place, "base", None)


def _wanted(value: Any, everywhere: bool, asks: bool) -> bool:
    if isinstance(value, type | types.ModuleType):  # known by who it is
        return False
    told = asks if isinstance(value, types.FunctionType | nn.Parameter) else everywhere
    return (told or answers_for_missing(value)) and bool(_names(value))


def _same_names(builder: Any, guard: Any, everywhere: bool, asks: bool) -> None:
    """A guard as Dynamo builds them."""
    value = builder.get(guard)
    known = _names(value)
    if not _wanted(value, everywhere, asks) or sum(map(len, known)) > _MOST_NAMES:
        return
    manager, place = builder.get_guard_manager(guard), builder.arg_ref(guard)
    if isinstance(manager, tree.DictGuardManager):  # takes no guards of its own
        if hasattr(value, "__dict__"):
            code = f"{{*vars({place})}} == {known[0]}"
            builder.add_python_lambda_leaf_guard_to_root([code], get_verbose_code_parts(code, guard))
    else:
        code = get_verbose_code_parts(f"names in {place} == {known}", guard)
        manager.add_lambda_guard(lambda found: _names(found) == known, code, guard.user_stack)


def _names(value: Any) -> list[set[Any]]:
    """Of its attributes, of the tables that torch keeps among a module's, of slots that are filled; of a chain's keys."""
    if isinstance(value, ChainMap):
        return [*map(set, value.maps)]
    slots = [
        slot for cls in type(value).__mro__ if is_users_class(cls) for slot in vars(cls).values() if _is_slot(slot)
    ]
    names = [{slot.__name__ for slot in slots if _is_filled(slot, value)}] if slots else []
    return [*map(set, tables_of(value)), *names] if isinstance(getattr(value, "__dict__", None), dict) else names


def _is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType)


def _is_filled(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def tables_of(value: Any) -> Iterator[dict]:
    """An object's attributes, and the dictionaries that torch keeps among a module's: parameters, buffers, modules, hooks."""
    table = vars(value)
    yield table
    yield from (held for name, held in table.items() if type(held) in (dict, OrderedDict) and name in _TABLES)


def answers_for_missing(value: Any) -> bool:
    """Whether a `__getattr__` of the user's own is asked for what an object lacks, which Dynamo does not guard."""
    found = getattr(type(value), "__getattr__", None)
    code = getattr(found, "__code__", None)
    return is_users(code) if code is not None else found in (dict.__getitem__, dict.get)


def looks_for_absence(codes: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's own catches that something is missing, which Dynamo does not guard."""
    caught = {"KeyError", "AttributeError", "LookupError", "IndexError", "NameError"}
    return any(not caught.isdisjoint(code.co_names) and is_users(code) for code in codes)


def asks_for_names(codes: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's own asks functions or parameters for attributes; Dynamo guards that of all other objects."""
    asking = any(not {"getattr", "hasattr"}.isdisjoint(code.co_names) and is_users(code) for code in codes)
    return asking or looks_for_absence(codes)


def reads_tables(codes: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's own reads `vars(x)` or `x.__dict__`, or asks what is in an `argparse.Namespace`: Dynamo guards
    the names that it finds there, none that are missing."""
    return any(
        (is_users(code) or code.co_filename == argparse.__file__)
        and ("__dict__" in (*code.co_names, *code.co_consts) or "vars" in code.co_names)
        for code in codes
    )
