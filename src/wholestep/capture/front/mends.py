"""What Dynamo does otherwise from version to version, or does for its own callers and not for us.

In: torch. Out: `dynamo.py` calls these once, or around a trace.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wholestep import compat


def _hashed_variable() -> Any:
    """Dynamo's class for keys of dictionaries and members of sets."""
    try:
        from torch._dynamo.variables.hashable import HashableTracker
    except ImportError:
        from torch._dynamo.variables import ConstDictVariable

        return ConstDictVariable._HashableTracker
    return HashableTracker


HashedVariable = _hashed_variable()


def mend_lstm() -> None:
    """torch 2.11 leaves a dimension of one in the last states of an LSTM that it takes apart over time (mended in 2.13)."""
    from torch._decomp import decompositions

    broken = decompositions.one_layer_lstm

    @functools.wraps(broken)
    def one_layer_lstm(*args: Any, **kwargs: Any) -> Any:
        out, states = broken(*args, **kwargs)
        return out, tuple(state.squeeze(0) if state.dim() == 3 else state for state in states)

    if compat.torch_version() < (2, 13):
        decompositions.one_layer_lstm = one_layer_lstm


def name_classes() -> None:
    """`type(weight).__module__`: Dynamo makes no text of it where the class is one of torch's own that it puts into graphs."""
    from torch._dynamo.variables import BuiltinVariable, ConstantVariable, builtin
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    reading = getattr(builtin, "GetAttrBuiltinVariable", BuiltinVariable)  # torch 2.13 has a class of its own for it
    plain = reading.call_function

    @functools.wraps(plain)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        owner = args[0] if len(args) == 2 and getattr(self, "fn", getattr) is getattr else None
        if isinstance(owner, TorchInGraphFunctionVariable) and isinstance(owner.value, type):
            text = getattr(owner.value, args[1].as_python_constant(), None) if args[1].is_python_constant() else None
            if isinstance(text, str):
                return ConstantVariable.create(text)
        return plain(self, tx, args, kwargs)

    reading.call_function = call_function


def unpack_ranges() -> None:
    """`f(*range(2, 5))`: Dynamo hands on (2, 5, 1), what the range is made of, without a word."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables.lists import BaseListVariable, RangeVariable

    class Listed(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, BaseListVariable) and not isinstance(value, RangeVariable)

    # What is no list there is iterated over.
    symbolic_convert.BaseListVariable = Listed("BaseListVariable", (), {})  # type: ignore[misc,assignment]


def guard_classes() -> None:
    """Dynamo guards no class that it reaches through a closure, since `super()` reads a cell: that cell alone is left out."""
    from torch._dynamo.source import CellContentsSource
    from torch._dynamo.variables import builder

    builder.is_from_closure_source = lambda source: (
        isinstance(source, CellContentsSource) and source.freevar_name == "__class__"
    )


def keep_validation() -> None:
    """Dynamo switches the validation of torch.distributions off, for the whole process, when it is first used: not for us."""
    from torch._dynamo.eval_frame import TorchPatcher

    kept = torch.distributions.Distribution._validate_args
    TorchPatcher.patch()  # once per process
    torch.distributions.Distribution.set_default_validate_args(kept)
    # `Categorical.probs`, which validation looks at, is an object that is made for every look (so that Sphinx finds a property):
    # no guard on it would hold
    torch.distributions.utils.lazy_property.__get__ = _lazy_value


def _lazy_value(self: Any, instance: Any, owner: Any = None) -> Any:
    """lazy_property.__get__, but for the first line."""
    if instance is None:
        return self
    with torch.enable_grad():
        value = self.wrapped(instance)
    setattr(instance, self.wrapped.__name__, value)
    return value


def forget_imports() -> None:
    """Dynamo remembers modules by name for the whole process, whatever takes their place in sys.modules later."""
    remembered: Any = getattr(torch._dynamo.symbolic_convert, "_import_module", None)
    if hasattr(remembered, "cache_clear"):
        remembered.cache_clear()


@contextlib.contextmanager
def guards_not_timed() -> Iterator[None]:
    """Dynamo times the guards of every capture for its log, on a flushed processor cache: 20 ms, a fifth of a small capture."""
    from torch._dynamo import guards

    timed = guards.profile_guard_manager
    guards.profile_guard_manager = lambda *_: 0.0
    try:
        yield
    finally:
        guards.profile_guard_manager = timed


def forget_backend(backend: Callable[..., Any]) -> None:
    """Dynamo keeps every backend for as long as the process lives, and with it all that the backend refers to."""
    from torch._dynamo.eval_frame import cached_backends

    for key, kept in list(cached_backends.items()):
        if getattr(kept, "compiler_fn", kept) is backend:
            del cached_backends[key]
