"""Counts of values that are known to be small become sums: `bincount` waits for the device to learn the largest value.

In: bincount(x, minlength=n) where x are places that topk, argmax, argmin or a sort chose among at most n. Out: how many equal
each of 0 .. n-1. The same numbers; nothing is read on the host, so the step can be recorded as a CUDA graph (the balancing
loss of a mixture of experts counts its tokens so). Counts of anything else stay: a value past the end makes them longer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from wholestep.graph.training_graph import TrainingGraph
from wholestep.graph.views import is_cheap_view
from wholestep.passes.fx_edit import Editor, is_static, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

_MOST_COMPARED = 1 << 26
"""Comparisons, where they are not fused with their sum."""
_CHOICES = {
    aten.topk.default: (1, 2), aten.sort.default: (1, 1), aten.sort.stable: (1, 2), aten.argmax.default: (None, 1),
    aten.argmin.default: (None, 1), aten.argsort.default: (None, 1), aten.argsort.stable: (None, 2),
    aten.max.dim: (1, 1), aten.min.dim: (1, 1),
}  # fmt: skip
"""Operators that choose places along a dimension: which result holds them, and where the dimension is given."""


@compiler_pass(numerics="bitwise")
def bound_counts(graph: TrainingGraph) -> TrainingGraph:
    """bincount(x, None, n) => sum(x == [0 .. n-1]) where x < n for certain."""
    if not graph.target.is_gpu:
        return graph
    editor = Editor(graph)
    for node in list(graph.operations()):
        if node.target is aten.bincount.default and _is_bounded(node):
            _rewrite(editor, node)
    for node in list(graph.operations()) if editor.changed else ():
        if node.target is torch.ops.ws.require.default and _certain(
            node
        ):  # as many counts as are read, for certain now
            true = editor.compute(node, aten.full.default, [], True, dtype=torch.bool, device=node.args[1])
            editor.replace(node, true)
    return editor.finish()


def _certain(node: fx.Node) -> bool:
    """Whether a fact follows from sizes that are fixed."""
    known: dict[fx.Node, Any] = {}

    def value(entry: Any) -> Any:
        if not isinstance(entry, fx.Node):
            return entry
        if entry not in known:
            tensor = tensor_of(entry)
            if tensor is not None:
                known[entry] = tensor
            else:
                known[entry] = entry.target(*map(value, entry.args))  # type: ignore[operator]
        return known[entry]

    holds = value(node.args[0])
    return isinstance(holds, int) and holds == 1


def _is_bounded(node: fx.Node) -> bool:
    counted, counts, length = tensor_of(node.args[0]), tensor_of(node), _length(node)
    weights = node.args[1] if len(node.args) > 1 else node.kwargs.get("weights")
    if weights is not None or counted is None or counts is None or not is_static(counted):
        return False
    if not statically_known_true(counts.shape[0] == length):  # what reads it was traced for that size
        return False
    bound = _bound(node.args[0])
    return bound is not None and bound <= length and 0 < counted.numel() * length <= _MOST_COMPARED


def _length(node: fx.Node) -> int:
    return int(node.args[2] if len(node.args) > 2 else node.kwargs.get("minlength", 0))  # type: ignore[arg-type]


def _bound(node: Any) -> int | None:
    """A number that every value of the node is below."""
    taken: int | None = None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if is_cheap_view(node) or node.target is aten.clone.default:
            node = node.args[0]
        elif getattr(node.target, "__name__", "") == "getitem":
            taken, node = node.args[1], node.args[0]  # type: ignore[assignment]
        else:
            break
    if not isinstance(node, fx.Node) or node.target not in _CHOICES:
        return None
    result, position = _CHOICES[node.target]
    chosen = tensor_of(node.args[0])
    if taken != result or chosen is None:
        return None
    dim = node.args[position] if position < len(node.args) else node.kwargs.get("dim", -1 if result else None)
    if not isinstance(dim, int):  # over all dimensions
        return int(chosen.numel())
    return int(chosen.shape[dim])


def _rewrite(editor: Editor, node: fx.Node) -> None:
    counted = tensor_of(node.args[0])
    assert counted is not None
    places = editor.compute(node, aten.arange.default, _length(node), device=counted.device)
    values = editor.compute(node, aten.unsqueeze.default, node.args[0], -1)
    equal = editor.compute(node, aten.eq.Tensor, values, places)
    editor.replace(node, editor.compute(node, aten.sum.dim_IntList, equal, [0]))
