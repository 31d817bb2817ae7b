"""Which values of a graph share memory with which placeholder: what goes in is an FX graph, what comes out is node ->
roots.

State is written in place only in this folder, so only this folder has to know that a transposed weight is the weight.
The answer follows operator schemas rather than the storages of fake tensors: passes may copy `meta["val"]` between
nodes, which makes storages lie, while a schema's alias annotation holds for every call.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from wholestep.graph.liveness import UNDECLARED_VIEWS


@functools.lru_cache(maxsize=4096)  # schemas are slow to read
def may_alias(target: Any) -> bool:
    """Whether a call of `target` may return memory of one of its arguments."""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target._schema.name in UNDECLARED_VIEWS:
        return True
    return any(result.alias_info is not None for result in target._schema.returns)


def alias_roots(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Node -> the placeholders (and constants) whose memory its value may share; a placeholder is its own root."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    nothing: frozenset[fx.Node] = frozenset()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            roots[node] = frozenset((node,))
        elif node.op == "call_function" and may_alias(node.target):
            roots[node] = nothing.union(*(roots.get(entry, nothing) for entry in node.all_input_nodes))
        else:
            roots[node] = nothing
    return roots
