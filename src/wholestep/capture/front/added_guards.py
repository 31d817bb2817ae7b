"""Guards that Dynamo leaves out, added to captures that are for us.

- One object at two places: guarded by Dynamo only if both are found in arguments, or both in globals. A config that a layer
  holds and a global names could be replaced in the layer without notice.
- A key that was looked up and is missing, which the code catches: guarded by Dynamo for `in` and `get` only; and not at all
  where the key was made while looking (the weak reference by which a WeakKeyDictionary finds an object).
- Variables of a function's module: Dynamo looks for the module by its name, and finds another one where a file was loaded twice,
  or without a word to `sys.modules`, or where a function came with variables of its own (pickled by value).
- Attributes of numbers, texts, tuples and dictionaries (members of an enum, configs whose keys are attributes) that a module
  holds: Dynamo takes these for immutable, or looks at their keys alone, and skips the guards below while the module's own
  tables are untouched. Where there are such guards none is skipped.
- What methods of an object close over, and their defaults, where Dynamo knows the method by its class alone: of objects that the
  loss makes, and operators of all. It would take these values for constants, and lose what is written to them.
- Tuples and sets of plain values, and 0.0: compared by `==` alone, for which 1, 1.0 and True are one, and so are 0.0 and -0.0;
  and so are two sets that are walked over in another order.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo import guards as tree
from torch._dynamo.guards import GuardBuilder, GuardManagerWrapper, get_verbose_code_parts
from torch._dynamo.source import DictGetItemSource, GlobalSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables import ConstDictVariable, UserFunctionVariable, builder

from wholestep.capture.front.assumed import assuming
from wholestep.capture.front.growing import growing
from wholestep.capture.front.unguardable import is_users


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


def _found_by_made_keys(plain: Callable[..., None]) -> Callable[..., None]:
    def guard(self: Any, tx: Any, args: Any) -> None:
        made = args[0].source is None and not args[0].is_python_constant()
        if made and getattr(growing, "on", False) and self.source and not tx.output.side_effects.is_modified(self):
            self.install_dict_keys_match_guard()
        plain(self, tx, args)

    return guard


def _variables_of(plain: Callable[..., Any]) -> Callable[..., Any]:
    def find(self: Any, name: str) -> Any:
        table = self.f_globals
        module = sys.modules.get(table.get("__name__", ""))
        if not getattr(growing, "on", False) or getattr(module, "__dict__", None) is table:
            return plain(self, name)
        place = GlobalSource(
            self.output.install_global_by_id("___unnamed_scope", table)
        )  # as Dynamo does without a name
        return table, builder.VariableBuilder(self, place)(table), DictGetItemSource(place, name)

    return find


def _with_a_place(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Dynamo's for functions; one that is found nowhere is named in the trace's own globals while it runs."""

    @functools.wraps(plain)
    def placed(self: Any, tx: Any, *args: Any) -> Any:
        holds = self.fn.__closure__ or self.fn.__defaults__ or self.fn.__kwdefaults__ or self.fn.__dict__
        if not getattr(growing, "on", False) or self.source is not None or not holds or not is_users(self.fn.__code__):
            return plain(self, tx, *args)
        table, place = vars(self), GlobalSource(tx.output.install_global_by_id(f"___{self.fn.__name__}", self.fn))
        kept = {name: table[name] for name in ("source", "source_fn") if name in table}
        table.update(dict.fromkeys(kept, place))
        try:
            return plain(self, tx, *args)
        finally:
            table.update(kept)

    return placed


def _managers(node: Any) -> Iterator[Any]:
    """A guard manager and all below it."""
    yield node
    below = list(node.get_child_managers())
    if isinstance(node, tree.DictGuardManager):
        below += [manager for pair in node.get_key_value_managers().values() for manager in pair if manager is not None]
    for child in below:
        yield from _managers(child)


_TORCH = os.path.dirname(torch.__file__)


def _strictly(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def guard_equal(self: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, guard, *args, **kwargs)
        value = self.get(guard) if getattr(assuming, "on", False) else None
        told = (type(value) in (tuple, set, frozenset) and value) or (type(value) is float and value == 0)
        if told and not (
            guard.user_stack and guard.user_stack[-1].filename.startswith(_TORCH)
        ):  # strides of its layers
            known = _written(value)
            code = f"{guard.name() if callable(guard.name) else guard.name} == {value!r}"
            self.get_guard_manager(guard).add_lambda_guard(
                lambda found: _written(found) == known, get_verbose_code_parts(code, guard), guard.user_stack
            )

    return guard_equal


def _written(value: Any) -> Any:
    """Numbers with their kind and sign, tuples entry by entry, sets in their order; all else was compared already."""
    if type(value) is tuple:
        return [*map(_written, value)]
    if type(value) in (set, frozenset):
        return [entry if type(entry) is str else _written(entry) for entry in value]
    return repr(value) if type(value) in (int, float, bool, complex) else None


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
GuardBuilder.EQUALS_MATCH = _strictly(GuardBuilder.EQUALS_MATCH)
builder.make_dupe_guard = _one_object(builder.make_dupe_guard)
ConstDictVariable.getitem_const_raise_exception_if_absent = _looked_up(
    ConstDictVariable.getitem_const_raise_exception_if_absent
)
ConstDictVariable.install_dict_contains_guard = _found_by_made_keys(ConstDictVariable.install_dict_contains_guard)
UserFunctionVariable.bind_args = _with_a_place(UserFunctionVariable.bind_args)
UserFunctionVariable.var_getattr = _with_a_place(UserFunctionVariable.var_getattr)
InliningInstructionTranslator.get_globals_source_and_value = _variables_of(
    InliningInstructionTranslator.get_globals_source_and_value
)
