"""Draws sampled neighbours of several batches of seeds at once, and makes tables of what was found.

In: the whole graph, seeds (a row per batch), how many edges of a node are drawn per hop. Out: blocks of the batches, as tensors
that have a row each. A node of a batch is one number, batch * nodes + node, so that a sort finds nodes again and keeps batches
apart, and many batches cost as many kernels as one.

These are generators: where the host needs a count that data decide they yield it as a tensor on the device, and are sent the
numbers. In between they wait for nothing, so who runs them may do other things until the numbers are there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.relational.building import Edges, in_order, in_rows, order_of, sides_of, sizes_of, some
from wholestep.relational.graph import RelGraph
from wholestep.relational.tables import Sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn for batches: nodes are numbered in each, the seeds first."""

    seeds: Tensor
    """(batches, seeds)."""
    node: Tensor
    """Nodes of the whole graph, some of them more than once."""
    batch: Tensor
    """Of each of these."""
    number: Tensor
    """Of each of these, in its batch."""
    edge: Tensor
    """Places in the whole graph, in the order of (batch, destination, relation)."""
    edges: Edges
    """The same edges, as those of one graph that has all batches' nodes and relations side by side."""
    apart: int
    """By how much numbers of nodes of one batch differ there from those of the batch before."""
    begin: Tensor
    """Batch -> where its edges begin, and the end."""
    by_source: Tensor
    """(batches, relations): whether there are fewer pairs of sources."""
    counts: Tensor
    """(batches, 2): of nodes and edges."""
    sizes: tuple[Sizes, ...]
    """Of the batches."""


def draw(
    graph: RelGraph, seeds: Tensor, count: int, fanout: Sequence[int], generator: torch.Generator | None
) -> Generator[Tensor, Any, Drawn]:
    """`seeds`: (batches, seeds), of which the first `count` are asked, row by row; what comes after them is their padding."""
    (batches, size), device, every = seeds.shape, seeds.device, graph.num_nodes
    batch = torch.arange(batches, device=device)[:, None].expand(-1, size).reshape(-1)[:count]
    node = seeds.reshape(-1)[:count]
    asked, before = torch.arange(count, device=device), 0
    edges, asking = [asked[:0]], [asked[:0]]
    for most in fanout if graph.num_edges else ():
        if before:
            _, order, first = _first_of_each(batch * every + node, batches * every)
            fresh = first & (order >= before)
            (more,) = yield fresh.sum()[None]
            asked = order.index_select(0, torch.nonzero_static(fresh, size=more).view(-1))
        before = len(node)
        edge, which = yield from _edges_of(graph, node.index_select(0, asked), most, generator)
        edges.append(edge)
        asking.append(asked.index_select(0, which))
        node = torch.cat([node, graph.src.index_select(0, edge).long()])
        batch = torch.cat([batch, batch.index_select(0, asking[-1])])
    number, nodes = _numbers(batch, node, count, size, batches, every)
    edge, asker, apart = torch.cat(edges), torch.cat(asking), size + len(node)
    batch_of, kinds = batch[count:], graph.num_relations
    shift = batch_of * apart
    etype = graph.etype.index_select(0, edge).long()
    src, dst = number[count:] + shift, number.index_select(0, asker) + shift
    order = order_of(dst * kinds + etype, batches * apart * kinds)
    src, dst, etype, its, edge = (
        t.index_select(0, order) for t in (src, dst, etype + batch_of * kinds, batch_of, edge)
    )
    together = in_order(src, dst, etype, batches * apart, batches * kinds)
    by_source, sizes = sizes_of(together, sides_of(together), batches)
    counts = torch.cat([nodes[:, None], sizes], 1)
    numbers = iter((yield counts.view(-1)))
    rows = tuple(Sizes(*row[:-1]) for row in zip(*[numbers] * counts.shape[1], strict=True))
    begin = torch.searchsorted(its, torch.arange(batches + 1, device=device))
    return Drawn(seeds, node, batch, number, edge, together, apart, begin, by_source, counts[:, :2], rows)


