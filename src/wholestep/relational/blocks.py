"""Mini-batches of a graph: blocks of sampled neighbours, padded so that a few shapes serve all of them.

In: a RelGraph, seeds (nodes to be learned), how many neighbours of a node are drawn per hop. Out: blocks, each a RelGraph of its
own with the ids of its nodes and edges; the seeds are its first nodes, in their order.

    for block in rel.blocks(graph, seeds, fanout=(10, 10), batch_size=1024):
        loss = step(block)                # in the loss function: model(block.graph, x[block.nodes])[: block.seeds.shape[0]]

A hop draws up to `fanout` incoming edges of every node that the hop before found, without replacement; a node is asked once. It
happens on the graph's device, in tensors whose sizes follow from fanout and batch size. The host waits twice per block, for counts
that data decide: of nodes and edges, before tables are built, and of pairs and rows, to choose a bucket. On a GPU a stream of its
own does this, so that it waits for no training step.

Buckets are sizes that blocks are filled up to (`tables.py`): a bucket is one shape, hence one captured program. They are found
once, from blocks drawn to try, and the last is the most that a block can have, so there are never more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.relational.graph import RelGraph
from wholestep.relational.tables import NodeTypes, Sizes, make_tables, make_types

TRIED = 8
"""Blocks that are drawn to find out how large they are."""
SLACK = 0.05
"""Of the first bucket above the largest block that was tried; every further bucket has four times as much."""
UNEVEN = 64
"""Sizes of buckets are multiples of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A part of a graph, tensors only. Padding comes last: nodes and edges that no real one is connected with."""

    graph: RelGraph
    nodes: Tensor
    """Node here -> node of the whole graph. Padding repeats the first seed."""
    edges: Tensor
    """Edge -> edge of the whole graph, in the order in which that was given them. Padding repeats the first."""
    seeds: Tensor
    """Nodes of the whole graph, the first nodes here."""
    is_seed: Tensor
    """False where the last batch has fewer seeds than the others: that row is padding too, and no loss may read it."""
    num_real: Tensor
    """Nodes and edges that are no padding."""

    def report(self) -> str:
        """The share of padding; waits for the device."""
        nodes, edges = self.num_real.tolist()
        return _padding(self.graph.num_nodes, nodes, "nodes") + ", " + _padding(self.graph.num_edges, edges, "edges")


def blocks(
    graph: RelGraph,
    seeds: Tensor,
    *,
    fanout: Sequence[int],
    batch_size: int,
    shuffle: bool = True,
    generator: torch.Generator | None = None,
    buckets: int | Sequence[Sizes] = 4,
) -> Blocks:
    """Blocks around batches of the seeds, one pass over these per iteration; `fanout`: edges drawn per node, for every hop.

    `generator`: of the graph's device, for the order of seeds and the neighbours; torch's own without. `buckets`: at most how
    many shapes there are, or the `buckets` of another such object.
    """
    if not isinstance(fanout, Sequence):
        raise BadOption(f"fanout={fanout!r}", hint=_PER_HOP)
    return Blocks(graph, seeds, tuple(fanout), batch_size, shuffle, generator, buckets)


class Blocks:
    """See `blocks`. `buckets` holds the sizes that blocks get."""

    def __init__(
        self,
        graph: RelGraph,
        seeds: Tensor,
        fanout: tuple[int, ...],
        batch_size: int,
        shuffle: bool,
        generator: torch.Generator | None,
        buckets: int | Sequence[Sizes],
    ) -> None:
        _refuse(graph, seeds, fanout, batch_size, generator)
        self.graph, self.seeds, self.fanout, self.batch_size = graph, seeds.long(), fanout, batch_size
        self.shuffle, self.generator = shuffle, generator
        device = graph.src.device
        self.place = torch.full((graph.num_nodes + 1,), -1, device=device)
        """Node -> its number in the block that is being made, or -1; the last is written to by what is left out."""
        self.first = torch.full_like(self.place, 2**62)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if isinstance(buckets, int):
            if buckets < 1:
                raise BadOption(f"buckets={buckets}", hint="at least one shape is needed")
            self.buckets: tuple[Sizes, ...] = self._found_buckets(buckets)
        elif not isinstance(buckets, Sequence) or not all(isinstance(one, tuple) for one in buckets):
            raise BadOption(f"buckets={buckets!r}", hint="a number, or the buckets of other blocks")
        else:
            self.buckets = tuple(Sizes(*sizes) for sizes in buckets)
        self.used = [[0, 0, 0] for _ in self.buckets]
        """Per bucket: blocks, and their real nodes and edges."""

    def __len__(self) -> int:
        return math.ceil(self.seeds.shape[0] / self.batch_size)

    def __iter__(self) -> Iterator[Block]:
        if self.stream is not None:  # graph and seeds are there
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with self._beside():
            seeds = self._in_order() if self.shuffle else self.seeds
        for start in range(0, seeds.shape[0], self.batch_size):
            with self._beside():
                block = self.block(seeds[start : start + self.batch_size], self.generator)
            if self.stream is not None:
                _handed_over(block, self.stream)
            yield block

    def block(self, seeds: Tensor, generator: torch.Generator | None = None) -> Block:
        """The block around up to `batch_size` seeds."""
        graph, ids, edge, src, dst = self.graph, *self._drawn(seeds, generator)
        etype = graph.etype.index_select(0, edge).long()
        used: dict[str, int] = {}

        def room(there: Sizes) -> Sizes:
            used["bucket"] = next((n for n, sizes in enumerate(self.buckets) if sizes.hold(there)), -1)
            if used["bucket"] < 0:
                raise BadOption(f"a block of {there} fits into no bucket", hint="let `buckets` be found: give a number")
            return self.buckets[used["bucket"]]

        tables = make_tables(src, dst, etype, ids.shape[0], graph.num_relations, room)
        sizes = self.buckets[used["bucket"]]
        real = ids.shape[0] - self.batch_size + seeds.shape[0], edge.shape[0]
        for n, more in enumerate((1, *real)):
            self.used[used["bucket"]][n] += more
        order = torch.arange(sizes.edges, device=edge.device)
        given = graph.order.index_select(0, edge).long()
        any_edge = given[:1] if edge.shape[0] else given.new_zeros(1)
        nodes = torch.cat([ids, seeds[:1].expand(sizes.nodes - ids.shape[0])])
        return Block(
            graph=RelGraph._of({"order": order, "types": self._types(nodes)} | tables),
            nodes=nodes,
            edges=torch.cat([given, any_edge.expand(sizes.edges - given.shape[0])]),
            seeds=self._full(seeds),
            is_seed=torch.arange(self.batch_size, device=edge.device) < seeds.shape[0],
            num_real=torch.stack([torch.full((), count, device=edge.device) for count in real]),
        )

    def report(self) -> str:
        """Every bucket, how many blocks it got so far, and how much of them is padding."""
        lines = []
        for sizes, (count, nodes, edges) in zip(self.buckets, self.used, strict=True):
            told = f"{sizes.nodes} nodes, {sizes.edges} edges: {count} blocks"
            if count:
                told += f", {_padding(count * sizes.nodes, nodes, 'nodes')}, {_padding(count * sizes.edges, edges, 'edges')}"
            lines.append(told)
        return "\n".join(lines)

    # ---- drawing ----

    def _drawn(self, seeds: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Nodes; and for every edge its place in the whole graph, its source and destination as nodes of the block, in the order of
        (destination, relation)."""
        graph, nobody, device = self.graph, self.graph.num_nodes, seeds.device
        asked = self._full(seeds)
        active = torch.arange(self.batch_size, device=device) < seeds.shape[0]
        count = torch.full((), self.batch_size, device=device)
        local = torch.arange(self.batch_size, device=device)
        self.place[torch.where(active, asked, nobody)] = local
        found, edges, sources, targets, kept = [asked], [], [], [], []
        counts = [count]
        for most in self.fanout if graph.num_edges else ():
            begin, end = (graph.ptr.index_select(0, at).long() for at in (asked, asked + 1))
            degree = torch.where(active, end - begin, 0)
            picked = _distinct(degree, most, generator)
            real = torch.arange(most, device=device) < degree[:, None]
            edge = torch.where(real, begin[:, None] + picked, 0).reshape(-1)
            real = real.reshape(-1)
            other = torch.where(real, graph.src.index_select(0, edge).long(), nobody)
            new = self._is_new(other) & real
            rank = new.cumsum(0) - 1
            self.place[torch.where(new, other, nobody)] = count + rank
            room = min(other.shape[0], nobody)
            edges.append(edge)
            sources.append(self.place.index_select(0, other))
            targets.append(local.repeat_interleave(most))
            kept.append(real)
            asked = torch.zeros(room + 1, dtype=torch.int64, device=device)
            asked = asked.scatter_(0, torch.where(new, rank, room), other)[:room]
            more = new.sum()
            active = torch.arange(room, device=device) < more
            asked = torch.where(active, asked, 0)
            local = count + torch.arange(room, device=device)
            count = count + more
            found.append(asked)
            counts.append(more)
        kept_all = torch.cat(kept) if kept else active.new_zeros(0)
        *sizes, num_edges = torch.stack([*counts, kept_all.sum()]).tolist()  # the host waits
        ids = torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])
        self.place[ids] = -1
        at = torch.nonzero_static(kept_all, size=num_edges).reshape(-1)
        edge, src, dst = (torch.cat([at[:0], *parts]).index_select(0, at) for parts in (edges, sources, targets))
        return ids, edge, src, dst

    def _types(self, nodes: Tensor) -> NodeTypes | None:
        if self.graph.types is None:
            return None
        types = self.graph.types.to_node.index.index_select(0, nodes).long()
        return make_types(types, self.graph.types.count, sorted_or_not=False)

    def _is_new(self, nodes: Tensor) -> Tensor:
        """Which of them is the first of its kind that the block has not got."""
        position = torch.arange(nodes.shape[0], device=nodes.device)
        self.first.scatter_reduce_(0, nodes, position, "amin")
        new = (self.first.index_select(0, nodes) == position) & (self.place.index_select(0, nodes) < 0)
        self.first[nodes] = 2**62
        return new

    def _full(self, seeds: Tensor) -> Tensor:
        """As many as a batch has."""
        return torch.cat([seeds, seeds[:1].expand(self.batch_size - seeds.shape[0])])

    def _in_order(self) -> Tensor:
        order = torch.randperm(self.seeds.shape[0], generator=self.generator, device=self.seeds.device)
        return self.seeds.index_select(0, order)

    # ---- sizes ----

    def _found_buckets(self, count: int) -> tuple[Sizes, ...]:
        """The largest of a few blocks and some more, several times, and what no block exceeds."""
        generator = torch.Generator(self.seeds.device).manual_seed(0)
        most = self._most()
        if count == 1 or not len(self):
            return (most,)
        seen: list[Sizes] = []

        def look(there: Sizes) -> Sizes:
            seen.append(there)
            return Sizes(*(size + 1 for size in there))

        for _ in range(min(TRIED, len(self))):
            order = torch.randperm(self.seeds.shape[0], generator=generator, device=self.seeds.device)
            ids, edge, src, dst = self._drawn(self.seeds[order[: self.batch_size]], generator)
            etype = self.graph.etype.index_select(0, edge).long()
            make_tables(src, dst, etype, ids.shape[0], self.graph.num_relations, look)
        largest = Sizes(*(max(sizes) for sizes in zip(*seen, strict=True)))
        grown = [_even(largest, 1 + SLACK * 4**n, most) for n in range(count - 1)]
        return tuple(dict.fromkeys([*grown, most]))

    def _most(self) -> Sizes:
        """What follows from fanout and batch size alone."""
        asked, nodes, edges = self.batch_size, self.batch_size, 0
        for most in self.fanout:
            edges += asked * most
            asked = min(asked * most, self.graph.num_nodes)
            nodes += asked
        nodes, edges = min(nodes, self.graph.num_nodes + self.batch_size), min(edges, self.graph.num_edges)
        return Sizes(*(size + 1 for size in (nodes, *[edges] * 6)))

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


