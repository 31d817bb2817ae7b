"""The gradient of a gather whose index is one for the whole batch becomes a product: `ws::scatter_shared`.

In: scatter_add(zeros, -1, index, src) in which the index is expanded over all but its last two dimensions. Out: the operator
that adds in float32 and in a fixed order, without atomics. For a GPU only: elsewhere adding one by one is no slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph
from wholestep.ops.multi_tensor import IN_TRITON
from wholestep.passes.fx_edit import Editor, is_static, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

_LEAST_SHARED = 8
"""Rows that read one row of the index; below, most of a tile of the product would be empty."""


@compiler_pass(numerics="rounding")
def share_scatters(graph: TrainingGraph, *, least_shared: int = _LEAST_SHARED) -> TrainingGraph:
    """scatter_add(zeros, -1, expand(index), src) => scatter_shared(index, src, size)."""
    if not graph.target.is_gpu:
        return graph
    editor = Editor(graph)
    for node in list(graph.operations()):
        if node.target is aten.scatter_add.default and _is_shared(*node.args, least_shared):  # type: ignore[call-arg]
            _rewrite(editor, node)
    return editor.finish()


def _is_shared(start: Any, dim: Any, index: Any, src: Any, least_shared: int) -> bool:
    made, places, values = (tensor_of(node) for node in (start, index, src))
    if made is None or places is None or values is None or not all(map(is_static, (made, places, values))):
        return False
    rank = places.dim()
    if rank < 3 or dim not in (-1, rank - 1) or values.dtype not in IN_TRITON or not _is_zero(start):
        return False
    if places.shape != values.shape or made.shape[:-1] != values.shape[:-1]:
        return False
    shared = [size for size, stride in zip(places.shape[:-2], places.stride()[:-2]) if stride == 0 or size == 1]
    return len(shared) == rank - 2 and values.shape[:-2].numel() >= least_shared


def _is_zero(node: fx.Node) -> bool:
    if node.target in (aten.full.default, aten.full_like.default, aten.new_full.default):
        return node.args[-1] == 0
    return node.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def _rewrite(editor: Editor, node: fx.Node) -> None:
    _, _, index, src = node.args
    assert isinstance(index, fx.Node)
    while index.meta["val"].dim() > 2:
        index = editor.compute(node, aten.select.int, index, 0, 0)
    size = node.meta["val"].shape[-1]
    made = editor.insert(node, torch.ops.ws.scatter_shared.default, (index, src, size))
    editor.replace(node, made)
