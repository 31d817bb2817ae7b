"""Index spaces: over what a value of a message function has rows, and how it gets from one to a larger one.

A value depends on the source, the destination, the relation of an edge, on the type of one of its nodes, or on the edge itself.
That names the smallest space in which it can be computed: once per relation, type, node, pair or edge. The functions here run
inside of a compiled layer: RelGraph in, rows out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.ops.relational import cells
from wholestep.ops.relational.linear_sum import pays
from wholestep.relational.graph import NodeTypes, Pairs, RelGraph, Taking
from wholestep.relational.messages import largest_of
from wholestep.relational.tables import side_of


class Space(enum.Enum):
    """What the rows of a value stand for."""

    NONE = "a constant"
    ONE = "one row for all edges"
    RELATION = "relations"
    SOURCE_TYPE = "source types"
    DESTINATION_TYPE = "destination types"
    SOURCE = "source nodes"
    DESTINATION = "destination nodes"
    SOURCE_PAIR = "source pairs"
    DESTINATION_PAIR = "destination pairs"
    EDGE = "edges"


NEEDS = {
    Space.NONE: frozenset[str](),
    Space.ONE: frozenset({"row"}),
    Space.RELATION: frozenset({"row", "relation"}),
    Space.SOURCE_TYPE: frozenset({"row", "source type"}),
    Space.DESTINATION_TYPE: frozenset({"row", "destination type"}),
    Space.SOURCE: frozenset({"row", "source type", "source"}),
    Space.DESTINATION: frozenset({"row", "destination type", "destination"}),
    Space.SOURCE_PAIR: frozenset({"row", "source type", "source", "relation"}),
    Space.DESTINATION_PAIR: frozenset({"row", "destination type", "destination", "relation"}),
    Space.EDGE: frozenset(
        {"row", "source type", "destination type", "source", "destination", "relation", "edge"}
    ),
}  # fmt: skip
"""What has to be known of an edge to find the row of a value. Smaller spaces stand first."""
GROUPS = (Space.RELATION, Space.SOURCE_TYPE, Space.DESTINATION_TYPE)
"""Few rows: a product with a matrix of these is one product per group of rows."""


def joined(*spaces: Space) -> Space:
    """The smallest space in which values of all these can meet."""
    needs = frozenset[str]().union(*(NEEDS[space] for space in spaces))
    return next(space for space, known in NEEDS.items() if needs <= known)


def types_of(graph: RelGraph) -> NodeTypes:
    if graph.types is None:
        raise BadOption("the message function reads e.src.type or e.dst.type, and the graph has no node types",
                        hint="give RelGraph the type of every node: ntype=")  # fmt: skip
    return graph.types


def count_of(graph: RelGraph, space: Space) -> int:
    """How many rows a space has."""
    if space in (Space.SOURCE_TYPE, Space.DESTINATION_TYPE):
        return types_of(graph).count
    counts = {
        Space.ONE: 1, Space.RELATION: graph.num_relations, Space.SOURCE: graph.num_nodes, Space.DESTINATION: graph.num_nodes,
        Space.SOURCE_PAIR: graph.sources.relation.shape[0], Space.DESTINATION_PAIR: graph.destinations.relation.shape[0],
        Space.EDGE: graph.num_edges,
    }  # fmt: skip
    return counts[space]


# ---- values of small spaces ----


def numbers_of(graph: RelGraph, space: Space) -> Tensor:
    """The relation of every relation, the type of every type."""
    return torch.arange(count_of(graph, space), device=graph.src.device)


def one_row_each(graph: RelGraph, x: Tensor, space: Space, name: str) -> Tensor:
    """A parameter that is indexed by relation or type, checked: what is indexed by a number has a row for it."""
    count, what = count_of(graph, space), "relations" if space is Space.RELATION else "node types"
    if x.dim() == 0 or x.shape[0] < count:
        raise BadOption(
            f"{name} has shape {tuple(x.shape)}, and the graph has {count} {what}",
            hint=f"it needs a row for each, and has none for number {x.shape[0] if x.dim() else 0}",
        )
    return x if x.shape[0] == count else x[:count]


def written_out(graph: RelGraph, numbers: Any, dtype: torch.dtype) -> Tensor:
    """A tensor that the message function makes of numbers."""
    return torch.tensor(numbers, dtype=dtype, device=graph.src.device)


def device_of(graph: RelGraph) -> torch.device:
    return graph.src.device


# ---- rows of a larger space ----


def _relation_to_pair(pairs: Pairs) -> Taking:
    starts = torch.cat([pairs.ends.new_zeros(1), pairs.ends])
    everyone = torch.arange(pairs.relation.shape[0], dtype=pairs.ends.dtype, device=pairs.ends.device)
    return Taking(pairs.relation, starts, everyone)


def _relation_to_edge(graph: RelGraph) -> Taking:
    of_pairs = graph.sources.to_edge
    starts = of_pairs.back_ptr.index_select(0, graph.sources.ends)
    return Taking(graph.etype, torch.cat([starts.new_zeros(1), starts]), of_pairs.back_index)


_TAKINGS: dict[tuple[Space, Space], Callable[[RelGraph], Taking]] = {
    (Space.RELATION, Space.SOURCE_PAIR): lambda graph: _relation_to_pair(graph.sources),
    (Space.RELATION, Space.DESTINATION_PAIR): lambda graph: _relation_to_pair(graph.destinations),
    (Space.RELATION, Space.EDGE): _relation_to_edge,
    (Space.SOURCE_TYPE, Space.SOURCE): lambda graph: types_of(graph).to_node,
    (Space.DESTINATION_TYPE, Space.DESTINATION): lambda graph: types_of(graph).to_node,
    (Space.SOURCE, Space.SOURCE_PAIR): lambda graph: graph.sources.of_node,
    (Space.SOURCE, Space.EDGE): lambda graph: graph.from_src,
    (Space.DESTINATION, Space.DESTINATION_PAIR): lambda graph: graph.destinations.of_node,
    (Space.DESTINATION, Space.EDGE): lambda graph: graph.from_dst,
    (Space.SOURCE_PAIR, Space.EDGE): lambda graph: graph.sources.to_edge,
    (Space.DESTINATION_PAIR, Space.EDGE): lambda graph: graph.destinations.to_edge,
}
_BY_WAY_OF = {
    Space.SOURCE_TYPE: Space.SOURCE, Space.DESTINATION_TYPE: Space.DESTINATION,
}  # fmt: skip
"""Where there is no table, one stands between."""


def lift(graph: RelGraph, x: Tensor, start: Space, end: Space) -> Tensor:
    """Rows of a space as rows of a larger one."""
    if start is end:
        return x
    if start is Space.ONE:
        return x.expand(count_of(graph, end), *x.shape[1:])
    if (start, end) in _TAKINGS:
        if x.is_complex():  # kernels know real numbers
            return torch.view_as_complex(_TAKINGS[start, end](graph)(torch.view_as_real(x.resolve_conj())))
        return _TAKINGS[start, end](graph)(x)
    between = _BY_WAY_OF[start]
    return lift(graph, lift(graph, x, start, between), between, end)


def tail_reshaped(x: Tensor, tail: list[int]) -> Tensor:
    """All dimensions but that of rows in another shape."""
    return x.reshape(x.shape[0], *tail)


def in_the_place_of(old: Tensor, new: Tensor, non_blocking: bool = False) -> Tensor:
    """What stands where another value stood, as long and of the same dtype."""
    return new.to(old.dtype).expand_as(old)


def times_each(weight: Tensor, x: Tensor) -> Tensor:
    """A weight per row, or per row and head, times what has more dimensions."""
    return weight.reshape(*weight.shape, *[1] * (x.dim() - weight.dim())) * x


# ---- products with the matrix of a relation or type ----


def _by_group(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows in the order of groups: (rows, m, d) or (rows, d) times (groups, d, k), every row by its group's matrix. With a matrix
    per group and head: (rows, heads, d) times (groups, heads, d, k)."""
    if matrices.dim() == 4:
        return _by_group_and_head(x, matrices, ends)
    if x.dim() == 2:
        return torch.ops.ws.grouped_mm(x, matrices, ends)  # type: ignore[no-any-return]
    flat = torch.ops.ws.grouped_mm(x.reshape(-1, x.shape[-1]), matrices, ends * x.shape[1])
    return flat.reshape(x.shape[0], x.shape[1], matrices.shape[-1])  # type: ignore[no-any-return]


