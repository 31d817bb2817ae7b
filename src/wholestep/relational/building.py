"""Makes the tables of a RelGraph, or of several at once: edges in the order of (destination, relation) in, `tables.py` out.

Three sorts of the edges, by (relation, destination), (source, relation) and (relation, source), give every table: what stands
together in one of these orders is kept or left out by a flag, and running sums of flags say where it goes.

Everything here has one row per graph, so that many small graphs cost as many kernels as one. Rows are equally long: graphs of
several are filled up to *room*, sizes beyond what there is, by edges of the last relation that go from the last node to itself.
Pairs and rows beyond those are of the last node and relation as well, so every table stays a valid one and no operator has to
know. Nothing joins them to the rest: rows of other nodes, and their gradients, are what they are without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.batch import flatten, unflatten
from wholestep.ops.relational.cells import MOST_CELLS
from wholestep.relational.tables import Cells, NodeTypes, Pairs, Rows, Sizes, Table, Taking, side_of

ALIGNED = 16
"""Bytes. Compiled code copies inputs that begin at no multiple of it."""
BY_DIGITS = 2**15
"""From so many numbers on torch sorts them by their digits on a CPU, in 0.14 ms, where 24,000 take 1.17 ms and 6,000 0.22."""


@dataclasses.dataclass(frozen=True, slots=True)
class Edges:
    """Edges in the order of (destination, relation), and in three others; a row per graph."""

    relations: int
    src: Tensor
    dst: Tensor
    etype: Tensor
    by_src: Tensor
    """By (source, relation)."""
    by_source: Tensor
    """By (relation, source)."""
    by_destination: Tensor
    """By (relation, destination)."""
    real: Tensor | None = None
    """(rows, edges): which are no filling; None: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """Sources or destinations, and their pairs."""

    node: Tensor
    by_node: Tensor | None
    """Edges by (node, relation); None: as they are."""
    order: Tensor
    """Edges by (relation, node); the following three are in it."""
    nodes: Tensor
    relations: Tensor
    before: Tensor
    """How many pairs begin before an edge, and in all."""
    counts: Tensor
    """Relation -> its pairs."""


def make_tables(src: Tensor, dst: Tensor, etype: Tensor, nodes: int, relations: int) -> dict[str, Any]:
    """Fields of one RelGraph but for `order`. Waits for the device, for the sizes."""
    edges = in_order(src, dst, etype, nodes, relations)
    sides = sides_of(edges)
    fewer, counts = sizes_of(edges, sides, 1)
    *found, through_sources = counts[0].tolist()
    there, side = Sizes(nodes, *found), None
    if there.edges:
        side = side_of(there.source_pairs, there.destination_pairs, there.rows, etype.is_cuda)
    by_source: Tensor | None = fewer
    if side is not None:
        by_source, there = torch.full_like(fewer, side), there.all_by(sources=side)
        through_sources = side * there.edges
    if 0 < there.edges == through_sources:
        by_source = None
    tables = tables_of(edges, sides, by_source, there)
    tables["cells"] = _cells(sides, edges, tables["at_destinations"], tables["only_sources"].spread, there)
    made: dict[str, Any] = one_row(tables)
    if by_source is None:
        made["rows"] = made["only_sources"]
    elif there.edges and not through_sources:  # one of the two tables sums over pairs alone
        spread = dataclasses.replace(made["rows"].spread, edge=None, back_edge=None)
        made["rows"] = dataclasses.replace(made["rows"], spread=spread)
    return made


def in_order(src: Tensor, dst: Tensor, etype: Tensor, nodes: int, relations: int) -> Edges:
    """One row, of edges in the order of (destination, relation)."""
    src, dst, etype = (narrow(most)(ids) for ids, most in ((src, nodes), (dst, nodes), (etype, relations)))
    by_destination = order_of(etype, relations)
    by_src = by_destination.index_select(0, order_of(src.index_select(0, by_destination), nodes))
    by_source = by_src.index_select(0, order_of(etype.index_select(0, by_src), relations))
    return Edges(relations, *(t[None] for t in (src, dst, etype, by_src, by_source, by_destination)))


