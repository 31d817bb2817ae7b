"""Which values of a graph share memory with which placeholder: what goes in is an FX graph, what comes out is node ->
roots.

State is written in place only in this folder, so only this folder has to know that a transposed weight is the weight.
The answer follows operators (`graph/views.py`) rather than the storages of fake tensors.
"""

from __future__ import annotations

from torch import fx

from wholestep.graph.views import shares_memory


def alias_roots(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Node -> the placeholders (and constants) whose memory its value may share; a placeholder is its own root."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    nothing: frozenset[fx.Node] = frozenset()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            roots[node] = frozenset((node,))
        elif node.op == "call_function" and shares_memory(node.target):
            roots[node] = nothing.union(*(roots.get(entry, nothing) for entry in node.all_input_nodes))
        else:
            roots[node] = nothing
    return roots