def _distinct(degree: Tensor, most: int, generator: torch.Generator | None) -> Tensor:
    """Up to `most` different numbers below each degree, (nodes, most), in ascending order; all of them where there are fewer.

    Floyd's way: the i-th of them is drawn below degree - most + i + 1, and is that bound itself if it was drawn before.
    """
    drawn = torch.rand(most, degree.shape[0], generator=generator, dtype=torch.float64, device=degree.device)
    picked = torch.empty(most, degree.shape[0], dtype=torch.int64, device=degree.device)
    for n in range(most):
        last = degree - most + n
        pick = (drawn[n] * (last + 1)).long().clamp(max=last)
        again = (picked[:n] == pick).any(0)
        picked[n] = torch.where(again, last, pick)
    everyone = torch.arange(most, device=degree.device)
    return torch.where((degree > most)[:, None], picked.T.sort(1).values, everyone)


def _even(sizes: Sizes, factor: float, most: Sizes) -> Sizes:
    grown = (UNEVEN * math.ceil((size * factor + 1) / UNEVEN) for size in sizes)
    return Sizes(*(min(size, bound) for size, bound in zip(grown, most, strict=True)))


def _padding(size: int, real: int, what: str) -> str:
    return f"{100 * (size - real) / max(size, 1):.1f} % of the {what} are padding"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _handed_over(block: Block, stream: torch.cuda.Stream) -> None:
    """The stream that trains waits for this block, and the memory is not given away while it is read there."""
    reader = torch.cuda.current_stream(stream.device)
    reader.wait_stream(stream)
    for tensor in _tensors(block):
        tensor.record_stream(reader)


