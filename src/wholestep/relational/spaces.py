"""Index spaces: over what a value of a message function has rows, and how it gets from one to a larger one.

A value depends on the source, the destination, the relation of an edge, or on the edge itself. That names the smallest space in
which it can be computed: once per relation, node, pair or edge. The functions here run inside of a compiled layer: RelGraph in,
rows out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import torch
from torch import Tensor

from wholestep.relational.graph import Pairs, RelGraph, Taking


class Space(enum.Enum):
    """What the rows of a value stand for."""

    NONE = "a constant"
    RELATION = "relations"
    SOURCE = "source nodes"
    DESTINATION = "destination nodes"
    SOURCE_PAIR = "source pairs"
    DESTINATION_PAIR = "destination pairs"
    EDGE = "edges"


_BY_NEED = {
    frozenset(): Space.NONE,
    frozenset({"rel"}): Space.RELATION,
    frozenset({"src"}): Space.SOURCE,
    frozenset({"dst"}): Space.DESTINATION,
    frozenset({"src", "rel"}): Space.SOURCE_PAIR,
    frozenset({"dst", "rel"}): Space.DESTINATION_PAIR,
}
NEEDS = {space: needs for needs, space in _BY_NEED.items()} | {Space.EDGE: frozenset({"src", "dst", "rel", "edge"})}


def joined(*spaces: Space) -> Space:
    """The smallest space in which values of all these can meet."""
    return _BY_NEED.get(frozenset().union(*(NEEDS[space] for space in spaces)), Space.EDGE)


def pair_space(space: Space) -> Space:
    """Where values of this space meet those of relations."""
    return joined(space, Space.RELATION)


# ---- rows of a larger space ----


def _from_relation(pairs: Pairs, x: Tensor) -> Tensor:
    starts = torch.cat([pairs.ends.new_zeros(1), pairs.ends])
    everyone = torch.arange(pairs.relation.shape[0], dtype=pairs.ends.dtype, device=x.device)
    return Taking(pairs.relation, starts, everyone)(x)


def relation_to_source_pair(graph: RelGraph, x: Tensor) -> Tensor:
    return _from_relation(graph.sources, x)


def relation_to_destination_pair(graph: RelGraph, x: Tensor) -> Tensor:
    return _from_relation(graph.destinations, x)


def relation_to_edge(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.sources.to_edge(_from_relation(graph.sources, x))


def source_to_source_pair(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.sources.of_node(x)


def destination_to_destination_pair(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.destinations.of_node(x)


def source_to_edge(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.from_src(x)


def destination_to_edge(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.from_dst(x)


def source_pair_to_edge(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.sources.to_edge(x)


def destination_pair_to_edge(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.destinations.to_edge(x)


LIFTS: dict[tuple[Space, Space], Callable[[RelGraph, Tensor], Tensor]] = {
    (Space.RELATION, Space.SOURCE_PAIR): relation_to_source_pair,
    (Space.RELATION, Space.DESTINATION_PAIR): relation_to_destination_pair,
    (Space.RELATION, Space.EDGE): relation_to_edge,
    (Space.SOURCE, Space.SOURCE_PAIR): source_to_source_pair,
    (Space.SOURCE, Space.EDGE): source_to_edge,
    (Space.DESTINATION, Space.DESTINATION_PAIR): destination_to_destination_pair,
    (Space.DESTINATION, Space.EDGE): destination_to_edge,
    (Space.SOURCE_PAIR, Space.EDGE): source_pair_to_edge,
    (Space.DESTINATION_PAIR, Space.EDGE): destination_pair_to_edge,
}

# ---- products with the matrix of a relation ----


def _by_relation(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """(rows, m, d) or (rows, d) times (relations, d, k): every row by its relation's matrix. With a matrix per relation and head:
    (rows, heads, d) times (relations, heads, d, k)."""
    if matrices.dim() == 4:
        return _by_relation_and_head(x, matrices, ends)
    if x.dim() == 2:
        return torch.ops.ws.grouped_mm(x, matrices, ends)  # type: ignore[no-any-return]
    flat = torch.ops.ws.grouped_mm(x.reshape(-1, x.shape[-1]), matrices, ends * x.shape[1])
    return flat.reshape(x.shape[0], x.shape[1], matrices.shape[-1])  # type: ignore[no-any-return]


def _by_relation_and_head(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Head after head, so that the rows of a relation and head lie together: one grouped product."""
    count, heads, wide = x.shape
    first = torch.arange(heads, dtype=ends.dtype, device=ends.device).unsqueeze(1) * count
    by_head = matrices.transpose(0, 1).reshape(-1, *matrices.shape[2:])
    rows = x.transpose(0, 1).reshape(heads * count, wide)
    flat = torch.ops.ws.grouped_mm(rows, by_head, (first + ends).reshape(-1))
    return flat.reshape(heads, count, matrices.shape[-1]).transpose(0, 1)  # type: ignore[no-any-return]


