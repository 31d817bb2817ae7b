"""Mini-batches of a graph: blocks of sampled neighbours, padded so that a few shapes serve all of them.

In: a RelGraph, seeds (nodes to be learned), how many neighbours of a node are drawn per hop. Out: blocks, each a RelGraph of its
own with the ids of its nodes and edges; the seeds are its first nodes, in their order.

    for block in rel.blocks(graph, seeds, fanout=(10, 10), batch_size=1024):
        loss = step(block)                # in the loss function: model(block.graph, x[block.nodes])[: block.seeds.shape[0]]

A hop draws up to `fanout` incoming edges of every node that the hop before found, without replacement; a node is asked once. It
happens on the graph's device, on a GPU for many batches at once (`drawing.py`, `building.py`), which costs as many kernels as one
block. The host needs counts that data decide, two per hop; on a GPU it fetches them between training steps, one group of blocks
ahead, when they are there anyway.

Buckets are sizes that blocks are filled up to (`tables.py`): a bucket is one shape, hence one captured program. They are found
once, from blocks drawn to try, and the last is the most that a block can have, so there are never more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.batch import flatten
from wholestep.errors import BadOption
from wholestep.relational.building import make_types, rows_apart, sides_of, tables_of
from wholestep.relational.drawing import Drawn, draw, filled
from wholestep.relational.graph import RelGraph
from wholestep.relational.tables import NodeTypes, Sizes

TRIED = 32
"""Blocks that are drawn to find out how large they are."""
SLACK = 0.05
"""Of the first bucket above the largest block that was tried; every further bucket has four times as much."""
UNEVEN = 64
"""Sizes of buckets are multiples of it."""
MOST_TOGETHER, MOST_EDGES = 32, 2**19
"""Blocks, and their edges, that are made together on a GPU; an edge takes 160 to 200 bytes."""


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
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if isinstance(buckets, int):
            if buckets < 1:
                raise BadOption(f"buckets={buckets}", hint="at least one shape is needed")
            self.buckets: tuple[Sizes, ...] = self._found_buckets(buckets)
        elif not isinstance(buckets, Sequence) or not all(isinstance(one, tuple) for one in buckets):
            raise BadOption(f"buckets={buckets!r}", hint="a number, or the buckets of other blocks")
        else:
            self.buckets = tuple(Sizes(*sizes) for sizes in buckets)
        self.together = self._together(self.buckets[0])
        self.used = [[0, 0, 0] for _ in self.buckets]
        """Per bucket: blocks, and their real nodes and edges."""

    def __len__(self) -> int:
        return math.ceil(self.seeds.shape[0] / self.batch_size)

    def __iter__(self) -> Iterator[Block]:
        if not len(self):
            return
        # its own from here on: when a group is drawn, and how many are, changes no number of anyone's
        first = torch.randint(2**62, (), generator=self.generator, device=self.seeds.device)
        generator = torch.Generator(self.seeds.device).manual_seed(int(first))
        seeds = self.seeds
        if self.shuffle:
            seeds = seeds.index_select(0, torch.randperm(len(seeds), generator=generator, device=seeds.device))
        parts = iter(seeds.split(self.together * self.batch_size))

        def begun() -> _Ahead | None:
            part = next(parts, None)
            return None if part is None else _Ahead(self._group(part, generator), self.stream)

        if self.stream is not None:  # graph and seeds are there
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        try:
            coming = begun()
            while coming is not None:
                group, coming = coming, begun()
                for made in group.finished():
                    group.hand_over(made.memory)
                    yield self._counted(made)
                    if coming is not None:
                        coming.go_on()
        finally:
            if self.stream is not None:  # what was begun may still read memory that is given away now
                torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def block(self, seeds: Tensor, generator: torch.Generator | None = None) -> Block:
        """The block around up to `batch_size` seeds."""
        (made,) = _Ahead(self._group(seeds.long(), generator), None).finished()
        return self._counted(made)

    def _counted(self, made: _Made) -> Block:
        for n, more in enumerate((1, made.nodes, made.edges)):
            self.used[made.bucket][n] += more
        return made.block()

    def report(self) -> str:
        """Every bucket, how many blocks it got so far, and how much of them is padding."""
        lines = []
        for sizes, (count, nodes, edges) in zip(self.buckets, self.used, strict=True):
            told = f"{sizes.nodes} nodes, {sizes.edges} edges: {count} blocks"
            if count:
                told += f", {_padding(count * sizes.nodes, nodes, 'nodes')}, {_padding(count * sizes.edges, edges, 'edges')}"
            lines.append(told)
        return "\n".join(lines)

    # ---- groups ----

    def _group(self, seeds: Tensor, generator: torch.Generator | None) -> Generator[Tensor | None, Any, list[_Made]]:
        """The blocks around a number of batches, made together: a few hundred kernels, however many they are."""
        full = self._full(seeds)
        rows, missing = len(full), full.numel() - len(seeds)
        drawn = yield from draw(self.graph, full, len(seeds), self.fanout, generator)
        buckets = [self._bucket(sizes) for sizes in drawn.sizes]
        made: dict[int, _Made] = {}
        for bucket, sizes in enumerate(self.buckets):
            which = [row for row in range(rows) if buckets[row] == bucket]
            most = max(MOST_EDGES // sizes.edges, 1)
            for some in (which[n : n + most] for n in range(0, len(which), most)):
                chosen = torch.tensor(some).to(seeds.device, non_blocking=True)
                filled_up = self._filled(drawn, chosen, sizes, len(seeds))
                yield None  # tens of views per block take the host about as long as the kernels did
                blocks = rows_apart(filled_up)
                memory = flatten(blocks[0]())[0]
                for row, block in zip(some, blocks, strict=True):
                    fewer = missing if row == rows - 1 else 0
                    made[row] = _Made(block, memory, bucket, drawn.sizes[row].nodes - fewer, drawn.sizes[row].edges)
        return [made[row] for row in range(rows)]

    def _full(self, seeds: Tensor) -> Tensor:
        """A row per batch; the last may have too few and is filled up with its first."""
        missing = -len(seeds) % self.batch_size
        last = seeds[len(seeds) + missing - self.batch_size :][:1]
        return torch.cat([seeds, last.expand(missing)]).view(-1, self.batch_size)

    def _filled(self, drawn: Drawn, chosen: Tensor, sizes: Sizes, count: int) -> Block:
        """Of tensors that have a row for each of these batches."""
        edges, nodes, given = filled(drawn, self.graph, chosen, sizes)
        tables = tables_of(edges, sides_of(edges), drawn.by_source.index_select(0, chosen), sizes)
        order = torch.arange(sizes.edges, device=nodes.device)[None]
        place = torch.arange(self.batch_size, device=nodes.device)
        is_seed = chosen[:, None] * self.batch_size + place < count
        real = drawn.counts.index_select(0, chosen)
        real[:, 0].sub_((~is_seed).sum(1))
        return Block(
            graph=RelGraph._of({"order": order, "types": self._types(nodes)} | tables),
            nodes=nodes, edges=given, seeds=drawn.seeds.index_select(0, chosen), is_seed=is_seed, num_real=real,
        )  # fmt: skip

    def _types(self, nodes: Tensor) -> NodeTypes | None:
        if self.graph.types is None:
            return None
        types = self.graph.types.to_node.index.index_select(0, nodes.view(-1)).view(nodes.shape)
        return make_types(types.long(), self.graph.types.count, sorted_or_not=False)

    def _bucket(self, there: Sizes) -> int:
        for n, sizes in enumerate(self.buckets):
            if sizes.hold(there):
                return n
        raise BadOption(f"a block of {there} fits into no bucket", hint="let `buckets` be found: give a number")

    # ---- sizes ----

    def _found_buckets(self, count: int) -> tuple[Sizes, ...]:
        """The largest of a few blocks and some more, several times, and what no block exceeds."""
        most = self._most()
        if count == 1 or not len(self):
            return (most,)
        generator = torch.Generator(self.seeds.device).manual_seed(0)
        tried = max(min(TRIED, len(self.seeds) // self.batch_size), 1) * self.batch_size
        order = torch.randperm(len(self.seeds), generator=generator, device=self.seeds.device)[:tried]
        seen: list[Sizes] = []
        for part in self.seeds.index_select(0, order).split(self._together(most) * self.batch_size):
            drawing = draw(
                self.graph, part.view(-1, min(self.batch_size, len(part))), len(part), self.fanout, generator
            )
            seen.extend(_Ahead(drawing, None).finished().sizes)
        largest = Sizes(*(max(sizes) for sizes in zip(*seen, strict=True)))
        grown = [_even(largest, 1 + SLACK * 4**n, most) for n in range(count - 1)]
        return tuple(dict.fromkeys([*grown, most]))

    def _together(self, sizes: Sizes) -> int:
        """How many blocks are made at once; on a CPU, where a kernel costs nothing to begin, one."""
        return 1 if self.stream is None else max(min(MOST_EDGES // sizes.edges, MOST_TOGETHER), 1)

    def _most(self) -> Sizes:
        """What follows from fanout and batch size alone."""
        asked, nodes, edges = self.batch_size, self.batch_size, 0
        for most in self.fanout:
            edges += asked * most
            asked = min(asked * most, self.graph.num_nodes)
            nodes += asked
        nodes, edges = min(nodes, self.graph.num_nodes + self.batch_size), min(edges, self.graph.num_edges)
        return Sizes(*(size + 1 for size in (nodes, *[edges] * 6)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A block whose tensors are there."""

    block: Callable[[], Block]
    memory: list[Tensor]
    """Tensors that share their memory with its own; the same list for several blocks."""
    bucket: int
    nodes: int
    edges: int
    """How many are real."""


