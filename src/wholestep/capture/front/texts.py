"""Texts that are made of Python numbers which vary, and numbers that are rounded to places.

Dynamo takes `f"{number}"` for the number itself where that is an input of its graph (torch 2.13), knows `format(x, ".1f")` as
`str.format`, and leaves `round(number, -1)` of a whole number as it is. Here such a text is made anew at every step, as those of
`loss.item()` are; where the loss looks into it, the number is captured by its value. To compare texts is to look: torch 2.11 takes
a text that is not known yet for unequal to every other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, LazyVariableTracker, SymNodeVariable
from torch._dynamo.variables.misc import StringFormatVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from wholestep.capture.front.assumed import follow_instruction
from wholestep.capture.front.growing import growing

_COMPARES = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.contains)
_CONVERSIONS = ("", "!s", "!r", "!a")
"""As FORMAT_VALUE counts them."""


def _known(variable: Any) -> Any:
    return variable.realize() if isinstance(variable, LazyVariableTracker) else variable


def _text(number: SymNodeVariable, written: str) -> Any:
    return StringFormatVariable.create(f"{{{written}}}", [number], {})


def _formatting(plain: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    def format_value(tx: Any, written: Any, flags: int) -> None:
        if getattr(growing, "on", False):
            tx.stack[-1] = _known(tx.stack[-1])
            if isinstance(tx.stack[-1], SymNodeVariable):
                made = f"{_CONVERSIONS[flags & 3]}:{written.as_python_constant()}"
                tx.push(_text(tx.pop(), made))
                return
        plain(tx, written, flags)

    return format_value


def _comparing(plain: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def compare(tx: Any, inst: Any) -> None:
        tx.stack[-2:] = map(_text_by_value, tx.stack[-2:])
        plain(tx, inst)

    return compare


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in _COMPARES:
            args = [*map(_text_by_value, args)]
        if getattr(growing, "on", False) and self.fn in (format, str, repr, round) and args:
            first, *others = [*map(_known, args), *map(_known, kwargs.values())]
            if self.fn is format:
                return _formatted(first, *others)
            if self.fn is round and others:
                return plain(self, tx, [_whole_by_value(first), *others], {})
            if self.fn in (str, repr) and isinstance(first, SymNodeVariable) and not others:
                return _text(first, "!r" if self.fn is repr else "!s")
        return plain(self, tx, args, kwargs)

    return call


def _formatted(value: Any, written: Any = None) -> Any:
    """`format(value, written)`."""
    made = "" if written is None else written.as_python_constant()
    if isinstance(value, SymNodeVariable):
        return _text(value, f":{made}")
    if not value.is_python_constant():
        unimplemented(gb_type="format() of an object", context="", explanation="", hints=[])
    return ConstantVariable.create(format(value.as_python_constant(), made))


def _text_by_value(text: Any) -> Any:
    """A text of numbers that vary, captured by their values; one of numbers that tensors hold stays as it is, and is refused."""
    if not getattr(growing, "on", False) or not isinstance(text, StringFormatVariable):
        return text
    numbers = [*text.sym_args, *text.sym_kwargs.values()]
    if any(isinstance(number, SymNodeVariable) and free_unbacked_symbols(number.sym_num) for number in numbers):
        return text
    read = [*map(_by_value, text.sym_args)], {name: _by_value(number) for name, number in text.sym_kwargs.items()}
    return StringFormatVariable.create(text.format_string, *read)


def _by_value(number: Any) -> Any:
    return ConstantVariable.create(number.evaluate_expr()) if isinstance(number, SymNodeVariable) else number


def _whole_by_value(number: Any) -> Any:
    """A whole number that varies, captured by its value."""
    whole = isinstance(number, SymNodeVariable) and number.python_type() is int
    return _by_value(number) if whole else number


if hasattr(symbolic_convert.InstructionTranslatorBase, "_format_value"):
    symbolic_convert.InstructionTranslatorBase._format_value = _formatting(
        symbolic_convert.InstructionTranslatorBase._format_value
    )
for _name in ("COMPARE_OP", "CONTAINS_OP"):
    follow_instruction(_name, _comparing)
BuiltinVariable.call_function = _calling(BuiltinVariable.call_function)
