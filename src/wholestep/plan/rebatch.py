"""The graph of a step at another batch size, from the one that was captured: sizes are changed, nothing is traced again.

In: a TrainingGraph with fixed sizes and a factor; or one with symbolic sizes, which become those it was traced with. Out: a copy
to plan with, not to run: its values have the shapes they would have there. Rows are the outermost dimension in memory of
everything that grows with the batch; what has the shape of a parameter (gradients, cast weights) does not grow. Sizes written into
operators (`view`, `expand`) stay as they are: planning reads values, not arguments. Peaks were within 0.2 % of those of a step
captured at the other batch size (six models, tests/plan/test_rebatch.py for three of them).
"""

from __future__ import annotations

from typing import Any

import torch

from wholestep import compat
from wholestep.graph.copies import copy_graph
from wholestep.graph.training_graph import Role, TrainingGraph, tensors_in

Shape = tuple[int, ...]
_FIXED = (Role.PARAMETER, Role.BUFFER, Role.STATE, Role.HYPER, Role.KEY, Role.GRADIENT)


def rebatched(graph: TrainingGraph, factor: float) -> TrainingGraph:
    """A copy whose batch has `factor` times the rows."""
    copy = copy_graph(graph)
    placeholders = copy.placeholders
    held = {node for node, entry in zip(placeholders, copy.inputs, strict=True) if entry.role in _FIXED}
    fixed = {_any_order(tensor.shape) for node in held for tensor in tensors_in(node.meta.get("val"))}
    for node in copy.graph.nodes:
        if node not in held and "val" in node.meta:
            node.meta = {**node.meta, "val": _scaled(node.meta["val"], factor, fixed)}
    return copy


def at_traced_sizes(graph: TrainingGraph) -> TrainingGraph:
    """A copy of a graph with symbolic sizes in which every value has the size it was traced with."""
    copy = copy_graph(graph)
    for node in copy.graph.nodes:
        if "val" in node.meta:
            node.meta = {**node.meta, "val": _traced(node.meta["val"])}
    return copy


def sized_by_data(graph: TrainingGraph) -> bool:
    """Whether a mask decides some sizes, and nothing else does: it is planned for as many places as the mask has."""
    given = [value for node in graph.placeholders for value in tensors_in(node.meta.get("val"))]
    made = [value for node in graph.operations() for value in tensors_in(node.meta.get("val"))]
    return not any(t._has_symbolic_sizes_strides for t in given) and any(t._has_symbolic_sizes_strides for t in made)


def _traced(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_traced(entry) for entry in value)
    if isinstance(value, torch.SymInt):
        return compat.traced_size(value)
    if not isinstance(value, torch.Tensor) or not value._has_symbolic_sizes_strides:
        return value
    sizes, strides = ([compat.traced_size(number) for number in numbers] for numbers in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _scaled(value: Any, factor: float, fixed: set[Shape]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_scaled(entry, factor, fixed) for entry in value)
    if not isinstance(value, torch.Tensor) or value.numel() <= 1 or _any_order(value.shape) in fixed:
        return value
    sizes, strides = list(value.shape), value.stride()
    outermost = max((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: strides[dim])
    sizes[outermost] = max(round(sizes[outermost] * factor), 1)
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")


def _any_order(shape: Any) -> Shape:
    """A transposed gradient is still a gradient; dimensions of one element say nothing."""
    return tuple(sorted(size for size in shape if size != 1))
