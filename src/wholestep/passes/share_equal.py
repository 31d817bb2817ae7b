"""Computes equal things once. In: any TrainingGraph. Out: nodes that call the same operator on the same values become one.

A shared value lives longer than two short ones, and memory is what this compiler plans for. So two equal nodes are merged only

- within one phase: a backward node merged into a forward one would save a tensor across the whole step; whether to save or to
  compute again is the planner's decision;
- where no lifetime grows: the earlier value is still read at or after the place of the later one, or it is a view (it has no
  memory of its own, and what it looks at is alive there), or it is small;
- within one layer, or where the earlier one stands outside all layers: layer 0 computing what the others then read would be
  another function than its siblings, and equal layers are compiled once.

Random operators are never merged, not even keyed attention: its CUDA kernels draw from a generator.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from wholestep.graph.layers import numbered_module
from wholestep.graph.training_graph import TrainingGraph, phase_of, tensors_in
from wholestep.graph.views import shares_memory
from wholestep.passes.fx_edit import Editor, is_static
from wholestep.passes.pipeline import compiler_pass

SMALL_ELEMENTS = 256
"""Values up to this size may be kept longer: a planner never looks at them."""


@compiler_pass(numerics="bitwise")
def share_equal(graph: TrainingGraph) -> TrainingGraph:
    """f(x), ..., f(x) => f(x)."""
    edit = Editor(graph)
    position = {node: i for i, node in enumerate(graph.graph.nodes)}
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.operations()):
        if not _may_be_shared(node):
            continue
        key = (phase_of(node), node.target, _key(node.args), _key(node.kwargs))
        try:
            earlier = seen.setdefault(key, node)
        except TypeError:  # an argument without a hash
            continue
        if earlier is node:
            continue
        if numbered_module(earlier) in (None, numbered_module(node)) and _free(earlier, node, position):
            edit.replace(node, earlier)
        else:
            seen[key] = node
    return edit.finish()


def _may_be_shared(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or node.is_impure():
        return False
    if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return "empty" not in target._schema.name  # memory nobody has written: for whoever writes it first


def _free(earlier: fx.Node, later: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether reading `earlier` in place of `later` keeps no memory longer than it was kept before."""
    if shares_memory(earlier.target) or all(_small(t) for t in tensors_in(earlier.meta.get("val"))):
        return True
    return _read_from(earlier, position[later], position)


def _read_from(node: fx.Node, start: int, position: dict[fx.Node, int]) -> bool:
    """Whether the memory of `node` is read at `start` or later, by itself or through views of it."""
    users = list(node.users)
    if any(position[user] >= start for user in users):
        return True
    return any(shares_memory(user.target) and _read_from(user, start, position) for user in users)


def _small(tensor: torch.Tensor) -> bool:
    return is_static(tensor) and tensor.numel() <= SMALL_ELEMENTS


def _key(argument: Any) -> Any:
    """Equal only for equal arguments of equal types: 1, 1.0 and True are one key in Python, and three in torch."""
    if isinstance(argument, list | tuple):
        return tuple(_key(a) for a in argument)
    if isinstance(argument, dict):
        return tuple(sorted((k, _key(v)) for k, v in argument.items()))
    if isinstance(argument, torch.SymInt):
        return str(argument.node.expr)
    if isinstance(argument, float):
        return "float", argument.hex()
    return argument if isinstance(argument, fx.Node) else (type(argument).__name__, str(argument))