def in_rows(edges: Edges, begin: Tensor, which: Tensor, apart: int, sizes: Sizes) -> tuple[Edges, Tensor]:
    """From graphs side by side in one row some of them in rows of their own, filled up to sizes, and where their edges stood; -1
    for what fills them up.

    `begin`: graph -> where its edges begin, and the end; `apart`: how far the nodes of a graph are from those of the one before.
    """
    start, end = (begin.index_select(0, which + n)[:, None] for n in (0, 1))
    place = torch.arange(sizes.edges, device=which.device)
    real = place < end - start
    at = torch.where(real, start + place, -1)
    relations = edges.relations // (len(begin) - 1)
    nodes, kinds, last = which[:, None] * apart, which[:, None] * relations, sizes.nodes - 1
    less = (nodes, last), (nodes, last), (kinds, relations - 1), *[(start, place)] * 3
    given = edges.src, edges.dst, edges.etype, edges.by_src, edges.by_source, edges.by_destination
    rows = (torch.where(real, some(t[0], at) - n.to(t.dtype), fill) for t, (n, fill) in zip(given, less, strict=True))
    return Edges(relations, *rows, *[real]), at


def some(t: Tensor, at: Tensor) -> Tensor:
    """t[at], anything where that is -1."""
    return t.index_select(0, at.view(-1).clamp(min=0)).view(at.shape) if len(t) else torch.zeros_like(at)


def order_of(ids: Tensor, most: int) -> Tensor:
    """Where the ids, which are below `most`, stand in their order, equal ones as they are; narrow ones are sorted twice as fast."""
    ids = narrow(most)(ids)
    if ids.device.type == "cpu" and BY_DIGITS // 5 < len(ids) < BY_DIGITS:
        more = ids.new_full((BY_DIGITS - len(ids),), most)
        return torch.cat([ids, more]).sort(stable=True).indices[: len(ids)]
    return ids.sort(stable=True).indices


def sides_of(edges: Edges) -> list[Side]:
    orders = ((edges.src, edges.by_src, edges.by_source), (edges.dst, None, edges.by_destination))
    return [_side(edges.etype, edges.relations, *given) for given in orders]


def _side(etype: Tensor, relations: int, node: Tensor, by_node: Tensor | None, order: Tensor) -> Side:
    nodes, kinds = _at(node, order), _at(etype, order)
    before = _before(_changes(kinds) | _changes(nodes))
    return Side(node, by_node, order, nodes, kinds, before, torch.diff(_at(before, _starts(kinds, relations))))


def sizes_of(edges: Edges, sides: Sequence[Side], graphs: int) -> tuple[Tensor, Tensor]:
    """(relations whose sources are fewer, (graphs, sizes but for nodes; edges of such relations)); one row of edges, in which
    every graph has as many relations."""
    of_source, of_destination = (side.counts.view(graphs, -1) for side in sides)
    per_relation = torch.diff(_starts(sides[0].relations, edges.relations)).view(graphs, -1)
    fewer = of_source <= of_destination
    counts = (
        per_relation, of_source, of_destination, torch.minimum(of_source, of_destination),
        torch.where(fewer, of_source, per_relation), torch.where(fewer, per_relation, of_destination),
        torch.where(fewer, per_relation, 0),
    )  # fmt: skip
    return fewer, torch.stack(counts, -1).sum(1)


