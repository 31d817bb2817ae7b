"""Two objects that a loss compares and that are two: captured anew where they become one.

`if layer is self.head`, `module in self.frozen`, `a == b` of objects without an `__eq__`: Dynamo guards that one object at two
places stays one object, and takes two for two for good.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import _get_closure_vars, get_verbose_code_parts
from torch._dynamo.variables import (
    ConstantVariable,
    FunctoolsPartialVariable,
    LazyVariableTracker,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._guards import Guard, Source
from torch._guards import TracingContext as Context

from wholestep.capture.front.growing import growing

_BY_VALUE = (int, float, str, bytes, torch.Tensor, type(None))
"""What is guarded by its value; which tensors are one and the same is guarded by Dynamo."""


def keep_two(values: Sequence[Any], how: str) -> None:
    """Guard that what was compared stays two objects; `how`: `is`, `==`, or `in`, the first with what the second holds."""
    if not getattr(growing, "on", False):
        return
    one, other = values
    place = _place(one)
    for held in _held(other) if how == "in" else [other]:
        found = _place(held)
        if place is not None and found is not None and found != place:
            Context.get().guards_context.dynamo_guards.add(place.make_guard(functools.partial(_are_two, other=found)))
        if _nowhere(one, how) and _nowhere(held, how):
            what = "two tuples, or two of functools.partial, are compared by who they are, which is not traced"
            unimplemented(gb_type=what, context="", explanation="", hints=[])


def _nowhere(variable: Any, how: str) -> bool:
    """What Dynamo does not remember the place of. Tuples are compared by what they hold, but for `is`."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    if isinstance(known, FunctoolsPartialVariable):
        return True
    constant = isinstance(known, ConstantVariable) and type(known.value) is tuple
    return how == "is" and (constant or type(known) is TupleVariable)


def _held(container: Any) -> Iterator[Any]:
    """What a list or tuple holds, as far as Dynamo has looked."""
    found = container.realize() if isinstance(container, LazyVariableTracker) else container
    items = getattr(found, "items", None)
    yield from items if isinstance(items, list | tuple) else ()


def _place(variable: Any) -> Source | None:
    """Where an object was read; None for values, and for what the loss itself makes."""
    place = variable.source
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return None if isinstance(variable.original_value(), _BY_VALUE) else place
        variable = variable.realize()
    if isinstance(variable, NumpyNdarrayVariable):
        return place
    by_value = isinstance(variable, ConstantVariable) and isinstance(variable.value, _BY_VALUE)
    return None if by_value or isinstance(variable, SymNodeVariable | TensorVariable) else place


def _are_two(builder: Any, guard: Guard, other: Source) -> None:
    """A guard as Dynamo builds them."""
    one, two = builder.arg_ref(guard), builder.arg_ref(other.name() if callable(other.name) else other.name)
    scope = {**_get_closure_vars(), **builder.scope}
    if eval(one, scope) is not eval(two, scope):  # as Dynamo itself evaluates them
        code = [f"{one} is not {two}"]
        builder.add_python_lambda_leaf_guard_to_root(code, get_verbose_code_parts(code, guard))
