"""A concatenation with nothing is a copy.

In: Dynamo's graph of a loss. Out: the same, `torch.cat([empty, x])` written as a copy of x that lies as eager PyTorch lays it.
Models of Hugging Face begin a cache of keys and values so, in every layer, unless `use_cache` is off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_CAT = (torch.cat, torch.concat, torch.concatenate)


def copy_in_place_of_cat(module: fx.GraphModule) -> None:
    graph = module.graph
    for node in [n for n in graph.nodes if n.op == "call_function" and n.target in _CAT and "out" not in n.kwargs]:
        parts = node.args[0] if node.args else node.kwargs.get("tensors")
        if not isinstance(parts, list | tuple) or not all(isinstance(part, fx.Node) for part in parts):
            continue
        full = [part for part in parts if not _is_nothing(part)]
        if len(full) != 1 or len(parts) == 1 or None in (_dtype(full[0]), _dtype(node)):
            continue
        dense = {"memory_format": torch.contiguous_format}
        with graph.inserting_before(node):
            if _dtype(full[0]) == _dtype(node):
                copy = graph.call_method("clone", (full[0],), dense)
            else:  # nothing has a type too, and the wider one counts
                copy = graph.call_method("to", (full[0], _dtype(node)), {"copy": True, **dense})
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        for part in parts:
            if part.target is torch.tensor and not part.users:
                graph.erase_node(part)


def _is_nothing(node: fx.Node) -> bool:
    """A tensor of the one shape that fits beside any other; one that is trained would get a gradient, of nothing."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or value.requires_grad or value.dim() != 1:
        return False
    size: Any = value.shape[0]
    return isinstance(size, int) and size == 0


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("example_value")
    return value.dtype if isinstance(value, torch.Tensor) else None
