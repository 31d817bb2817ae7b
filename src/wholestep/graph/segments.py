"""Where and what the backward pass may compute again: layers' backward stretches, and operators safe to call twice."""

from __future__ import annotations

import operator

import torch
from torch import fx

from wholestep.graph.layers import layers_of
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of


def may_recompute(node: fx.Node) -> bool:
    """Whether a second call gives the same bits: no random numbers but keyed ones, no messages, no effects."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    if node.target.namespace.startswith("_c10d") or node.is_impure() or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    if node.target._schema.name == "ws::attention":
        return not _drops(node)
    return True


def _drops(attention: fx.Node) -> bool:
    """On a GPU attention's dropout draws from torch's own generator: a second call would drop others."""
    for argument, entry in zip(attention.target._schema.arguments, attention.args, strict=False):  # type: ignore[union-attr]
        if argument.name in ("dropout_p",) and isinstance(entry, float | int):
            return entry > 0
    return False


def backward_segments(graph: TrainingGraph) -> list[tuple[str, fx.Node]]:
    """Every node of the backward pass with the layer it works for, "" outside layers.

    A node that does not know its module (a sum of gradients) goes with the node before it, as it does when regions are cut.
    """
    layers = layers_of(graph.graph.nodes)
    segment, found = "", []
    for node in graph.operations():
        if phase_of(node) == "forward":
            continue
        if module_of(node) is not None or phase_of(node) == "update":
            segment = layers.get(node, "")
        found.append((segment, node))
    return found