def tables_of(edges: Edges, sides: Sequence[Side], by_source: Tensor | None, sizes: Sizes) -> dict[str, Any]:
    """Fields of RelGraph but for `order`, a row per graph. `by_source`: relation -> whether by its sources; None: all are, as in
    `only_sources`, and there are no `rows`."""
    src, dst, etype = edges.src, edges.dst, edges.etype
    pairs, device = sizes.source_pairs + sizes.destination_pairs, src.device
    fit = narrow(max(*sizes, pairs, edges.relations))
    starts = [_starts(_at(side.node, side.by_node), sizes.nodes) for side in sides]
    sources, destinations = (
        _pairs(sides[n], starts[n], size, sizes.nodes - 1, edges.relations - 1, fit)
        for n, size in enumerate((sizes.source_pairs, sizes.destination_pairs))
    )
    numbered = sources.to_edge.index, destinations.to_edge.index
    src, dst, etype, back = (fit(t) for t in (src, dst, etype, edges.by_src))
    whole = fit(torch.arange(max(sizes.edges, pairs) + 1, device=device))[None]
    everyone = whole[:, : sizes.edges]
    back_ptr, ptr = (fit(begin) for begin in starts)
    pair_of = _before(_changes(numbered[1]))[:, 1:] - 1  # in the order of edges
    at_edges, of_node = sources.to_edge, sources.of_node
    only_sources = Rows(
        sources.ends,
        Table(whole[:, : sizes.source_pairs + 1], of_node.index, None, of_node.back_ptr, of_node.back_index, None),
        Table(ptr, at_edges.index, everyone, at_edges.back_ptr, _at(dst, at_edges.back_index), at_edges.back_index),
        torch.ones_like(sides[0].counts, dtype=torch.bool),
    )
    to_edge = destinations.to_edge
    return {
        "src": src, "dst": dst, "etype": etype, "ptr": ptr, "pair_ptr": fit(_starts(pair_of, sizes.destination_pairs)),
        "degree": torch.diff(starts[1]), "from_src": Taking(src, back_ptr, back), "from_dst": Taking(dst, ptr, everyone),
        "sources": sources, "destinations": destinations, "only_sources": only_sources,
        "rows": None if by_source is None else _rows(sides, numbered, starts, edges, by_source, sizes, fit),
        "cells": None, "between": None,
        "of_relations": _of_relations(sources, destinations, whole[:, :pairs]),
        "at_destinations": Table(
            to_edge.back_ptr, _at(src, to_edge.back_index), to_edge.back_index, back_ptr, _at(to_edge.index, back), back
        ),
        "incoming": Table(ptr, everyone, everyone, whole[:, : sizes.edges + 1], dst, everyone),
        "neighbours": Table(ptr, src, everyone, back_ptr, _at(dst, back), back),
        "nodes": torch.empty(src.shape[0], sizes.nodes, 0, device=device),
    }  # fmt: skip


def make_types(types: Tensor, count: int, sorted_or_not: bool = True) -> NodeTypes:
    """From the type of every node, a row per graph. `sorted_or_not`: whether to look if they are in order, which waits."""
    (graphs, nodes), device = types.shape, types.device
    graph = torch.arange(graphs, device=device)[:, None]
    order = order_of((graph * count + types).view(-1), graphs * count).view(graphs, nodes) - graph * nodes
    fit, everyone = narrow(max(nodes, count)), torch.arange(nodes + 1, device=device).expand(graphs, -1)
    to_node = Taking(fit(types), fit(_starts(_at(types, order), count)), fit(order))
    if sorted_or_not and bool((types[:, 1:] >= types[:, :-1]).all()):
        return NodeTypes(to_node.back_ptr[:, 1:], to_node, None)
    places = torch.empty_like(order).scatter_(1, order, everyone[:, :-1])
    return NodeTypes(to_node.back_ptr[:, 1:], to_node, Taking(to_node.back_index, fit(everyone), fit(places)))


# ---- the parts ----


def _pairs(side: Side, starts: Tensor, size: int, last: int, last_relation: int, fit: Fit) -> Pairs:
    """`starts`: node -> its edges."""
    numbers = side.before[:, 1:] - 1
    pair = torch.empty_like(side.order).scatter_(1, side.order, numbers)
    relation, node = (
        _put(size, fill, numbers, fit(ids)) for fill, ids in ((last_relation, side.relations), (last, side.nodes))
    )
    ends = _closed(side.counts.cumsum(1), size)
    at_edges = Taking(fit(pair), fit(_starts(numbers, size)), fit(side.order))
    by_node = _at(at_edges.index, side.by_node)
    place, ptr = _selected(_changes(by_node), starts, size)
    # pairs beyond those of the edges come last here too
    spare = torch.arange(size, dtype=node.dtype, device=node.device).repeat(len(node), 1)
    of_node = Taking(node, fit(ptr), spare.scatter_(1, place, by_node))
    return Pairs(relation, fit(ends), of_node, at_edges)


