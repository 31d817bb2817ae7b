"""Writes through views from which torch does not know the exact way back to what they show. In: a record with writes. Out: the
same, ready for functionalisation, or `CaptureRefused`.

A write into a view becomes a new base there, and how is written down for each kind of view. For most it is exact, as
`select_scatter` is. Not for `expand`: base + (new - old), which rounds, and is NaN wherever the base is infinite, as masks are; not
for `unfold`: zeros where no window is, sums where several are; not for `as_strided` where it shows a place twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from wholestep.errors import CaptureRefused
from wholestep.graph.edit import replace_each
from wholestep.graph.views import shares_memory

aten = torch.ops.aten


def settle_written_views(recorded: fx.GraphModule) -> None:
    """An `expand` that repeats nothing becomes what it shows; views that lose a write are refused."""
    repeats_nothing: set[fx.Node] = set()
    for node in recorded.graph.nodes:
        for view in (view for written in _written(node) for view in _views(written)):
            if view.target is aten.expand.default and _shape(view) == _shape(view.args[0]):
                repeats_nothing.add(view)
            elif why := _loses_writes(view):
                source = (node.meta.get("custom") or {}).get("source")
                raise CaptureRefused(f"a tensor is written through a view {why}; write to a clone of it", where=source)
    shown: dict[fx.Node, fx.Node] = {}
    for node in recorded.graph.nodes:
        if node in repeats_nothing:
            shown[node] = shown.get(node.args[0], node.args[0])
    replace_each(recorded.graph, shown)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            listed = value if isinstance(value, list | tuple) else [value]
            yield from (entry for entry in listed if isinstance(entry, fx.Node))


def _views(node: fx.Node) -> Iterator[fx.Node]:
    """The views through which a value looks at memory, itself first."""
    while shares_memory(node.target) and node.args and isinstance(node.args[0], fx.Node):
        yield node
        node = node.args[0]


def _shape(node: Any) -> list[str]:
    """As text: sizes are equal where they are the same number or the same symbol, and no trace relies on the answer."""
    return [str(size) for size in node.meta["val"].shape]


def _loses_writes(view: fx.Node) -> str | None:
    if view.target is aten.expand.default:
        return "that repeats it (expand)"
    if view.target is aten.unfold.default:
        base, dim, size, step = view.args
        length = base.meta["val"].shape[dim]  # type: ignore[union-attr,index]
        exact = step == size and isinstance(length, int) and length % size == 0  # type: ignore[operator]
        return None if exact else "of windows that overlap or leave something out (unfold)"
    if view.target is aten.as_strided.default and _shows_a_place_twice(view.meta["val"]):
        return "that shows a place of it twice (as_strided)"
    return None


def _shows_a_place_twice(value: torch.Tensor) -> bool:
    """Whether it may. With symbolic sizes it is a view of autograd's own, which does not."""
    if not all(type(number) is int for number in (*value.shape, *value.stride())):
        return False
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
