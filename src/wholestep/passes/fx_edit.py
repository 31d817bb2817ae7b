"""What rewrites of a TrainingGraph share: putting a node in another's place, and keeping the graph's tables true.

In: a graph and the nodes a pass wants changed. Out: the graph edited in place, with `gradients` and `boundaries` following.
Sizes are compared without asking a symbolic one for its value: a question would become a guard on the captured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.edit import remove_unread
from wholestep.graph.training_graph import TrainingGraph, tensors_in

aten = torch.ops.aten


class Editor:
    """One pass at work on one graph; `finish` must be called when all edits are made."""

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.changed = 0
        names = {**graph.gradients, **graph.boundaries}.values()
        self._named = set(names)
        self.boundary_names = set(graph.boundaries.values())

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """All that read `old` read `new`, which has the same value; a gradient or boundary of that name moves too."""
        old.replace_all_uses_with(new)
        if old.name in self._named:
            for table in (self.graph.gradients, self.graph.boundaries):
                table.update({key: new.name for key, name in table.items() if name == old.name})
            self._named.add(new.name)
            if old.name in self.boundary_names:
                self.boundary_names.add(new.name)
        self.graph.graph.erase_node(old)
        self.changed += 1

    def insert(
        self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A node before `like`, with the phase, module, source and value of `like`."""
        with self.graph.graph.inserting_before(like):
            node = self.graph.graph.call_function(target, args, kwargs or {})
        node.meta = {"val": like.meta["val"], "custom": dict(like.meta.get("custom") or {})}
        return node

    def compute(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """As `insert`, for a node of a value of its own, found on the fakes."""
        node = self.insert(like, target, args, kwargs)
        fakes = [value for n in (like, *node.all_input_nodes) if (value := tensor_of(n)) is not None]
        with fakes[0].fake_mode:  # type: ignore[attr-defined]
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def finish(self) -> TrainingGraph:
        """Removes dead nodes, and names of removed nodes from the tables; recompiles the code."""
        if self.changed:
            sweep(self.graph)
        return self.graph


def sweep(graph: TrainingGraph) -> None:
    """Remove what nobody reads, with its entries in the tables (a gradient nobody reads is not one any more)."""
    remove_unread(graph.graph)
    alive = {node.name for node in graph.graph.nodes}
    graph.boundaries = {path: name for path, name in graph.boundaries.items() if name in alive}
    graph.gradients = {name: node for name, node in graph.gradients.items() if node in alive}
    graph.module.recompile()


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of a node, or None for what is no node or no single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_static(tensor: torch.Tensor) -> bool:
    """Whether no size, stride or offset of it is symbolic."""
    return all(type(n) is int for n in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two lists of sizes are the same numbers or the same expressions."""
    return len(a) == len(b) and all(_written(x) == _written(y) for x, y in zip(a, b, strict=True))


def same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, strides, dtype and device, and the same marks: what is to be conjugated lies otherwise in memory."""
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        and same_sizes(a.shape, b.shape)
        and same_sizes(a.stride(), b.stride())
    )


def _written(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def has_static_sizes(graph: TrainingGraph) -> bool:
    """Whether no size is symbolic, of inputs or (where a mask picks places) of what is made from them."""
    values = [node.meta.get("val") for node in (*graph.placeholders, *graph.operations())]
    return all(is_static(t) for value in values for t in tensors_in(value)) and not any(
        isinstance(v, torch.SymInt) for v in values
    )