def rows_of_ids(graph: RelGraph, tables: Tensor, ids: Tensor) -> Tensor:
    """tables[relation, ids[source]] for every source pair."""
    at_pairs = graph.sources.relation.long() * tables.shape[1] + ids[graph.sources.of_node.index.long()]
    return tables.reshape(-1, *tables.shape[2:]).index_select(0, at_pairs)


def product_at_source_pairs(graph: RelGraph, x: Tensor, matrices: Tensor) -> Tensor:
    return _by_relation(x, matrices, graph.sources.ends)


def product_at_destination_pairs(graph: RelGraph, x: Tensor, matrices: Tensor) -> Tensor:
    return _by_relation(x, matrices, graph.destinations.ends)


def product_at_edges(graph: RelGraph, x: Tensor, matrices: Tensor) -> Tensor:
    """Edges are brought into the order of relations, and back."""
    pairs = graph.sources.to_edge
    ends = torch.cat([pairs.back_ptr.new_zeros(1), pairs.back_ptr[graph.sources.ends.long()]])[1:]
    places = torch.empty_like(pairs.back_index)
    everyone = torch.arange(places.shape[0], dtype=places.dtype, device=places.device)
    places = places.scatter(0, pairs.back_index.long(), everyone)
    starts = torch.arange(places.shape[0] + 1, dtype=places.dtype, device=places.device)
    ordered = Taking(pairs.back_index, starts, places)(x)
    return Taking(places, starts, pairs.back_index)(_by_relation(ordered, matrices, ends))


PRODUCTS = {
    Space.SOURCE_PAIR: product_at_source_pairs,
    Space.DESTINATION_PAIR: product_at_destination_pairs,
    Space.EDGE: product_at_edges,
}

# ---- a number per edge, from two rows of smaller spaces ----


def dot_of_nodes(graph: RelGraph, destination: Tensor, source: Tensor) -> Tensor:
    return graph.neighbours.dot(destination, source)


def dot_of_source_pairs(graph: RelGraph, destination: Tensor, source: Tensor) -> Tensor:
    return graph.only_sources.spread.dot(destination, source)


DOTS = {Space.SOURCE: dot_of_nodes, Space.SOURCE_PAIR: dot_of_source_pairs}

# ---- sums over the edges of a node ----


def linear_sum(graph: RelGraph, x: Tensor, matrices: Tensor, weight: Tensor | None) -> Tensor:
    """Sum over edges of weight * (x[src] @ matrices[relation]), per relation on the side that has fewer pairs."""
    rows = graph.rows
    return rows.spread(_by_relation(rows.gathered(x, weight), matrices, rows.ends), weight)


def source_sum(graph: RelGraph, x: Tensor, weight: Tensor | None) -> Tensor:
    return graph.neighbours(x, weight)


def source_pair_sum(graph: RelGraph, x: Tensor, weight: Tensor | None) -> Tensor:
    return graph.only_sources.spread(x, weight)


def edge_sum(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.incoming(x)


def edge_max(graph: RelGraph, x: Tensor) -> Tensor:
    """0 for nodes without edges."""
    place = graph.dst.long().reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape)
    return x.new_zeros(graph.num_nodes, *x.shape[1:]).scatter_reduce(0, place, x, "amax", include_self=False)


def mean_of(graph: RelGraph, total: Tensor) -> Tensor:
    return total / graph.degree.clamp(min=1).reshape(-1, *[1] * (total.dim() - 1))


def share_of_pair(graph: RelGraph, dtype: torch.dtype) -> Tensor:
    """For every edge one over the number of edges of its relation that come in at its node."""
    return (1 / torch.diff(graph.destinations.to_edge.back_ptr).to(dtype))[graph.destinations.to_edge.index.long()]


def softmax_of(graph: RelGraph, logits: Tensor) -> Tensor:
    out: Tensor = torch.ops.ws.segment_softmax(logits, graph.ptr)
    return out


def softmax_within_relation(graph: RelGraph, logits: Tensor) -> Tensor:
    out: Tensor = torch.ops.ws.segment_softmax(logits, graph.pair_ptr)
    return out