def filled(drawn: Drawn, graph: RelGraph, which: Tensor, sizes: Sizes) -> tuple[Edges, Tensor, Tensor]:
    """Of some of the batches, a row each: edges, filled up to these sizes; nodes and edges of the whole graph."""
    rows, at = in_rows(drawn.edges, drawn.begin, which, drawn.apart, sizes)
    given = some(graph.order.index_select(0, drawn.edge).long(), at)
    first = torch.where(at[:, :1] < 0, 0, given[:, :1])
    given = torch.where(at < 0, first, given)
    count = len(which)
    row = which.new_full((len(drawn.sizes),), count).scatter_(0, which, torch.arange(count, device=which.device))
    row = row.index_select(0, drawn.batch)
    nodes = which.new_empty(count + 1, sizes.nodes)  # one row more, for what is of other batches
    seeds = drawn.seeds.index_select(0, which)
    nodes[:-1] = seeds[:, :1]
    nodes[:-1, : seeds.shape[1]] = seeds
    place = row * sizes.nodes + torch.where(row < count, drawn.number, 0)
    nodes.view(-1).scatter_(0, place, drawn.node)
    return rows, nodes[:-1], given


def _edges_of(
    graph: RelGraph, nodes: Tensor, most: int, generator: torch.Generator | None
) -> Generator[Tensor, Any, tuple[Tensor, Tensor]]:
    """Up to `most` incoming edges of every node, as places in the graph, and which of the nodes they are of."""
    begin = graph.ptr.index_select(0, nodes).long()
    degree = graph.ptr.index_select(0, nodes + 1) - begin
    real = torch.arange(most, device=nodes.device)[:, None] < degree
    found = real.sum()[None]
    edge = (_distinct(degree, most, generator) + begin).view(-1)
    (count,) = yield found
    at = torch.nonzero_static(real.view(-1), size=count).view(-1)
    return edge.index_select(0, at), at % max(len(nodes), 1)


def _distinct(degree: Tensor, most: int, generator: torch.Generator | None) -> Tensor:
    """Up to `most` different numbers below each degree, (most, nodes); all of them, in order, where there are fewer.

    Floyd's way: the i-th of them is drawn below degree - most + i + 1, and is that bound itself if it was drawn before.
    """
    everyone = torch.arange(most, device=degree.device)[:, None]
    drawn = torch.rand(most, len(degree), generator=generator, dtype=torch.float64, device=degree.device)
    last = degree - most + everyone
    picked = (drawn * (last + 1)).long().minimum(last)
    for n in range(1, most):
        again = (picked[:n] == picked[n]).any(0)
        torch.where(again, last[n], picked[n], out=picked[n])
    return torch.where(degree > most, picked, everyone)


def _first_of_each(keys: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in order, where they stood, and which of them are the first of their kind, both as given and in order."""
    order = order_of(keys, most)
    ordered = keys.index_select(0, order)
    return ordered, order, torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]])


def _numbers(batch: Tensor, node: Tensor, count: int, size: int, batches: int, every: int) -> tuple[Tensor, Tensor]:
    """Number of every node in its batch, and how many there are: the seeds, which the first `count` are, as they stand, `size` to a
    batch, then all others in the order of their ids."""
    ordered, order, first = _first_of_each(batch * every + node, batches * every)
    others = torch.cat([order.new_zeros(1), (first & (order >= count)).cumsum(0)])
    start = others.index_select(0, torch.searchsorted(ordered, every * torch.arange(batches + 1, device=node.device)))
    kind, nobody = first.cumsum(0) - 1, len(node)
    leader = order.new_empty(nobody + 1).scatter_(0, torch.where(first, kind, nobody), order).index_select(0, kind)
    its = batch.index_select(0, order)
    other = others[1:] - start.index_select(0, its) + (size - 1)
    number = torch.where(leader < count, leader - its * size, other)
    return torch.empty_like(order).scatter_(0, order, number), torch.diff(start) + size
