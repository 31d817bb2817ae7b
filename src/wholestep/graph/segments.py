"""Where the backward pass may compute something again: the stretches of the backward pass, by layer."""

from __future__ import annotations

from torch import fx

from wholestep.graph.layers import layers_of
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of


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
