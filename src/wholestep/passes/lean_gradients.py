"""Gradients stay as narrow as they were made: the update widens them as it reads them.

In: a graph (bf16 autocast) in which a gradient made in bf16 is cast to its parameter's float32 and then held for the update,
the norm of clipping, or an addition to the accumulated gradient. Out: these read the bf16 value, and the cast is gone, so a
held gradient takes half the bytes. Widening is exact, so the numbers are the same wherever it happens: the update operators
and `ws::clip` do it element by element, an addition by the rules of type promotion.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.graph.edit import replace_each
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph
from wholestep.ops import IN_PLACE
from wholestep.passes.pipeline import compiler_pass

aten, ws = torch.ops.aten, torch.ops.ws

_NARROW = (torch.bfloat16, torch.float16)


@compiler_pass(numerics="bitwise")
def lean_gradients(graph: TrainingGraph) -> TrainingGraph:
    """adamw(params, [cast(g, float32), ...]) => adamw(params, [g, ...]); the same for sgd, clip and accumulation."""
    readers = {node for node in graph.operations() if node.target in IN_PLACE or node.target is ws.clip.default}
    readers |= _accumulations(graph)
    casts = [node for node in graph.operations() if node.users and readers.issuperset(node.users) and _widens(node)]
    if not casts or not _clip_can_widen(readers):
        return graph
    narrows = {cast: narrow for cast in casts if isinstance(narrow := cast.args[0], fx.Node)}
    renamed = {cast.name: narrow.name for cast, narrow in narrows.items()}
    replace_each(graph.graph, narrows)
    graph.gradients = {parameter: renamed.get(name, name) for parameter, name in graph.gradients.items()}
    graph.boundaries = {path: name for path, name in graph.boundaries.items() if name not in renamed}
    graph.module.recompile()
    return graph


def _widens(node: fx.Node) -> bool:
    """bf16 or fp16 to float32, in place of which the narrow value can stand: same shape, layout and device."""
    if node.target is not aten._to_copy.default or not isinstance(node.args[0], fx.Node):
        return False
    wide, narrow = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(wide, torch.Tensor) or not isinstance(narrow, torch.Tensor):
        return False
    same = wide.shape == narrow.shape and wide.stride() == narrow.stride() and wide.device == narrow.device
    return same and wide.dtype is torch.float32 and narrow.dtype in _NARROW


def _accumulations(graph: TrainingGraph) -> set[fx.Node]:
    """The additions to accumulated gradients."""
    placeholders = graph.placeholders
    return {
        value
        for entry, value in zip(graph.outputs, graph.output_values, strict=True)
        if entry.kind is OutputKind.UPDATE
        and graph.inputs[entry.target or 0].role is Role.GRADIENT
        and isinstance(value, fx.Node)
        and value.target is aten.add.Tensor
        and value.args[0] is placeholders[entry.target or 0]
        and _dtype(value.args[0]) is torch.float32
    }


def _clip_can_widen(readers: set[fx.Node]) -> bool:
    """Tell `ws::clip` as what its gradients count; False where they are of several dtypes, which it cannot be told."""
    clips = [node for node in readers if node.target is ws.clip.default]
    if any(_dtype(gradient) is not torch.float32 for node in clips for gradient in node.args[0]):  # type: ignore[union-attr]
        return False
    for node in clips:
        node.args = (*node.args[:2], torch.float32)
    return True


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None
