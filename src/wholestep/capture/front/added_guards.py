"""Guards that Dynamo leaves out, added to captures that are for us.

- One object at two places: guarded by Dynamo only if both are found in arguments, or both in globals. A config that a layer
  holds and a global names could be replaced in the layer without notice.
- A key that was looked up and is missing, which the code catches: guarded by Dynamo for `in` and `get` only.
- Attributes of numbers, texts, tuples and dictionaries (members of an enum, configs whose keys are attributes) that a module
  holds: Dynamo takes these for immutable, or looks at their keys alone, and skips the guards below while the module's own
  tables are untouched. Where there are such guards none is skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch._C._dynamo import guards as tree
from torch._dynamo.guards import GuardBuilder, GuardManagerWrapper
from torch._dynamo.variables import ConstDictVariable, builder

from wholestep.capture.front.assumed import assuming


def _one_object(plain: Callable[..., Any]) -> Callable[..., Any]:
    def guard(place: Any, other: Any) -> Any:
        found = plain(place, other)
        if found is None and getattr(assuming, "on", False) and other and other != place:
            return functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=other)
        return found

    return guard


def _looked_up(plain: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(self: Any, tx: Any, key: Any) -> Any:
        if getattr(assuming, "on", False) and key not in self:
            self.install_dict_contains_guard(tx, [key])
        return plain(self, tx, key)

    return look_up


def _managers(node: Any) -> Iterator[Any]:
    """A guard manager and all below it."""
    yield node
    below = list(node.get_child_managers())
    if isinstance(node, tree.DictGuardManager):
        below += [manager for pair in node.get_key_value_managers().values() for manager in pair if manager is not None]
    for child in below:
        yield from _managers(child)


_OF_OBJECTS = (tree.GetAttrGuardAccessor, tree.GetGenericDictGuardAccessor, tree.TypeGuardAccessor)


def _skipped_in_error(node: Any) -> bool:
    by_keys = node.is_guarded_value_immutable() or isinstance(node, tree.DictGuardManager)
    return by_keys and any(isinstance(accessor, _OF_OBJECTS) for accessor in node.get_accessors())


def _find_skippable(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    def find(self: Any) -> None:
        if not getattr(assuming, "on", False) or not any(map(_skipped_in_error, _managers(self.root))):
            plain(self)

    return find


GuardManagerWrapper.find_tag_safe_roots = _find_skippable(GuardManagerWrapper.find_tag_safe_roots)
builder.make_dupe_guard = _one_object(builder.make_dupe_guard)
ConstDictVariable.getitem_const_raise_exception_if_absent = _looked_up(
    ConstDictVariable.getitem_const_raise_exception_if_absent
)