class _Ahead:
    """Work that needs counts from the device now and then, done stretch by stretch: on a GPU on a stream of its own, while
    training steps are launched in between, so that the host waits for neither."""

    def __init__(self, work: Generator[Tensor | None, Any, Any], stream: torch.cuda.Stream | None) -> None:
        """`work` yields counts that it needs as numbers, or None where others may have their turn."""
        self.work, self.stream = work, stream
        self.counts: Tensor | None = None
        """What the next stretch needs, on its way to the host."""
        self.arrived = torch.cuda.Event() if stream is not None else None
        """Of the counts, in the end of all that was made."""
        self.made: Any = None
        self.handed_over: list[tuple[torch.cuda.Stream, int]] = []

    def go_on(self) -> None:
        """One more stretch, if the counts for it are there."""
        if self.arrived is not None and self.made is None and (self.counts is None or self.arrived.query()):
            self._stretch()

    def finished(self) -> Any:
        while self.made is None:
            self._stretch()
        return self.made

    def _stretch(self) -> None:
        if self.arrived is not None and self.counts is not None:
            self.arrived.synchronize()
        with torch.cuda.stream(self.stream):
            try:
                counts = self.work.send(None if self.counts is None else self.counts.tolist())
                self.counts = None if counts is None else counts.to("cpu", non_blocking=True)
            except StopIteration as done:
                self.made = done.value
            if self.arrived is not None:
                self.arrived.record()

    def hand_over(self, memory: list[Tensor]) -> None:
        """The stream that trains waits for what was made, and the memory is not given away while it is read there; once for all
        blocks that share it."""
        if self.stream is None or self.arrived is None:
            return
        reader = torch.cuda.current_stream(self.stream.device)
        if (reader, id(memory)) not in self.handed_over:
            self.handed_over.append((reader, id(memory)))
            reader.wait_event(self.arrived)
            for tensor in {id(tensor): tensor for tensor in memory}.values():
                tensor.record_stream(reader)


def _even(sizes: Sizes, factor: float, most: Sizes) -> Sizes:
    grown = (UNEVEN * math.ceil((size * factor + 1) / UNEVEN) for size in sizes)
    return Sizes(*(min(size, bound) for size, bound in zip(grown, most, strict=True)))


def _padding(size: int, real: int, what: str) -> str:
    return f"{100 * (size - real) / max(size, 1):.1f} % of the {what} are padding"


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
