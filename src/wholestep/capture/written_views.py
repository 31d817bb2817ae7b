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
from torch.multiprocessing.reductions import StorageWeakRef

from wholestep.errors import CaptureRefused
from wholestep.graph.edit import replace_each
from wholestep.graph.training_graph import tensors_in
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


_REPEAT = {"expand", "expand_as", "broadcast_to", "broadcast_tensors", "unfold", "as_strided"}
_WRITE = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")),
}


def may_lose_writes(module: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's, which torch.compile makes functional, writes to memory that such a view shows as well."""
    shown, written = set(), set()
    for node in (node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name in _REPEAT:
            shown |= _memory(node)
        elif name in _WRITE or node.kwargs.get("inplace") or (name.endswith("_") and not name.startswith("_")):
            written |= {part for entry in node.all_input_nodes[:1] for part in _memory(entry)}
    return not shown.isdisjoint(written)


def _memory(node: fx.Node) -> set[StorageWeakRef]:
    values = tensors_in(node.meta.get("example_value"))
    return {StorageWeakRef(value.untyped_storage()) for value in values if value.layout is torch.strided}
