"""What a loss writes and Dynamo replays too late, elsewhere or not at all: refused by name.

The replay follows the graph, and the update is part of the graph: `optimizer.param_groups[0]["lr"] = ...` and `p.grad = ...`
inside of the loss would miss it. An attribute that was written to a class is not seen through its objects until then; an object
that is given the `__dict__` of another one shares it only while it is traced; a set of a class of one's own is not written to.
Nor are attributes of an object that Dynamo only reads: the optimizer's.
What is written through the `__dict__` of a module of Python, or read of an object through a slot's descriptor, goes past what
Dynamo has noted.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import TensorVariable, UnspecializedNNModuleVariable, user_defined
from torch._dynamo.variables.base import AttributeMutationExisting, VariableTracker

from wholestep.capture.front.assumed import follow_instruction
from wholestep.capture.front.growing import growing

_SETS: Any = getattr(user_defined, "UserDefinedSetVariable", ())


def read_by_the_update(optimizer: Any) -> Iterable[Any]:
    """Containers that the captured update reads at every step, before the replay."""
    groups = [] if optimizer is None else optimizer.param_groups
    return [groups, *groups, *(group["params"] for group in groups)]


def _refuse(what: str) -> None:
    unimplemented(gb_type=what, context="", explanation="", hints=[])


def _replaying(plain: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(growing, "on", False):
            if getattr(growing, "stale", None):  # told here: Dynamo catches what is raised while it looks into a class
                _refuse(growing.stale)
            of_the_update = {id(held) for held in getattr(growing, "update", ())}
            tables = {id(held) for held in self.keepalive if isinstance(held, dict) and "__builtins__" in held}
            replayed = {id(kept) for kept in self.id_to_variable.values()}
            for kept in self.store_attr_mutations:
                if isinstance(kept.mutation_type, AttributeMutationExisting) and id(kept) not in replayed:
                    kind = kept.python_type().__qualname__
                    _refuse(f"attributes of an object of class {kind} are written by the loss, and not replayed")
            for place, kept in self.id_to_variable.items():
                if place in tables and self.is_modified(kept):
                    _refuse("a module's __dict__ is written to by the loss; write its attributes (setattr)")
                if place in of_the_update and self.is_modified(kept):
                    _refuse("the loss writes to the groups of the optimizer; do it before the step")
                if isinstance(kept, _SETS) and kept.source is not None and _is_written(self, kept):
                    _refuse(
                        f"a set of class {type(kept.value).__qualname__} is written to, which is not replayed; use a set"
                    )
        return plain(self, *args, **kwargs)

    return write


def _is_written(effects: Any, kept: Any) -> bool:
    held = getattr(kept, "_base_vt", None) or getattr(kept, "_set_vt", None)
    return held is not None and effects.is_modified(held)


def _storing(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def store(tx: Any, inst: Any) -> None:
        if getattr(growing, "on", False):
            owner, value = tx.stack[-1], tx.stack[-2]
            if inst.argval == "__dict__" and value.source is not None:
                _refuse("an object is given the __dict__ of another one; copy what it holds")
            if inst.argval == "grad" and isinstance(owner.realize(), TensorVariable) and not _is_none(value):
                _refuse("a gradient is given to a tensor inside of the loss; use a hook, or do it behind the step")
        plain(tx, inst)

    return store


def _is_none(variable: Any) -> bool:
    return variable.is_python_constant() and variable.as_python_constant() is None


def _looking(plain: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Any, tx: Any, name: str) -> Any:
        if getattr(growing, "on", False):
            kind: Any = self.value if isinstance(self.value, type) else type(self.value)
            for kept, names in tx.output.side_effects.store_attr_mutations.items():
                cls: Any = getattr(kept, "value", None)
                own = cls is self.value and name != "__dict__"
                inherited = isinstance(cls, type) and cls in (*kind.__mro__, *type(kind).__mro__)
                if inherited and not own and (name in names or name == "__dict__"):
                    told = f"{cls.__qualname__}.{name} is written by the loss, and then read through an object or another class"
                    growing.stale = f"{told}; read {cls.__qualname__}.{name}"
        return plain(self, tx, name)

    return look


SideEffects.codegen_update_mutated = _replaying(SideEffects.codegen_update_mutated)
follow_instruction("STORE_ATTR", _storing)
for _kind in (
    user_defined.UserDefinedObjectVariable,
    user_defined.UserDefinedClassVariable,
    UnspecializedNNModuleVariable,
):
    if "var_getattr" in vars(_kind):
        _kind.var_getattr = _looking(_kind.var_getattr)


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if getattr(growing, "on", False) and name == "__get__" and args:
            owner = args[0].realize()
            if isinstance(_descriptor(self), _OF_C) and tx.output.side_effects.has_pending_mutation(owner):
                _refuse(
                    f"an object is written to and then read through a descriptor ({_descriptor(self).__name__}) of its class, "
                    "which is not traced; read the attribute"
                )
        return plain(self, tx, name, args, kwargs)

    return call


def _descriptor(variable: Any) -> Any:
    return vars(variable).get("descriptor", vars(variable).get("value"))


_OF_C = (types.MemberDescriptorType, types.GetSetDescriptorType)
VariableTracker.call_method = _calling(VariableTracker.call_method)