def _of_relations(sources: Pairs, destinations: Pairs, everyone: Tensor) -> Table:
    """Node by node its source pairs, then its destination pairs, which are numbered behind all source pairs."""
    count, relations = sources.relation.shape[1], sources.ends.shape[1]
    one, other = sources.of_node, destinations.of_node
    places = (
        everyone[:, :count] + _at(other.back_ptr, _at(one.index, one.back_index)),
        everyone[:, : everyone.shape[1] - count] + _at(one.back_ptr, _at(other.index, other.back_index) + 1),
    )
    place = torch.cat(places, 1).long()
    edge = one.back_index.new_empty(place.shape).scatter_(
        1, place, torch.cat([one.back_index, other.back_index + count], 1)
    )
    relation = torch.cat([sources.relation, destinations.relation + relations], 1)
    ends = torch.cat([sources.ends.new_zeros(len(edge), 1), sources.ends, destinations.ends + count], 1)
    back_index = torch.cat([one.index, other.index], 1)
    return Table(one.back_ptr + other.back_ptr, _at(relation, edge), edge, ends, back_index, everyone)


def _cells(sides: Sequence[Side], edges: Edges, at_destinations: Table, spread: Table, sizes: Sizes) -> Cells | None:
    """Of one graph, where enough nodes have edges of enough relations. Both tables are over all edges, by (relation, node)."""
    count = sizes.nodes * edges.relations
    if not sizes.edges or count > MOST_CELLS * min(sizes.source_pairs, sizes.destination_pairs):
        return None
    fit = narrow(max(*sizes, sizes.source_pairs + sizes.destination_pairs, edges.relations))
    begin = [fit(_starts(side.relations.long() * sizes.nodes + side.nodes, count)) for side in sides]
    forth = begin[1], at_destinations.index, fit(sides[1].nodes), at_destinations.edge
    return Cells(*forth, begin[0], spread.back_index, fit(sides[0].nodes), spread.back_edge)  # type: ignore[arg-type]


def _rows(
    sides: Sequence[Side], pair: Sequence[Tensor], starts: Sequence[Tensor], edges: Edges, by_source: Tensor,
    sizes: Sizes, fit: Fit,
) -> Rows:  # fmt: skip
    """The rows of the chosen side of every relation, and the two tables around them.

    In each of three orders of the edges (by source, by destination, by row) an edge stands for an entry of its own, or the first
    edge of a pair for that pair's one entry; edges that are left out write what their pair's first edge writes. What fills the
    room up is a pair that has one entry in both tables.
    """
    source, destination = sides
    counts = torch.where(by_source, source.counts, destination.counts)
    shift = [_before(counts)[:, :-1] - _before(side.counts)[:, :-1] for side in sides]
    through = _at(by_source, edges.etype)
    row = torch.where(through, *(one + _at(fit(less), edges.etype) for one, less in zip(pair, shift, strict=True)))
    # relations of sources, as those of destinations: every relation has as many edges here as there
    by_row = torch.where(_at(by_source, source.relations), source.order, destination.order)
    ends, rows = _closed(counts.cumsum(1), sizes.rows), _at(row, by_row)
    by_src, begin_row = source.by_node, _starts(rows, sizes.rows)
    new_row, new_src, new_dst = _changes(rows), _changes(_at(row, by_src)), _changes(row)
    everyone = fit(torch.arange(sizes.edges, device=row.device))
    own, whole = through, ~through
    if edges.real is not None:
        own, whole = own & edges.real, whole & edges.real

    def entries(
        order: Tensor | None, first: Tensor, begin: Tensor, own: Tensor, size: int, what: Tensor, fill: int
    ) -> list[Tensor]:
        """`own`: which edges have an entry of their own; ptr, rows read, and edges whose weight counts."""
        own, read = _at(own, order), _at(what, order)
        place, ptr = _selected(own | first, begin, size)
        edge = torch.where(own, everyone if order is None else fit(order), -1)
        return [fit(ptr), _put(size, fill, place, read), _put(size, -1, place, edge)]

    last, spare = sizes.nodes - 1, sizes.rows - 1
    gathered = Table(
        *entries(by_row, new_row, begin_row, whole, sizes.gathered, fit(source.node), last),
        *entries(by_src, new_src, starts[0], whole, sizes.gathered, row, spare),
    )
    spread = Table(
        *entries(None, new_dst, starts[1], own, sizes.spread, row, spare),
        *entries(by_row, new_row, begin_row, own, sizes.spread, fit(destination.node), last),
    )
    return Rows(fit(ends), gathered, spread, by_source)


