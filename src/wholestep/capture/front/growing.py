"""Lists that a loss only appends to, and lines that it logs: done after the graph has run, at every step.

`losses.append(loss.item())` inside a loss makes Dynamo guard the length of the list, so every step would be captured anew.
Once a list was seen to grow, `Front` names it here. Appending to it is then left to the code that runs after the graph, as
Dynamo does with `print`; should the loss look at the list in any other way, its length is guarded after all.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, GetItemSource, GlobalSource
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import ListVariable, SizeVariable, TupleVariable
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable
from torch._dynamo.variables.tensor import SymNodeVariable

growing = threading.local()
"""`growing.lists`: where the lists are found, as Dynamo writes it; `growing.on`: whether a capture is ours; `growing.update`:
what the captured update reads; `growing.stale`: what was read too early, in words."""


class GrowingList(ListVariable):
    """A list that has only been appended to so far; it turns into an ordinary one when anything else is done with it."""

    def __init__(self, items: list[Any], **options: Any) -> None:
        self.__dict__["appended"] = []
        super().__init__(items, **options)

    @property
    def items(self) -> list[Any]:
        if "builder" in self.__dict__:
            self._read()
            return self.__dict__["items"]
        return self.__dict__.get("items", [])

    @items.setter
    def items(self, value: list[Any]) -> None:
        self.__dict__["items"] = value

    def _read(self) -> None:
        builder, value = self.__dict__.pop("builder"), self.__dict__.pop("live")
        builder.install_guards(GuardBuilder.SEQUENCE_LENGTH)
        source = builder.get_source()
        items = [LazyVariableTracker.create(item, source=GetItemSource(source, i)) for i, item in enumerate(value)]
        appended = self.__dict__.pop("appended")
        self.__dict__["items"] = items + [item for _, item in appended]
        output = builder.tx.output
        if appended:
            output.side_effects.mutation(self)
            late = output.root_tx.debug_locals
            late[:] = [entry for entry in late if all(entry is not mine for mine, _ in appended)]
        self.__class__ = ListVariable

    def call_method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name == "append" and len(args) == 1 and not kwargs and "builder" in self.__dict__:
            source = AttrSource(self.source, "append")
            entry = (DebuggingVariable(self.__dict__["live"].append, source=source), list(args))
            tx.output.root_tx.debug_locals.append(entry)
            self.__dict__["appended"].append((entry, args[0]))
            return ConstantVariable.create(None)
        self.items  # noqa: B018 - reading makes it an ordinary list
        return ListVariable.call_method(self, tx, name, args, kwargs)


def _wrap_listlike(self: VariableBuilder, value: Any) -> Any:
    name = self.source.name() if callable(self.source.name) else self.source.name
    if type(value) is not list or name not in getattr(growing, "lists", ()):
        return _plain_wrap(self, value)
    self.install_guards(GuardBuilder.TYPE_MATCH)
    made = GrowingList([], source=self.source)
    made.__dict__.update(builder=self, live=value)
    return self.tx.output.side_effects.track_mutable(value, made)


def _log(self: DebuggingVariable, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`print` and `warnings.warn`: in a function that is inlined torch (2.11 to 2.13) loses them, elsewhere their keywords."""
    if getattr(growing, "on", False) and self.value is warnings.warn:
        args, kwargs = _warning(args, kwargs)
    if getattr(growing, "on", False) and self.value is print and kwargs:
        self, kwargs = _printing(self, tx, kwargs)
    before = len(tx.debug_locals)
    result = _plain_log(self, tx, args, kwargs)
    if getattr(growing, "on", False) and tx is not tx.output.root_tx:
        tx.output.root_tx.debug_locals += tx.debug_locals[before:]
    return result


def _printing(self: DebuggingVariable, tx: Any, kwargs: dict[str, Any]) -> tuple[DebuggingVariable, dict[str, Any]]:
    """`print` with its keywords, for what is written behind the graph; a `file` is none that could be named there."""
    if not all(value.is_python_constant() for value in kwargs.values()):
        return self, kwargs
    written = functools.partial(print, **{name: value.as_python_constant() for name, value in kwargs.items()})
    return DebuggingVariable(written, source=GlobalSource(tx.output.install_global_by_id("___print", written))), {}


def _warning(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """`category` and `stacklevel` by place: what is written behind the graph is called by place."""
    given = dict(zip(("message", "category", "stacklevel"), args)) | kwargs
    if len(args) > 3 or set(given) - {"message", "category", "stacklevel"}:
        return args, kwargs
    others = {"category": ConstantVariable.create(None), "stacklevel": ConstantVariable.create(1)}
    return list(({"message": given["message"]} | others | given).values()), {}


def _write(self: LoggingLoggerVariable, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A line to a logger: written after the graph has run, at every step, as eager writes it."""
    plain = getattr(growing, "on", False) and name in _LEVELS and not kwargs and self.source is not None
    if (
        plain
        and not self.value.name.startswith("transformers")
        and DebuggingVariable.can_reorder_logs(self.value, args, kwargs)
    ):
        method = DebuggingVariable(getattr(self.value, name), source=AttrSource(self.source, name))
        tx.output.root_tx.debug_locals.append((method, list(args)))
        return ConstantVariable.create(None)
    return _plain_write(self, tx, name, args, kwargs)


def _can_write(plain: Callable[..., bool]) -> Callable[..., bool]:
    """Numbers that vary, or that are read from tensors, are written as texts of them are; classes of warnings by name; sizes, and
    other tuples, by what they hold."""

    def can(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        known = [arg.realize() if isinstance(arg, LazyVariableTracker) else arg for arg in args]
        if getattr(growing, "on", False):
            parts = chain.from_iterable(map(_parts, known))
            known = [part for part in parts if not isinstance(part, SymNodeVariable) and not _is_category(part)]
        return plain(function, known, kwargs)

    return can


def _parts(arg: Any) -> Iterator[Any]:
    known = arg.realize() if isinstance(arg, LazyVariableTracker) else arg
    if type(known) in (TupleVariable, SizeVariable):
        yield from chain.from_iterable(map(_parts, known.items))
    else:
        yield known


def _is_category(arg: Any) -> bool:
    found = arg.as_python_constant() if arg.is_python_constant() else None
    return isinstance(found, type) and issubclass(found, Warning)


_LEVELS = ("debug", "info", "warning", "error", "critical", "exception", "log")
_plain_wrap, _plain_log, _plain_write = (
    VariableBuilder.wrap_listlike, DebuggingVariable.call_function, LoggingLoggerVariable.call_method,
)  # fmt: skip
VariableBuilder.wrap_listlike = _wrap_listlike
DebuggingVariable.call_function = _log
DebuggingVariable.can_reorder_logs = staticmethod(_can_write(DebuggingVariable.can_reorder_logs))
LoggingLoggerVariable.call_method = _write
