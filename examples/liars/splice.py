"""Put plain PyTorch into a captured step, in the place of one of its nodes.

In: a graph, a node and a function of tensors. Out: the node that holds the function's result; whoever read the old node
reads it now. The function is traced on the fake tensors the graph carries, so a rewrite reads as ordinary PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.graph.training_graph import TrainingGraph


def insert(
    graph: TrainingGraph, before: fx.Node, function: Callable[..., Any], *inputs: fx.Node, like: fx.Node | None = None
) -> Any:
    """Trace `function` of `inputs`, put its operators before a node, and return the node (or nodes) of its result.

    They take phase, module and source line from `like`, by default the node they stand before.
    """
    traced = make_fx(function)(*(node.meta["val"] for node in inputs))
    known: dict[fx.Node, fx.Node] = {}
    sources = iter(inputs)
    origin = (like or before).meta.get("custom") or {}
    with graph.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(sources)
            elif node.op == "call_function":
                known[node] = graph.graph.node_copy(node, known.__getitem__)
                known[node].meta = {"val": node.meta["val"], "custom": dict(origin)}
            elif node.op != "output":
                raise ValueError(f"{node.op} {node.target}: a spliced function may use nothing but its arguments")
    return fx.map_arg(traced.graph.output_node().args[0], known.__getitem__)


def replace(graph: TrainingGraph, old: fx.Node, function: Callable[..., Any], *inputs: fx.Node) -> None:
    """Like `insert`, with the result in the place of a node, which is removed."""
    put_in_place(graph, old, insert(graph, old, function, *inputs))


def put_in_place(graph: TrainingGraph, old: fx.Node, new: fx.Node) -> None:
    """Whoever read `old` reads `new`; a gradient or module output that was the one is the other. `old` is removed."""
    old.replace_all_uses_with(new)
    for names in (graph.gradients, graph.boundaries):
        names.update({path: new.name for path, name in names.items() if name == old.name})
    graph.graph.erase_node(old)
    graph.module.recompile()
