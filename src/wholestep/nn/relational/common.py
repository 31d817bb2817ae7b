"""What the relational layers share: a graph from edges as torch_geometric gives them, refusals, first values of parameters.

In: edge_index (2, edges) and edge_type (edges,), or a RelGraph. Out: a RelGraph. Tables made of tensors are kept as long as the
first of them lives and none was written to: layers called with the same edges share them. A write that torch does not count
(through NumPy) is not seen.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from wholestep import compat
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.relational import RelGraph

Made = tuple[Any, "list[weakref.ref[Tensor]]", RelGraph]
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""First tensor -> (what was said, all tensors, what was made of them)."""


def graph_of(edges: Any, edge_type: Any, nodes: int, relations: int) -> RelGraph:
    """`edges`: a RelGraph, or edge_index."""
    if isinstance(edges, RelGraph):
        return _fitting(edges, nodes, relations)
    if not isinstance(edges, Tensor) or edges.layout is not torch.strided:
        raise NotBuiltYet(
            f"edge_index is a {type(edges).__name__}", hint="give a tensor (2, edges), or a relational.RelGraph"
        )
    if edge_type is None:
        raise BadOption("edge_type is missing", hint="give the relation of every edge")
    if edges.dim() != 2 or edges.shape[0] != 2:
        raise BadOption(f"edge_index has shape {tuple(edges.shape)}", hint="it is (2, edges): sources, destinations")
    return remembered((edges, edge_type), (nodes, relations), lambda: RelGraph(
        edges[0], edges[1], edge_type, num_nodes=nodes, num_relations=relations
    ))  # fmt: skip


def remembered(tensors: tuple[Tensor, ...], said: Any, make: Callable[[], RelGraph]) -> RelGraph:
    """The graph last made of these very tensors and of what else was said, or a new one."""
    if torch.compiler.is_dynamo_compiling():  # sizes of tables are data: the host reads them, once for all steps
        raise RuntimeError("edges are tensors; make a relational.RelGraph of them, once, and give the layer that")
    if not tensors or any(t.is_inference() or compat.is_fake(t) for t in tensors):
        return make()
    said = said, tuple(t._version for t in tensors)
    found: Made | None = _made.get(tensors[0])
    if found is not None and found[0] == said and all(a() is b for a, b in zip(found[1], tensors, strict=True)):
        return found[2]
    graph = make()
    _made[tensors[0]] = said, [weakref.ref(t) for t in tensors], graph
    return graph


def _fitting(graph: RelGraph, nodes: int, relations: int) -> RelGraph:
    if graph.num_nodes != nodes or graph.num_relations != relations:
        raise BadOption(
            f"the graph has {graph.num_nodes} nodes and {graph.num_relations} relations, the layer {nodes} and {relations}",
            hint="give RelGraph num_nodes and num_relations",
        )
    return graph


def refuse_both(num_bases: int | None, num_blocks: int | None) -> None:
    if num_bases is not None and num_blocks is not None:
        raise BadOption("num_bases and num_blocks together", hint="matrices are made of bases or of blocks")


def refuse_uneven(num_blocks: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % num_blocks:
            raise BadOption(f"{name} is {size}, and num_blocks={num_blocks}", hint="blocks are of equal size")


def refuse_others(kwargs: dict[str, Any]) -> None:
    """Arguments of torch_geometric's MessagePassing."""
    known = {"flow": "source_to_target", "node_dim": 0, "decomposed_layers": 1}
    for name, value in kwargs.items():
        if name not in known or value != known[name]:
            raise NotBuiltYet(f"{name}={value!r}", hint="leave it out")


@torch.no_grad()
def glorot(tensor: Tensor | None) -> None:
    if tensor is not None:
        bound = math.sqrt(6 / (tensor.shape[-2] + tensor.shape[-1]))
        tensor.uniform_(-bound, bound)


@torch.no_grad()
def constant(tensor: Tensor | None, value: float) -> None:
    if tensor is not None:
        tensor.fill_(value)
