"""Removes what nobody reads. In: any TrainingGraph. Out: one in which every operation leads to an output or has an effect.

Assertions and other operators with effects stay, as do all inputs: the runtime binds inputs by the graph's own list.
"""

from __future__ import annotations

from wholestep.graph.edit import is_unread
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.fx_edit import sweep
from wholestep.passes.pipeline import compiler_pass


@compiler_pass(numerics="bitwise")
def remove_dead(graph: TrainingGraph) -> TrainingGraph:
    """y = f(x), y unread => nothing."""
    if any(is_unread(node) for node in graph.operations()):
        sweep(graph)
    return graph
