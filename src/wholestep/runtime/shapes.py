"""Shapes: which sizes of a batch have been seen, and when one becomes symbolic.

A first shape is compiled as it is. A second one (the last, ragged batch) runs at once, interpreted. When a dimension has been
seen with three sizes it becomes one symbol, shared by all dimensions that always had the same size, and one graph serves all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Shapes = tuple[tuple[int, ...], ...]

SIZES_BEFORE_SYMBOLIC = 3


def symbolic_dims(seen: Sequence[Shapes]) -> list[dict[int, str]] | None:
    """Per tensor, {dimension: symbol} for what varied over `seen`; None while no dimension had enough sizes."""
    histories: dict[tuple[int, ...], str] = {}
    dims: list[dict[int, str]] = []
    enough = False
    for leaf in range(len(seen[0])):
        found: dict[int, str] = {}
        for dim in range(len(seen[0][leaf])):
            history = tuple(shapes[leaf][dim] for shapes in seen)
            if len(set(history)) < 2:
                continue
            enough = enough or len(set(history)) >= SIZES_BEFORE_SYMBOLIC
            found[dim] = histories.setdefault(history, f"size{len(histories)}")
        dims.append(found)
    return dims if enough else None


def all_symbolic(shapes: Shapes) -> list[dict[int, str]]:
    """Every dimension a symbol of its own."""
    return [{d: f"size{i}_{d}" for d in range(len(shape))} for i, shape in enumerate(shapes)]


def may_vary(shapes: Shapes, dims: Sequence[dict[int, str]]) -> bool:
    """A size of one is taken for a fact while tracing."""
    return all(shapes[leaf][d] > 1 for leaf, found in enumerate(dims) for d in found)


def fits(
    shapes: Shapes, dims: Sequence[dict[int, str]], template: Shapes, symbols: dict[str, Any], guards: Sequence[Any]
) -> bool:
    """Whether a symbolic graph traced at `template` may run on `shapes`: same static sizes, consistent symbols, guards hold."""
    values: dict[str, int] = {}
    for shape, found, known in zip(shapes, dims, template, strict=True):
        for dim, size in enumerate(shape):
            if dim not in found:
                if size != known[dim]:
                    return False
            elif values.setdefault(found[dim], size) != size or size < 2:
                return False
    # the symbol as it was made: the trace may have set it equal to another, or to a number, which is what the guards tell
    replacements = {symbols[name].node._expr: size for name, size in values.items()}
    return all(bool(guard.xreplace(replacements)) for guard in guards)