# ---- rows apart ----


def one_row(stacked: Any) -> Any:
    """What has one row, without it."""
    tensors, spec = flatten(stacked)
    only = {id(t): t[0].detach() for t in tensors}  # no view, which a compiler would ask for what it is a view of
    return unflatten([only[id(t)] for t in tensors], spec)


def rows_apart(stacked: Any) -> list[Callable[[], Any]]:
    """What makes each of the rows' graphs, of tensors that share memory with none but the same one of other rows."""
    tensors, spec = flatten(stacked)
    count = max(t.shape[0] for t in tensors)
    apart = {id(t): _apart(t, count) for t in tensors}
    of_row = list(zip(*(apart[id(t)] for t in tensors), strict=True))
    return [lambda row=row: unflatten(row, spec) for row in of_row]  # type: ignore[misc]


def _apart(t: Tensor, count: int) -> Sequence[Tensor]:
    if not t.numel():
        return [t.new_empty(t.shape[1:]) for _ in range(count)]
    step, size = ALIGNED // t.element_size(), t.shape[1:].numel()
    if t.data_ptr() % ALIGNED or len(t) < count or (count > 1 and (t.stride(0) % step or t.stride(0) < size)):
        wide = t.new_empty(count, -(-size // step) * step)[:, :size]
        t = wide.copy_(t.reshape(-1, size)).view(count, *t.shape[1:])
    return [row.detach() for row in t.unbind(0)]


# ---- small things ----

Fit = Callable[[Tensor], Tensor]


def narrow(most: int) -> Fit:
    """int32 where all ids fit, int64 elsewhere."""
    return Tensor.int if most < 2**31 - 1 else Tensor.long


def _starts(sorted_ids: Tensor, count: int) -> Tensor:
    """Where each id begins, among ids that are sorted, and the end. Counting is quicker, but waits for a GPU."""
    graphs, device = sorted_ids.shape[0], sorted_ids.device
    if device.type == "cpu":
        graph = torch.arange(graphs)[:, None] * count
        ids = sorted_ids if graphs == 1 else sorted_ids + graph
        return _before(torch.bincount(ids.reshape(-1), minlength=graphs * count).view(graphs, count))
    ids = torch.arange(count + 1, device=device, dtype=sorted_ids.dtype)
    return torch.searchsorted(sorted_ids.contiguous(), ids.repeat(graphs, 1))


def _changes(ids: Tensor) -> Tensor:
    """Which are other than the one before."""
    return torch.cat([ids.new_ones(len(ids), min(ids.shape[1], 1), dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1)


def _before(counts: Tensor) -> Tensor:
    """Sums of what stands before each, and of all."""
    return torch.cat([counts.new_zeros(len(counts), 1, dtype=torch.int64), counts.cumsum(1)], 1)


def _at(t: Tensor, index: Tensor | None) -> Tensor:
    """t[index], row by row; t itself without."""
    if index is None:
        return t
    if len(t) == len(index) == 1:
        return t[0].index_select(0, index[0])[None]
    rows = max(len(t), len(index))
    return t.expand(rows, -1).gather(1, index.long().expand(rows, -1))


def _selected(keep: Tensor, starts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each kept one goes (the others go where the kept one before them does), and where each group begins."""
    before = _before(keep)
    return before[:, 1:] - 1, _closed(_at(before, starts), size)


def _closed(ptr: Tensor, size: int) -> Tensor:
    """What fills the room is of the last."""
    ptr[:, -1:] = size
    return ptr


def _put(size: int, fill: int, place: Tensor, values: Tensor) -> Tensor:
    return torch.full((len(place), size), fill, dtype=values.dtype, device=place.device).scatter_(1, place, values)