_PER_HOP = "how many edges are drawn per node, for every hop: (10, 10)"


def _refuse(
    graph: RelGraph, seeds: Any, fanout: tuple[int, ...], batch_size: int, generator: torch.Generator | None
) -> None:
    device = graph.src.device
    if not isinstance(seeds, Tensor) or seeds.dim() != 1 or seeds.is_floating_point() or seeds.dtype == torch.bool:
        raise BadOption("seeds are not a tensor of node ids", hint="one whole number per seed")
    for name, tensor in (("the graph", graph.src), ("seeds", seeds)):
        if hasattr(tensor, "device_mesh"):
            raise BadOption(
                f"{name} on several devices", hint="blocks are drawn on one device: give every process its own"
            )
    if seeds.device != device:
        raise BadOption(
            f"seeds on {seeds.device} and a graph on {device}",
            hint=f"blocks are drawn on one device: seeds.to({str(device)!r})",
        )
    if generator is not None and not isinstance(generator, torch.Generator):
        raise BadOption(f"generator={generator!r}", hint="torch.Generator().manual_seed(...)")
    if generator is not None and generator.device.type != device.type:
        raise BadOption(
            f"a generator of {generator.device} and a graph on {device}", hint=f"torch.Generator({str(device)!r})"
        )
    if not fanout or any(not isinstance(most, int) or most < 1 for most in fanout):
        raise BadOption(f"fanout={fanout}", hint=_PER_HOP)
    if not isinstance(batch_size, int) or batch_size < 1:
        raise BadOption(f"batch_size={batch_size!r}", hint="at least one seed per block")
    if graph.num_relations < 1:
        raise BadOption("a graph without relations", hint="count them: num_relations=1")
    bad = (seeds < 0) | (seeds >= graph.num_nodes)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise BadOption(
            f"seeds[{at}] is {int(seeds[at])}, and the graph has {graph.num_nodes} nodes", hint="seeds are ids of nodes"
        )
    ordered = seeds.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.numel():
        raise BadOption(f"seed {int(twice[0])} is there twice", hint="give every seed once: seeds.unique()")