def _by_group_and_head(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Head after head, so that the rows of a group and head lie together: one grouped product."""
    count, heads, wide = x.shape
    first = torch.arange(heads, dtype=ends.dtype, device=ends.device).unsqueeze(1) * count
    by_head = matrices.transpose(0, 1).reshape(-1, *matrices.shape[2:])
    rows = x.transpose(0, 1).reshape(heads * count, wide)
    flat = torch.ops.ws.grouped_mm(rows, by_head, (first + ends).reshape(-1))
    return flat.reshape(heads, count, matrices.shape[-1]).transpose(0, 1)  # type: ignore[no-any-return]


def product_of(graph: RelGraph, x: Tensor, matrices: Tensor, start: Space, space: Space, group: Space) -> Tensor:
    """Rows of a smaller space, as rows of a larger one, each times the matrix of its relation, or of its node's type."""
    taking = _TAKINGS.get((start, space))
    if (
        group is Space.RELATION
        and taking is not None
        and space is not Space.EDGE
        and (x.dim(), matrices.dim()) == (2, 3)
    ):
        taken, ends = taking(graph), (graph.sources if space is Space.SOURCE_PAIR else graph.destinations).ends
        out: Tensor = torch.ops.ws.gathered_mm(x, taken.index, matrices, ends, taken.back_ptr, taken.back_index)
        return out
    return product(graph, lift(graph, x, start, space), matrices, space, group)


def product(graph: RelGraph, x: Tensor, matrices: Tensor, space: Space, group: Space) -> Tensor:
    """Rows of a space, each times the matrix of its relation, or of its node's type."""
    if group is Space.RELATION and space is not Space.EDGE:
        return _by_group(x, matrices, (graph.sources if space is Space.SOURCE_PAIR else graph.destinations).ends)
    if space in (Space.SOURCE, Space.DESTINATION):
        types = types_of(graph)
        if types.order is None:
            return _by_group(x, matrices, types.ends)
        return _turned(types.order)(_by_group(types.order(x), matrices, types.ends))
    order, ends = _edges_by_relation(graph) if group is Space.RELATION else _sorted_by_type(graph, space, group)
    return _turned(order)(_by_group(order(x), matrices, ends))


def _turned(order: Taking) -> Taking:
    """A permutation's inverse."""
    return Taking(order.back_index, order.back_ptr, order.index)


def _edges_by_relation(graph: RelGraph) -> tuple[Taking, Tensor]:
    pairs = graph.sources.to_edge
    return _permutation(pairs.back_index), pairs.back_ptr[graph.sources.ends.long()]


def _sorted_by_type(graph: RelGraph, space: Space, group: Space) -> tuple[Taking, Tensor]:
    """Pairs and edges are not kept in the order of types: few message functions have products there."""
    types = lift(graph, numbers_of(graph, group), group, space)
    order = types.argsort(stable=True)
    ends = torch.searchsorted(types[order], numbers_of(graph, group), right=True)
    return _permutation(order), ends.to(types_of(graph).ends.dtype)


def _permutation(order: Tensor) -> Taking:
    everyone = torch.arange(order.shape[0] + 1, dtype=order.dtype, device=order.device)
    places = torch.empty_like(order).scatter(0, order.long(), everyone[:-1])
    return Taking(order, everyone, places)


# ---- a number per edge, from two rows of smaller spaces ----


def dot_of_nodes(graph: RelGraph, destination: Tensor, source: Tensor) -> Tensor:
    return graph.neighbours.dot(destination, source)


def dot_of_source_pairs(graph: RelGraph, destination: Tensor, source: Tensor) -> Tensor:
    return graph.only_sources.spread.dot(destination, source)


def linear_dot(graph: RelGraph, destination: Tensor, source: Tensor, matrices: Tensor, on_gpu: bool) -> Tensor:
    """<destination, source @ matrices[relation]>: the matrix is moved to the better side."""
    if graph.between is not None and graph.between.knows(destination, source, matrices):
        return graph.between.dot(graph.rows, destination, source, matrices)
    pairs = graph.sources.relation.shape[0], graph.destinations.relation.shape[0]
    if side_of(*pairs, sum(pairs), on_gpu or graph.src.device.type != "cpu"):
        moved = product_of(graph, source, matrices, Space.SOURCE, Space.SOURCE_PAIR, Space.RELATION)
        return dot_of_source_pairs(graph, destination, moved)
    turned = matrices.transpose(-1, -2)
    moved = product_of(graph, destination, turned, Space.DESTINATION, Space.DESTINATION_PAIR, Space.RELATION)
    return graph.at_destinations.dot(moved, source)


def dot_with_relations(graph: RelGraph, nodes: Tensor, vectors: Tensor, space: Space) -> Tensor:
    """<nodes, vectors[relation]> for every pair: rows are read once per node."""
    return (graph.sources if space is Space.SOURCE_PAIR else graph.destinations).dot(nodes, vectors)


def dots_with_relations(
    graph: RelGraph, nodes: Tensor, of_sources: Tensor, of_destinations: Tensor
) -> tuple[Tensor, ...]:
    """Both sides' at once: rows are read, and their gradients written, once for the two of them."""
    dots = graph.of_relations.dot(nodes, torch.cat([of_sources, of_destinations]))
    return dots.split([count_of(graph, Space.SOURCE_PAIR), count_of(graph, Space.DESTINATION_PAIR)])


DOTS = {Space.SOURCE: dot_of_nodes, Space.SOURCE_PAIR: dot_of_source_pairs}

# ---- sums over the edges of a node ----

LINEAR_SUM = "weighted sum of products, the better side"
ALL_AT_ONCE = "weighted sum of products, all relations at once"


def linear_sum(graph: RelGraph, x: Tensor, matrices: Tensor, weight: Tensor | None, on_gpu: bool) -> Tensor:
    """Sum over edges of weight * (x[src] @ matrices[relation]), per relation on the side that has fewer pairs. `on_gpu`: it will
    be, wherever its tensors are."""
    if graph.cells is not None and cells.pays(x, weight, matrices, on_gpu):
        return torch.ops.ws.cell_mm(x, weight, matrices, *graph.cells.ids(weight))  # type: ignore[no-any-return]
    rows = graph.rows
    entries = max(rows.gathered.index.shape[0], rows.spread.index.shape[0])
    if pays(x, weight, matrices, rows.gathered.ptr.shape[0] - 1, entries, on_gpu):
        tables = *rows.gathered.ids(weight), *rows.spread.ids(weight)
        return torch.ops.ws.linear_sum(x, weight, matrices, rows.ends, *tables)  # type: ignore[no-any-return]
    gathered, spread, plain = rows.gathered, rows.spread, (x.dim(), matrices.dim()) == (2, 3)
    if plain and gathered.edge is None:  # a row is one node's
        taken = gathered.index, matrices, rows.ends, gathered.back_ptr, gathered.back_index
        return spread(torch.ops.ws.gathered_mm(x, *taken), weight)
    if plain and spread.edge is None:  # a row is for one node
        given = spread.back_index, matrices, rows.ends, spread.ptr, spread.index
        return torch.ops.ws.scattered_mm(gathered(x, weight), *given)  # type: ignore[no-any-return]
    return spread(_by_group(gathered(x, weight), matrices, rows.ends), weight)


def source_sum(graph: RelGraph, x: Tensor, weight: Tensor | None) -> Tensor:
    return graph.neighbours(x, weight)


def source_pair_sum(graph: RelGraph, x: Tensor, weight: Tensor | None) -> Tensor:
    return graph.only_sources.spread(x, weight)


def edge_sum(graph: RelGraph, x: Tensor) -> Tensor:
    return graph.incoming(x)


def edge_max(graph: RelGraph, x: Tensor) -> Tensor:
    """0 for nodes without edges."""
    return largest_of(x, graph.dst.long(), graph.degree)


def mean_of(graph: RelGraph, total: Tensor) -> Tensor:
    return total / graph.degree.clamp(min=1).reshape(-1, *[1] * (total.dim() - 1))


def share_of_pair(graph: RelGraph, dtype: torch.dtype) -> Tensor:
    """For every edge one over the number of edges of its relation that come in at its node."""
    return (1 / torch.diff(graph.destinations.to_edge.back_ptr).to(dtype))[graph.destinations.to_edge.index.long()]


def softmax_of(graph: RelGraph, logits: Tensor, within_relation: bool) -> Tensor:
    """Over the edges that come in at a node, or over those of one relation."""
    ptr = graph.pair_ptr if within_relation else graph.ptr
    flat = logits if logits.dim() < 3 else logits.flatten(1)
    return torch.ops.ws.segment_softmax(flat, ptr).reshape(logits.shape)  # type: ignore[no-any-return]
