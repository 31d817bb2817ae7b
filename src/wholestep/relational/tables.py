"""The tables of a RelGraph: edges in the order of (destination, relation) in, everything that layers run over out.

Three sorts of the edges, by (source, relation), (relation, source) and (relation, destination), give every table: what stands
together in one of these orders is kept or left out by a flag, and running sums of flags say where it goes. Sizes that data decide
are read once, all together; nothing else waits for a device.

A table may have *room*: sizes beyond what there is, so that graphs of different edges have equal shapes. What fills it belongs to
the last node and the last relation, and the last pair and row are its own, so every table stays a valid one and no operator
has to know. No edge joins it to the rest: rows of other nodes, and their gradients, are what they are without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wholestep import ops as ops  # registers the operators
from wholestep.ops.relational.cells import MOST_CELLS


@dataclasses.dataclass(frozen=True, slots=True)
class Taking:
    """Rows handed out: row i of the result is row index[i]; back_ptr and back_index say who took a row."""

    index: Tensor
    back_ptr: Tensor
    back_index: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.ws.take_rows(x, self.index, self.back_ptr, self.back_index)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows summed up: the entries of target t stand at ptr[t] to ptr[t + 1]; `edge` is that whose weight counts, or -1.

    Without `edge` no entry has one: weights are not asked for, so that nothing is kept for their gradient.
    """

    ptr: Tensor
    index: Tensor
    edge: Tensor | None
    back_ptr: Tensor
    back_index: Tensor
    back_edge: Tensor | None

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.ws.gather_sum(x, None if self.edge is None else weight, *self.ids(weight))
        return out

    def ids(self, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """As operators take them, without edges where no weight is given."""
        edge, back_edge = (None, None) if weight is None else (self.edge, self.back_edge)
        return self.ptr, self.index, edge, self.back_ptr, self.back_index, back_edge

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """For every edge the product of the row of its target and the one it reads, along the last dimension. Of tables where every
        entry has an edge."""
        table = self.ptr, self.index, self.edge, self.back_ptr, self.back_index, self.back_edge
        out: Tensor = torch.ops.ws.edge_dot(left, right, *table)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of one side, in the order of (relation, node)."""

    relation: Tensor
    ends: Tensor
    """Relation -> where its pairs end."""
    of_node: Taking
    """Node -> its pairs."""
    to_edge: Taking
    """Pair -> its edges."""

    def dot(self, nodes: Tensor, relations: Tensor) -> Tensor:
        """For every pair the product of the rows of its node and its relation, along the last dimension."""
        everyone = torch.arange(self.relation.shape[0], dtype=self.ends.dtype, device=self.ends.device)
        starts = torch.cat([self.ends.new_zeros(1), self.ends])
        of_node = self.of_node
        by_node = of_node.back_ptr, self.relation.index_select(0, of_node.back_index), of_node.back_index
        out: Tensor = torch.ops.ws.edge_dot(nodes, relations, *by_node, starts, of_node.index, everyone)
        return out


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTypes:
    """The type of every node."""

    ends: Tensor
    """Type -> where its nodes end, in the order of types."""
    to_node: Taking
    """Type -> its nodes."""
    order: Taking | None
    """Nodes in the order of types; None where they are in that order."""

    @property
    def count(self) -> int:
        return self.ends.shape[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """One row per pair of the side that was chosen for its relation, in the order of relations."""

    ends: Tensor
    gathered: Table
    """Nodes -> rows: the source of a source pair; for a destination pair the sum over its edges."""
    spread: Table
    """Rows -> nodes: over the edges of a source pair; a destination pair to its node."""
    by_source: Tensor
    """Relation -> whether source pairs were chosen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cells:
    """Source nodes -> the cells of destinations, over edges, and turned round (`ops/relational/cells.py`)."""

    ptr: Tensor
    index: Tensor
    target: Tensor
    edge: Tensor
    back_ptr: Tensor
    back_index: Tensor
    back_target: Tensor
    back_edge: Tensor

    def ids(self, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        """As the operator takes them, without edges where no weight is given."""
        edge, back_edge = (None, None) if weight is None else (self.edge, self.back_edge)
        forth = self.ptr, self.index, self.target, edge
        return *forth, self.back_ptr, self.back_index, self.back_target, back_edge


class Sizes(NamedTuple):
    """All sizes of a graph's tables that its edges decide."""

    nodes: int
    edges: int
    source_pairs: int
    destination_pairs: int
    rows: int
    gathered: int
    """Entries of `rows.gathered`."""
    spread: int
    """Entries of `rows.spread`."""

    def all_by(self, *, sources: bool) -> Sizes:
        """The same where all relations are taken by one side."""
        rows = self.source_pairs if sources else self.destination_pairs
        through = (rows, self.edges) if sources else (self.edges, rows)
        return self._replace(rows=rows, gathered=through[0], spread=through[1])

    def hold(self, other: Sizes) -> bool:
        """Whether there is room for a graph of other sizes, with a node, an edge, pairs and a row to spare for what fills it."""
        spare = Sizes(1, 1, 1, 1, 1, 0, 0)
        return all(mine >= theirs + more for mine, theirs, more in zip(self, other, spare, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """Sources or destinations, and their pairs; `order`: edges by (relation, node); `by_node`: edges by (node, relation)."""

    node: Tensor
    by_node: Tensor
    order: Tensor
    pair: Tensor
    """Edge -> its pair."""
    counts: Tensor
    """Relation -> its pairs."""


PER_PAIR, PER_ROW = 8, 10
"""Rows that a layer moves, forward and backward, for a pair where all relations are taken by one side, and for a row where sides
differ: then rows are sums on both of their ends, and products can neither take nor give them by themselves."""
BY_DESTINATION, BY_EITHER = 150_000, 300_000
"""What longer waits for targets of few entries, and more kernels, take on a GPU beside: as many rows as are moved in that time (9
and 18 us of an H200, of 256 bytes each). On aifb, where destinations save 98,000, sources are quicker by 15 us; on mutag, where
they save 296,000, slower by 30."""


def side_of(sources: int, destinations: int, better: int, on_gpu: bool) -> bool | None:
    """Of the pairs of both sides, and the rows of the better one per relation: whether all relations are best taken by their
    sources, or all by their destinations (False), or (None) each by its own side."""
    costs = {
        True: PER_PAIR * sources,
        False: PER_PAIR * destinations + BY_DESTINATION * on_gpu,
        None: PER_ROW * better + BY_EITHER * on_gpu,
    }
    return min(costs, key=lambda side: costs[side])


def make_tables(
    src: Tensor, dst: Tensor, etype: Tensor, nodes: int, relations: int, room: Callable[[Sizes], Sizes] | None = None
) -> dict[str, Any]:
    """Fields of a RelGraph but for `order`. `room`: the sizes that there are -> those that the tables get, which hold them."""
    edges = torch.arange(src.shape[0], device=src.device)
    by_src = (src * relations + etype).argsort(stable=True)
    sides = [_side(node, order, etype, nodes, relations) for node, order in ((src, by_src), (dst, edges))]
    by_source, there, through_sources = _chosen(sides, etype, nodes, relations, one_side=room is None)
    sizes = there
    if room is not None:
        sizes = room(there)
        assert sizes.hold(there), f"{sizes} have no room for {there}"
    fit = _narrow(max(*sizes, sizes.source_pairs + sizes.destination_pairs, relations))
    starts = [_starts(_at(side.node, side.by_node), sizes.nodes) for side in sides]
    sources, destinations = (
        _pairs(side, etype, begin, size, sizes, relations, fit)
        for side, begin, size in zip(sides, starts, (sizes.source_pairs, sizes.destination_pairs), strict=True)
    )
    last = sizes.nodes - 1
    long = [fit(_filled_up(t, sizes.edges, fill)) for t, fill in ((src, last), (dst, last), (etype, relations - 1))]
    pairs = sizes.source_pairs + sizes.destination_pairs
    numbers = fit(torch.arange(max(sizes.edges, pairs) + 1, device=src.device))
    everyone = numbers[: sizes.edges]
    ptr, back_ptr = (fit(_closed(begin.clone(), sizes.edges)) for begin in starts[::-1])
    back = fit(_counted_on(by_src, sizes.edges))
    pair_of = _before(_changes(sides[1].pair))[1:] - 1  # in the order of edges
    pair_ptr = _closed(_starts(pair_of, sizes.destination_pairs), sizes.edges)
    at_edges, of_node = sources.to_edge, sources.of_node
    only_sources = Rows(
        sources.ends,
        Table(numbers[: sizes.source_pairs + 1], of_node.index, None, of_node.back_ptr, of_node.back_index, None),
        Table(ptr, at_edges.index, everyone, at_edges.back_ptr, _at(long[1], at_edges.back_index), at_edges.back_index),
        torch.ones_like(by_source),
    )
    at_destinations = Table(
        destinations.to_edge.back_ptr, _at(long[0], destinations.to_edge.back_index), destinations.to_edge.back_index,
        back_ptr, _at(destinations.to_edge.index, back), back,
    )  # fmt: skip
    if room is None and 0 < sizes.edges == through_sources:
        rows = only_sources
    else:
        rows = _rows(sides, starts, etype, fit, by_source, sizes)
    if room is None and sizes.edges and through_sources == 0:  # one of the two tables sums over pairs alone
        rows = dataclasses.replace(rows, spread=dataclasses.replace(rows.spread, edge=None, back_edge=None))
    return {
        "src": long[0], "dst": long[1], "etype": long[2], "ptr": ptr, "pair_ptr": fit(pair_ptr), "degree": torch.diff(ptr.long()),
        "from_src": Taking(long[0], back_ptr, back), "from_dst": Taking(long[1], ptr, everyone),
        "sources": sources, "destinations": destinations, "rows": rows, "only_sources": only_sources,
        "cells": None if room is not None else _cells(sides, etype, at_destinations, only_sources.spread, sizes, fit),
        "between": None, "of_relations": _of_relations(sources, destinations, numbers[:pairs]),
        "at_destinations": at_destinations,
        "incoming": Table(ptr, everyone, everyone, numbers[: sizes.edges + 1], long[1], everyone),
        "neighbours": Table(ptr, long[0], everyone, back_ptr, _at(long[1], back), back),
        "nodes": torch.empty(sizes.nodes, 0, device=src.device),
    }  # fmt: skip


def make_types(types: Tensor, count: int, sorted_or_not: bool = True) -> NodeTypes:
    """From the type of every node. `sorted_or_not`: whether to look if they are in order, which waits for the device."""
    nodes, device = types.shape[0], types.device
    fit, order = _narrow(max(nodes, count)), types.argsort(stable=True)
    everyone = torch.arange(nodes + 1, device=device)
    to_node = Taking(fit(types), fit(_starts(_at(types, order), count)), fit(order))
    if sorted_or_not and bool((types[1:] >= types[:-1]).all()):
        return NodeTypes(to_node.back_ptr[1:], to_node, None)
    places = torch.empty_like(order).scatter_(0, order, everyone[:-1])
    return NodeTypes(to_node.back_ptr[1:], to_node, Taking(to_node.back_index, fit(everyone), fit(places)))


# ---- the two sides, and the rows of the better one ----


def _chosen(
    sides: list[_Side], etype: Tensor, nodes: int, relations: int, *, one_side: bool
) -> tuple[Tensor, Sizes, int]:
    """Relation -> whether sources were chosen; sizes; edges of such relations. Waits for the device. `one_side`: all relations may
    take the same; otherwise graphs of equal shapes are one program, whatever is best for each."""
    per_relation = torch.diff(_starts(_at(etype, sides[0].order), relations))
    of_source, of_destination = (side.counts for side in sides)
    fewer = of_source <= of_destination
    counts = (
        of_source, of_destination, torch.minimum(of_source, of_destination),
        torch.where(fewer, of_source, per_relation), torch.where(fewer, per_relation, of_destination),
        torch.where(fewer, per_relation, 0),
    )  # fmt: skip
    *found, through_sources = torch.stack([count.sum() for count in counts]).tolist()
    there = Sizes(nodes, etype.shape[0], *found)
    side = None
    if one_side and there.edges:
        side = side_of(there.source_pairs, there.destination_pairs, there.rows, etype.is_cuda)
    if side is None:
        return fewer, there, through_sources
    return torch.full_like(fewer, side), there.all_by(sources=side), side * there.edges


def _side(node: Tensor, by_node: Tensor, etype: Tensor, nodes: int, relations: int) -> _Side:
    keys, order = (etype * nodes + node).sort(stable=True)
    before = _before(_changes(keys))
    pair = torch.empty_like(order).scatter_(0, order, before[1:] - 1)
    counts = torch.diff(_at(before, _starts(_at(etype, order), relations)))
    return _Side(node, by_node, order, pair, counts)


def _pairs(side: _Side, etype: Tensor, starts: Tensor, size: int, sizes: Sizes, relations: int, fit: Fit) -> Pairs:
    pair = _at(side.pair, side.order)
    relation = _put(size, relations - 1, pair, _at(etype, side.order))
    node = _put(size, sizes.nodes - 1, pair, _at(side.node, side.order))
    ends = _closed(side.counts.cumsum(0), size)
    at_edges = Taking(
        fit(_filled_up(side.pair, sizes.edges, size - 1)), fit(_closed(_starts(pair, size), sizes.edges)),
        fit(_counted_on(side.order, sizes.edges)),
    )  # fmt: skip
    in_order = _at(side.pair, side.by_node)
    place, ptr = _selected(_changes(in_order), starts, size)
    spare = torch.arange(size, device=pair.device)  # pairs that fill the room are the last in this order too
    of_node = Taking(fit(node), fit(ptr), fit(spare.scatter_(0, place, in_order)))
    return Pairs(fit(relation), fit(ends), of_node, at_edges)


def _of_relations(sources: Pairs, destinations: Pairs, everyone: Tensor) -> Table:
    """Node by node its source pairs, then its destination pairs, which are numbered behind all source pairs."""
    count, relations = sources.relation.shape[0], sources.ends.shape[0]
    one, other = sources.of_node, destinations.of_node
    places = (
        everyone[:count] + _at(other.back_ptr, _at(one.index, one.back_index)),
        everyone[: everyone.shape[0] - count] + _at(one.back_ptr, _at(other.index, other.back_index) + 1),
    )
    edge = torch.empty_like(everyone).scatter_(
        0, torch.cat(places).long(), torch.cat([one.back_index, other.back_index + count])
    )
    relation = torch.cat([sources.relation, destinations.relation + relations])
    ends = torch.cat([sources.ends.new_zeros(1), sources.ends, destinations.ends + count])
    back_index = torch.cat([one.index, other.index])
    return Table(one.back_ptr + other.back_ptr, _at(relation, edge), edge, ends, back_index, everyone)


def _cells(
    sides: list[_Side], etype: Tensor, at_destinations: Table, spread: Table, sizes: Sizes, fit: Fit
) -> Cells | None:
    """Where enough nodes have edges of enough relations. Both tables are over all edges, by (relation, node)."""
    count = sizes.nodes * sides[0].counts.shape[0]
    if not sizes.edges or count > MOST_CELLS * min(sizes.source_pairs, sizes.destination_pairs):
        return None
    nodes = [_at(side.node, side.order) for side in sides]
    begin = [
        fit(_starts(_at(etype, side.order) * sizes.nodes + node, count))
        for side, node in zip(sides, nodes, strict=True)
    ]
    forth = begin[1], at_destinations.index, fit(nodes[1]), at_destinations.edge
    return Cells(*forth, begin[0], spread.back_index, fit(nodes[0]), spread.back_edge)  # type: ignore[arg-type]


def _rows(sides: list[_Side], starts: list[Tensor], etype: Tensor, fit: Fit, by_source: Tensor, sizes: Sizes) -> Rows:
    """The rows of the chosen side of every relation, and the two tables around them.

    In each of three orders of the edges (by source, by destination, by row) an edge stands for an entry of its own, or the first
    edge of a pair for that pair's one entry; edges that are left out write what their pair's first edge writes.
    """
    source, destination = sides
    counts = torch.where(by_source, source.counts, destination.counts)
    shift = [_before(counts)[:-1] - _before(side.counts)[:-1] for side in sides]
    through = _at(by_source, etype)
    row = torch.where(through, source.pair + _at(shift[0], etype), destination.pair + _at(shift[1], etype))
    ordered = _at(etype, source.order)  # as that of the destinations: every relation has as many edges here as there
    by_row = torch.where(_at(by_source, ordered), source.order, destination.order)
    first = {name: _changes(_at(row, order)) for name, order in (("src", source.by_node), ("row", by_row))}
    first["dst"] = _changes(row)
    ends = _closed(counts.cumsum(0), sizes.rows)
    begin_row = _starts(_at(row, by_row), sizes.rows)
    last, spare = sizes.nodes - 1, sizes.rows - 1

    def entries(
        name: str, order: Tensor, begin: Tensor, whole: Tensor, size: int, what: Tensor, fill: int
    ) -> list[Tensor]:
        """`whole`: which edges have an entry of their own; ptr, rows read, and edges whose weight counts."""
        own = _at(whole, order)
        place, ptr = _selected(own | first[name], begin, size)
        return [fit(t) for t in (
            ptr, _put(size, fill, place, _at(what, order)), _put(size, -1, place, torch.where(own, order, -1)),
        )]  # fmt: skip

    everyone = destination.by_node
    gathered = Table(
        *entries("row", by_row, begin_row, ~through, sizes.gathered, source.node, last),
        *entries("src", source.by_node, starts[0], ~through, sizes.gathered, row, spare),
    )
    spread = Table(
        *entries("dst", everyone, starts[1], through, sizes.spread, row, spare),
        *entries("row", by_row, begin_row, through, sizes.spread, destination.node, last),
    )
    return Rows(fit(ends), gathered, spread, by_source)


# ---- small things ----

Fit = Callable[[Tensor], Tensor]


def _narrow(most: int) -> Fit:
    """int32 where all ids fit."""
    return (lambda t: t.int()) if most < 2**31 - 1 else (lambda t: t)


def _starts(sorted_ids: Tensor, count: int) -> Tensor:
    """Where each id begins, among ids that are sorted, and the end. Counting is quicker, but waits for a GPU."""
    if sorted_ids.device.type == "cpu":
        return _before(torch.bincount(sorted_ids, minlength=count))
    return torch.searchsorted(sorted_ids, torch.arange(count + 1, device=sorted_ids.device))


def _changes(ids: Tensor) -> Tensor:
    """Which are other than the one before."""
    return torch.cat([ids.new_ones(min(ids.shape[0], 1), dtype=torch.bool), ids[1:] != ids[:-1]])


def _before(counts: Tensor) -> Tensor:
    """Sums of what stands before each, and of all."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _at(t: Tensor, index: Tensor) -> Tensor:
    """t[index], which takes five times as long on a CPU."""
    return t.index_select(0, index)


def _selected(keep: Tensor, starts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Where each kept one goes (the others go where the kept one before them does), and where each group begins."""
    before = _before(keep)
    return before[1:] - 1, _closed(_at(before, starts), size)


def _closed(ptr: Tensor, size: int) -> Tensor:
    """What fills the room is of the last."""
    ptr[-1:] = size
    return ptr


def _put(size: int, fill: int, place: Tensor, values: Tensor) -> Tensor:
    return torch.full((size,), fill, dtype=torch.int64, device=place.device).scatter_(0, place, values)


def _filled_up(t: Tensor, size: int, fill: int) -> Tensor:
    return t if t.shape[0] == size else torch.cat([t, t.new_full((size - t.shape[0],), fill)])


def _counted_on(order: Tensor, size: int) -> Tensor:
    """What fills the room comes last in every order."""
    return (
        order if order.shape[0] == size else torch.cat([order, torch.arange(order.shape[0], size, device=order.device)])
    )
