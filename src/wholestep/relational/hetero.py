"""Graphs of several node types, as torch_geometric's HeteroData has them, as one RelGraph.

In: HeteroData, or anything that has its node_types, edge_types and items. Out: the graph, and `Layout`, which lays features of the
types one after another and splits results again. Nodes are in the order of node_types, relations in that of edge_types. The graph
itself holds tensors only, so that sampled graphs of equal sizes are one program; their Layouts are for people outside of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.relational.graph import RelGraph

EdgeType = tuple[str, str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the nodes and edges of each type stand."""

    nodes: dict[str, slice]
    edges: dict[EdgeType, slice]

    def joined(self, features: Mapping[Any, Tensor]) -> Tensor:
        """Features of all node types, or of all edge types, one after another: what a layer takes."""
        of_edges = any(isinstance(name, tuple) for name in features)
        places: Mapping[Any, slice] = self.edges if of_edges else self.nodes
        for name, place in places.items():
            if name not in features:
                raise BadOption(
                    f"no features of {name!r}", hint=f"every type needs them: {', '.join(map(repr, places))}"
                )
            if features[name].dim() == 0 or features[name].shape[0] != place.stop - place.start:
                raise BadOption(
                    f"features of {name!r} have shape {tuple(features[name].shape)}",
                    hint=f"the graph has {place.stop - place.start} of that type",
                )
        tails = {name: tuple(features[name].shape[1:]) for name in places}
        if len(set(tails.values())) > 1:
            told = ", ".join(f"{name!r} {tail}" for name, tail in tails.items())
            raise BadOption(
                f"features of unequal widths: {told}", hint="bring them to one width first, by a linear layer each"
            )
        if not places:
            raise BadOption("a graph without types", hint="give the features to the layer as they are")
        return torch.cat([features[name] for name in places])

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """A layer's result, by node type."""
        return {name: rows[place] for name, place in self.nodes.items()}


def from_hetero(data: Any) -> tuple[RelGraph, Layout]:
    if not hasattr(data, "node_types") or not hasattr(data, "edge_types"):
        raise BadOption(f"a {type(data).__name__} has no node_types and edge_types", hint="give a HeteroData")
    counts = {name: _count_of(data, name) for name in data.node_types}
    starts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
    indices = {tuple(edge): _index_of(data, edge, counts) for edge in data.edge_types}
    parts = [torch.empty(3, 0, dtype=torch.int64, device=next((i.device for i in indices.values()), None))]
    for number, (edge, index) in enumerate(indices.items()):
        first = index.new_tensor([starts[edge[0]], starts[edge[-1]]]).unsqueeze(1)
        parts.append(torch.cat([index + first, torch.full_like(index[:1], number)]))
    src, dst, etype = torch.cat(parts, 1)
    sizes = torch.tensor(list(counts.values()), dtype=torch.int64, device=src.device)
    graph = RelGraph(
        src, dst, etype, ntype=torch.repeat_interleave(sizes), num_nodes=sum(counts.values()), num_relations=len(indices),
        num_types=len(counts),
    )  # fmt: skip
    ends = itertools.accumulate((index.shape[1] for index in indices.values()), initial=0)
    places = [slice(*pair) for pair in itertools.pairwise(ends)]
    nodes = {name: slice(start, start + counts[name]) for name, start in starts.items()}
    return graph, Layout(nodes, dict(zip(indices, places, strict=True)))


def _count_of(data: Any, name: str) -> int:
    x = getattr(data[name], "x", None)
    count = x.shape[0] if isinstance(x, Tensor) else getattr(data[name], "num_nodes", None)
    if count is None:
        raise BadOption(
            f"the number of {name!r} nodes is not known", hint=f"set data[{name!r}].num_nodes, or its features x"
        )
    return int(count)


def _index_of(data: Any, edge: Any, counts: Mapping[str, int]) -> Tensor:
    index = getattr(data[edge], "edge_index", None)
    if not isinstance(index, Tensor) or index.layout is not torch.strided or index.dim() != 2 or index.shape[0] != 2:
        told = f"of shape {tuple(index.shape)}" if isinstance(index, Tensor) else f"a {type(index).__name__}"
        raise BadOption(f"data[{edge}].edge_index is {told}", hint="it is a tensor (2, edges): sources, destinations")
    for ids, name in zip(index, (edge[0], edge[-1]), strict=True):
        if name not in counts:
            raise BadOption(
                f"{edge} is between nodes of type {name!r}", hint=f"there are {', '.join(map(repr, counts))}"
            )
        beyond = (ids < 0) | (ids >= counts[name])
        if bool(beyond.any()):
            at = int(beyond.nonzero()[0])
            raise BadOption(
                f"edge {at} of {edge} has node {int(ids[at])} of type {name!r}, of which there are {counts[name]}",
                hint="ids count within a type, from 0",
            )
    return index.long()
