"""Amounts that may depend on sizes not known yet: a Python int, or a sympy expression over the graph's symbols.

In: sizes and tensors of `meta["val"]`. Out: counts of elements and bytes. A symbolic size gives its expression and nothing is
asked of it: no hint is read and no guard is added, so one symbolic graph can be costed at any size afterwards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import sympy
import torch

Amount: TypeAlias = Any
"""An int, or a sympy expression over the symbols of the graph."""


def size(value: Any) -> Amount:
    """An int as it is; a symbolic int as its expression."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_number else expression
    return int(value)


def shape(tensor: torch.Tensor) -> tuple[Amount, ...]:
    return tuple(size(entry) for entry in tensor.shape)


def product(sizes: Iterable[Amount]) -> Amount:
    return functools.reduce(operator.mul, sizes, 1)


def numel(tensor: torch.Tensor) -> Amount:
    return product(shape(tensor))


def stored_bytes(tensor: torch.Tensor) -> Amount:
    """Bytes of the distinct elements: a dimension of stride 0 (an expanded one) holds one element, however long it is."""
    distinct = (
        size(n) for n, stride in zip(tensor.shape, tensor.stride()) if not (isinstance(stride, int) and stride == 0)
    )
    return product(distinct) * tensor.element_size() if _holds_something(tensor) else 0


def _holds_something(tensor: torch.Tensor) -> bool:
    return not any(isinstance(n, int) and n == 0 for n in tensor.shape)


def largest(amounts: Iterable[Amount]) -> Amount:
    """The largest; an expression where that depends on symbols."""
    listed = list(amounts)
    if all(isinstance(entry, int | float) for entry in listed):
        return max(listed, default=0)
    return sympy.Max(*listed)


def smallest(amounts: Iterable[Amount]) -> Amount:
    listed = list(amounts)
    if all(isinstance(entry, int | float) for entry in listed):
        return min(listed)
    return sympy.Min(*listed)


def is_known(amount: Amount) -> bool:
    """Whether it is a number already."""
    return not isinstance(amount, sympy.Basic) or bool(amount.is_number)


def evaluate(amount: Amount, sizes: Mapping[str, int]) -> float:
    """The number at these sizes, by name of the symbol. A symbol without a size is a KeyError naming it."""
    if not isinstance(amount, sympy.Basic):
        return amount
    missing = sorted(symbol.name for symbol in amount.free_symbols if symbol.name not in sizes)
    if missing:
        raise KeyError(f"no size given for {', '.join(missing)}")
    value = amount.subs({symbol: sizes[symbol.name] for symbol in amount.free_symbols})
    return int(value) if value.is_Integer else float(value)
