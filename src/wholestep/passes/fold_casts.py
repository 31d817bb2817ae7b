"""Drops casts that cancel. In: any TrainingGraph; autocast and `.float()` in models leave many casts. Out: fewer of them.

All rules are exact. A cast to a wider type loses nothing (every bf16 and every fp16 is an fp32), so what follows it may read the
narrow value instead; a cast to a narrower type rounds, and whatever comes before it stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.passes.fx_edit import Editor, same_kind, tensor_of
from wholestep.passes.pipeline import compiler_pass

aten = torch.ops.aten

_F16, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
_WIDER: dict[torch.dtype, frozenset[torch.dtype]] = {
    _BF16: frozenset((_F32, _F64)), _F16: frozenset((_F32, _F64)), _F32: frozenset((_F64,)),
    torch.int8: frozenset((torch.int16, torch.int32, torch.int64, _F32, _F64)),
    torch.int16: frozenset((torch.int32, torch.int64, _F32, _F64)), torch.int32: frozenset((torch.int64, _F64)),
}  # fmt: skip
"""Type -> the types that hold each of its values exactly."""


@compiler_pass(numerics="bitwise")
def fold_casts(graph: TrainingGraph) -> TrainingGraph:
    """cast(x, own dtype) => x; cast(cast(x, wider), b) => cast(x, b); two equal casts of one input in a phase => one."""
    edit = Editor(graph)
    seen: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.operations()):
        if not is_cast(node):
            continue
        source, value = node.args[0], tensor_of(node)
        inner = source.args[0] if isinstance(source, fx.Node) and is_cast(source) else None
        if inner is not None and _exact(inner, source):
            node.update_arg(0, inner)
            edit.changed += 1
            source = inner
        before = tensor_of(source)
        if before is not None and value is not None and same_kind(before, value):
            edit.replace(node, source)  # type: ignore[arg-type]
        elif isinstance(source, fx.Node) and source.op == "placeholder":
            # A copy of a parameter may live long; making it once per phase is what is wanted of it.
            key = (source, phase_of(node), tuple(sorted((k, str(v)) for k, v in node.kwargs.items())))
            if key in seen:
                edit.replace(node, seen[key])
            else:
                seen[key] = node
    return edit.finish()


def is_cast(node: fx.Node) -> bool:
    """Whether the node changes at most the dtype: no move to another device, no request for a layout."""
    if node.op != "call_function" or node.target is not aten._to_copy.default:
        return False
    before, after = tensor_of(node.args[0]), tensor_of(node)
    if before is None or after is None or before.device != after.device:
        return False
    return node.kwargs.get("memory_format") in (None, torch.preserve_format) and before.layout == after.layout


def _exact(inner: Any, source: Any) -> bool:
    """Whether the cast from `inner` to `source` keeps every value."""
    before, after = tensor_of(inner), tensor_of(source)
    if before is None or after is None:
        return False
    return after.dtype == before.dtype or after.dtype in _WIDER.get(before.dtype, ())
