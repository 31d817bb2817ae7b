"""The tables of a RelGraph, their sizes, and by which side relations are taken; `building.py` makes them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from wholestep import ops as ops  # registers the operators


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
        """Whether there is room for a graph of other sizes, with one of each to spare for what fills it."""
        return all(mine > theirs for mine, theirs in zip(self, other, strict=True))


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
