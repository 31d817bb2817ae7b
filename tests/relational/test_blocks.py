"""Blocks of sampled neighbours: real edges of the graph, few shapes, and padding that changes no number."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import edges_of, made
from tests.relational.test_layer import MESSAGES, featured, tensors
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import wholestep
from wholestep import relational as rel
from wholestep.capture.batch import flatten
from wholestep.errors import BadOption
from wholestep.relational.blocks import Block, Blocks, _Ahead
from wholestep.relational.drawing import _distinct
from wholestep.relational.graph import RelGraph

KINDS, WIDE = 3, 8
BLOCKS = sys.modules[Blocks.__module__]  # `rel.blocks` is the function


def skewed(nodes: int = 400, edges: int = 3000, relations: int = 7, device: str = "cpu") -> RelGraph:
    """Few nodes have most of the edges, and few relations."""
    drawn = torch.rand(3, edges, generator=torch.Generator().manual_seed(0))
    src, dst, etype = ((n * u**3).long() for n, u in zip((nodes, nodes, relations), drawn, strict=True))
    return RelGraph(src, dst, etype, num_nodes=nodes, num_relations=relations).to(device)


def some_blocks(
    graph: RelGraph, *, seed: int = 0, batch_size: int = 16, together: int | None = None, **options: Any
) -> Blocks:
    """`together`: how many are made at once."""
    generator = torch.Generator(graph.src.device).manual_seed(seed)
    seeds = torch.arange(graph.num_nodes, device=graph.src.device)
    made_ = rel.blocks(graph, seeds, **{"fanout": (3, 2), "batch_size": batch_size, "generator": generator} | options)
    made_.together = together or made_.together
    return made_


def real_part(block: Block) -> tuple[RelGraph, int, int]:
    """The same edges without padding; only for blocks with as many seeds as a batch has."""
    nodes, edges = block.num_real.tolist()
    ids = [t[:edges] for t in (block.graph.src, block.graph.dst, block.graph.etype)]
    return RelGraph(*ids, num_nodes=nodes, num_relations=block.graph.num_relations), nodes, edges


def bits(block: Block) -> list[Tensor]:
    return flatten(block)[0]


# ---- what is drawn ----


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize(
    "name", ["hubs", "empty relations, isolated nodes", "loops, edges twice", "no edges", "one edge"]
)
def test_edges_are_those_of_the_graph_each_once_and_never_too_many(name: str, together: int) -> None:
    src, dst, etype, _, _ = edges_of(name)
    graph = made(name)
    for block in some_blocks(graph, batch_size=4, together=together):
        nodes, edges = block.num_real.tolist()
        here = [t[:edges].long() for t in (block.graph.src, block.graph.dst, block.graph.etype)]
        given = block.edges[:edges]
        assert torch.equal(src[given], block.nodes[here[0]]) and torch.equal(dst[given], block.nodes[here[1]])
        assert torch.equal(etype[given], here[2]) and given.unique().shape == given.shape
        seeds = block.seeds[block.is_seed]
        assert torch.equal(block.nodes[: len(seeds)], seeds)
        degree = torch.bincount(dst, minlength=graph.num_nodes)
        found = torch.bincount(block.graph.dst[:edges], minlength=4)
        assert torch.equal(found[: len(seeds)], degree[seeds].clamp(max=3))
        assert int(found.max()) <= 3 and edges <= 4 * 3 + 4 * 3 * 2
        real = torch.cat([block.nodes[:4][block.is_seed], block.nodes[4 : 4 + nodes - len(seeds)]])
        assert real.unique().shape == real.shape  # no node twice


def test_all_neighbours_where_there_are_fewer_than_asked_for() -> None:
    graph = made("plain")
    block = next(iter(rel.blocks(graph, torch.arange(20), fanout=(50,), batch_size=20, shuffle=False)))
    assert int(block.num_real[1]) == graph.num_edges
    assert torch.equal(block.edges[: graph.num_edges].sort().values, torch.arange(graph.num_edges))


def test_every_neighbour_is_as_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = _distinct(torch.full((6000,), 7), 3, generator).T.sort(1).values
    assert bool((drawn[:, 1:] > drawn[:, :-1]).all()) and int(drawn.min()) >= 0 and int(drawn.max()) <= 6
    shares = torch.bincount(drawn.reshape(-1)) / 6000
    assert torch.allclose(shares, torch.full((7,), 3 / 7), atol=0.03)  # four standard deviations
    together = sum(bool(((row == 2) | (row == 5)).sum() == 2) for row in drawn) / 6000
    assert together == pytest.approx(1 / 7, abs=0.02)


def test_the_generator_decides() -> None:
    graph = skewed()
    one, again, other = (list(some_blocks(graph, seed=seed)) for seed in (1, 1, 2))
    assert all(
        torch.equal(a, b) for x, y in zip(one, again, strict=True) for a, b in zip(bits(x), bits(y), strict=True)
    )
    assert not torch.equal(one[0].seeds, other[0].seeds)
    assert torch.equal(torch.cat([b.seeds[b.is_seed] for b in one]).sort().values, torch.arange(graph.num_nodes))


# ---- many at once ----


def typed(graph: RelGraph) -> RelGraph:
    ids = (t.long() for t in (graph.src, graph.dst, graph.etype))
    kinds = torch.arange(graph.num_nodes) % 3
    return RelGraph(*ids, ntype=kinds, num_nodes=graph.num_nodes, num_relations=graph.num_relations)


@pytest.mark.parametrize("together", [2, 5, 32])
def test_blocks_made_together_are_those_made_alone(together: int) -> None:
    """Where all neighbours are taken, so that nothing is drawn; of several buckets in one group, the last batch smaller."""
    for graph in (typed(skewed(90, 300, 4)), made("no edges"), made("empty relations, isolated nodes")):
        options = {"fanout": (300, 300), "batch_size": 4, "shuffle": False}
        alone = some_blocks(graph, **options)
        found = some_blocks(graph, **options, together=together)
        for one, other in zip(alone, found, strict=True):
            assert flatten(one)[1] == flatten(other)[1]
            for a, b in zip(bits(one), bits(other), strict=True):
                assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
                assert b.data_ptr() % 16 == 0 and not b._is_view()
        assert alone.used == found.used


class Computed(TorchDispatchMode):
    """Counts operators that compute something on a device, and refuses those for whose result the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in {
            "nonzero",
            "_local_scalar_dense",
            "masked_select",
            "_unique2",
            "unique_dim",
            "unique_consecutive",
        }
        assert name != "repeat_interleave" or (kwargs or {}).get("output_size") is not None
        assert name != "index" or all(index is None or index.dtype != torch.bool for index in args[1])
        result = func(*args, **(kwargs or {}))
        self.count += not (func.is_view or name.startswith(("empty", "new_empty", "unbind")) or name == "detach")
        return result


def test_a_group_costs_as_many_kernels_as_a_block_and_waits_only_where_it_says_so() -> None:
    graph, counts = skewed(), {}
    for batches in (1, 16):
        made_ = some_blocks(graph, batch_size=8)
        work, waits, told = made_._group(torch.arange(8 * batches), made_.generator), 0, None
        with Computed() as computed, pytest.raises(StopIteration) as done:
            while True:
                wanted = work.send(told)
                told = None if wanted is None else wanted.tolist()
                waits += wanted is not None
        assert len(done.value.value) == batches and waits == 4  # two per hop
        counts[batches] = computed.count
    assert counts[16] < 1.2 * counts[1]


def test_a_group_goes_on_where_its_counts_are_there_and_waits_where_it_is_needed() -> None:
    class Event:
        there, asked, waited = False, 0, 0

        def query(self) -> bool:
            self.asked += 1
            return self.there

        def synchronize(self) -> None:
            self.waited += not self.there

        def record(self) -> None:
            self.there = False

    def work() -> Any:
        one = yield torch.tensor([3])
        nothing = yield None
        two = yield torch.tensor([4, 5])
        assert nothing is None
        return one + two

    ahead = _Ahead(work(), None)
    ahead.go_on()
    assert ahead.counts is None  # on a CPU there is nothing to be had by it
    ahead.arrived = event = Event()  # type: ignore[assignment]
    for _ in range(2):
        ahead.go_on()
        assert ahead.counts is not None and ahead.counts.tolist() == [3]
    event.there = True
    ahead.go_on()
    assert ahead.counts is None and event.asked == 2
    ahead.go_on()  # for nothing that would have to arrive
    assert ahead.counts.tolist() == [4, 5] and event.waited == 0 and event.asked == 2
    assert ahead.finished() == [3, 4, 5] and event.waited == 1
    ahead.go_on()
    assert ahead.finished() == [3, 4, 5]


class Streams:
    """Stand for those of a GPU: what waits for what, and which memory is held for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.held: set[int] = set()
        log, held = self.log, self.held

        class Stream:
            device = torch.device("cpu")

            def __init__(self, name: str) -> None:
                self.name = name

            def wait_stream(self, other: Stream) -> None:
                log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Any) -> None:
                log.append(f"{self.name} waits for a group")

        class Event:
            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                log.append("the host asks")

            record = query

        self.own, current = Stream("own"), Stream("training")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: held.add(t.untyped_storage().data_ptr()))


def test_one_group_ahead_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = skewed()
    alone = list(some_blocks(graph, together=8))
    made_ = some_blocks(graph, together=8)
    streams = Streams(monkeypatch)
    made_.stream = streams.own  # type: ignore[assignment]
    for n, (block, same) in enumerate(zip(made_, alone, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(bits(block), bits(same), strict=True))
        assert {t.untyped_storage().data_ptr() for t in bits(block) if t.numel()} <= streams.held
        if n == 7:  # the stretches of the group after it are behind us
            assert streams.log.count("the host asks") == 2 * 4
        streams.held.clear() if n % 8 == 7 else None
    assert streams.log[0] == "own waits for training" and streams.log[-1] == "training waits for own"
    assert streams.log.count("training waits for a group") == 4  # 25 blocks
    before = len(streams.log)
    for _ in made_:
        break
    assert streams.log[-1] == "training waits for own" and len(streams.log) > before


def test_what_is_handed_to_the_stream_that_trains_is_all_memory_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    made_ = some_blocks(skewed(90, 300, 4), batch_size=4)
    monkeypatch.setattr(BLOCKS, "MOST_EDGES", 3 * made_.buckets[0].edges)
    group = _Ahead(made_._group(torch.arange(90), made_.generator), None).finished()
    for one in group:
        held = {t.untyped_storage().data_ptr() for t in one.memory}
        assert {t.untyped_storage().data_ptr() for t in bits(one.block()) if t.numel()} <= held
    assert 90 / 4 / 3 < len({id(one.memory) for one in group}) < len(group)  # three of a bucket at a time


def test_a_pass_takes_one_number_from_the_generator_however_far_it_goes() -> None:
    graph = skewed()
    whole, left = some_blocks(graph, seed=1, together=4), some_blocks(graph, seed=1, together=4)
    list(whole)
    first = next(iter(left))
    assert torch.equal(whole.generator.get_state(), left.generator.get_state())
    assert sum(count for count, *_ in left.used) == 1
    assert torch.equal(first.nodes, next(iter(some_blocks(graph, seed=1, together=4))).nodes)
    between = torch.Generator().manual_seed(0)
    state = between.get_state()
    list(some_blocks(graph))
    assert torch.equal(between.get_state(), state)


# ---- padding ----


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "mean per relation"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_padding_changes_no_output_and_no_gradient(message: Any, aggregate: str) -> None:
    layer = rel.layer(message, aggregate=aggregate)
    for graph, buckets in ((skewed(60, 200, 4), 4), (made("hubs"), 1)):
        block = next(iter(some_blocks(graph, batch_size=8, buckets=buckets)))
        alone, nodes, edges = real_part(block)
        assert block.graph.num_nodes > nodes and block.graph.num_edges > edges
        x, own, params = tensors(alone)
        wide = torch.cat([x, x[:1].expand(block.graph.num_nodes - nodes, -1)])
        more = torch.cat([own, own[:1].expand(block.graph.num_edges - edges, -1)])
        found = layer(block.graph, {"x": wide}, params, {"x": more} if message is featured else None)[:nodes]
        wanted = layer(alone, {"x": x}, params, {"x": own} if message is featured else None)
        assert torch.allclose(found, wanted, atol=1e-12)
        pull, leaves = torch.randn_like(wanted), [x, own, *params.values()]
        both = (torch.autograd.grad((f * pull).sum(), leaves, allow_unused=True) for f in (found, wanted))
        for one, other in zip(*both, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, atol=1e-10)


def test_blocks_of_a_bucket_have_one_shape_and_padding_is_reported() -> None:
    made_blocks = some_blocks(skewed())
    shapes = {}
    for block in made_blocks:
        held, spec = flatten(block)
        sizes = tuple((t.shape, t.dtype) for t in held)
        shapes.setdefault((spec, sizes), []).append(block)
    assert len(shapes) <= len(made_blocks.buckets) <= 4
    assert sum(count for count, *_ in made_blocks.used) == len(made_blocks) == 25
    nodes = 1 - int(block.num_real[0]) / block.graph.num_nodes
    assert f"{100 * nodes:.1f} % of the nodes are padding" in block.report()
    told = [
        f"{sizes.edges} edges: {used[0]} blocks"
        for sizes, used in zip(made_blocks.buckets, made_blocks.used, strict=True)
    ]
    assert all(line in made_blocks.report() for line in told)


def test_the_last_bucket_holds_whatever_comes() -> None:
    graph = skewed()
    small = some_blocks(graph)
    hubs = torch.bincount(graph.dst.long(), minlength=400).argsort(descending=True)[:16]
    block = small.block(hubs, torch.Generator().manual_seed(0))
    assert block.graph.num_edges in {sizes.edges for sizes in small.buckets}
    shared = some_blocks(graph, buckets=small.buckets[:1])
    assert shared.buckets == small.buckets[:1]
    with pytest.raises(BadOption, match="fits into no bucket"):
        some_blocks(graph, buckets=[tuple(2 for _ in small.buckets[0])]).block(hubs)


# ---- training ----


class Network(nn.Module):
    def __init__(self, nodes: int, relations: int) -> None:
        super().__init__()
        self.node = nn.Embedding(nodes, WIDE)
        self.W = nn.Parameter(torch.randn(2, relations, WIDE, WIDE) / 3)
        self.last = nn.Linear(WIDE, KINDS)
        self.mean = rel.layer(
            lambda e, p: (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1), aggregate="mean per relation"
        )

    def forward(self, block: Block) -> Tensor:
        x = self.node(block.nodes)
        for W in self.W:
            x = F.relu(x + self.mean(block.graph, {"x": x}, {"W": W}))
        return self.last(x[: block.seeds.shape[0]])


def kind_loss(model: Any, block: Block) -> Tensor:
    return F.cross_entropy(model(block), torch.where(block.is_seed, block.seeds % KINDS, -100))


def step_over(graph: RelGraph, example: Block, **options: Any) -> tuple[wholestep.Step, Network]:
    torch.manual_seed(0)
    model = Network(graph.num_nodes, graph.num_relations)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options = {"backend": "interpret", "cache": False, "verbose": False} | options
    made = wholestep.compile(model, kind_loss, optimizer, example, **options)
    return made, model


def train_beside(eager: Network, step: wholestep.Step, over: Any, *, rel: float) -> None:
    """The losses of a step are eager's, block by block."""
    optimizer = torch.optim.Adam(eager.parameters(), lr=1e-2)
    for block in over:
        ours = step(block)
        optimizer.zero_grad()
        theirs = kind_loss(eager, block)
        theirs.backward()
        optimizer.step()
        assert float(ours) == pytest.approx(theirs.item(), rel=rel)


@pytest.mark.parametrize("together", [1, 8])
def test_few_captures_for_many_blocks_and_the_losses_of_eager(together: int) -> None:
    graph = skewed()
    made_blocks = some_blocks(graph, batch_size=14, together=together)
    step, _ = step_over(graph, next(iter(made_blocks)))
    torch.manual_seed(0)
    eager = Network(graph.num_nodes, graph.num_relations)
    train_beside(eager, step, made_blocks, rel=1e-4)
    assert step.count == len(made_blocks) == 29 and step.rung == "whole step" and step.captures <= 4


def test_a_seed_that_is_there_twice_has_two_nodes_one_of_them_alone() -> None:
    made_ = some_blocks(made("plain"), batch_size=4)
    block = made_.block(torch.tensor([5, 3, 5]), made_.generator)
    assert block.nodes[:4].tolist() == block.seeds.tolist() == [5, 3, 5, 5]
    assert int(block.graph.degree[2]) == int(block.graph.degree[3]) == 0 < int(block.graph.degree[0])


def test_no_seeds_are_no_blocks() -> None:
    none = rel.blocks(made("plain"), torch.arange(0), fanout=(2,), batch_size=3)
    assert len(none) == 0 and list(none) == []


# ---- what is refused ----


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (dict(seeds=torch.tensor([0, 99])), r"seeds\[1\] is 99, and the graph has 20 nodes"),
        (dict(seeds=torch.tensor([3, 1, 3])), "seed 3 is there twice"),
        (dict(seeds=torch.tensor([0.5])), "seeds are not a tensor of node ids"),
        (dict(seeds=torch.arange(3, device="meta")), "seeds on meta and a graph on cpu"),
        (dict(fanout=()), r"fanout=\(\)"),
        (dict(fanout=3), r"fanout=3\. .*for every hop"),
        (dict(batch_size=2.0), r"batch_size=2\.0"),
        (dict(generator=3), "generator=3.*torch.Generator"),
        (dict(buckets="4"), "buckets='4'"),
        (dict(fanout=(3, 0)), r"fanout=\(3, 0\)"),
        (dict(batch_size=0), "batch_size=0"),
        (dict(buckets=0), "buckets=0"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadOption, match=told):
        rel.blocks(made("plain"), **({"seeds": torch.arange(9), "fanout": (2,), "batch_size": 3} | options))


@pytest.mark.gpu
def test_on_a_gpu_beside_the_step() -> None:
    graph = skewed(device="cuda")
    whole = {(int(s), int(d), int(r)) for s, d, r in zip(graph.src.cpu(), graph.dst.cpu(), graph.etype.cpu())}
    one, again = (list(some_blocks(graph, seed=3)) for _ in range(2))
    for block, same in zip(one, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(bits(block), bits(same), strict=True))
        edges = int(block.num_real[1])
        src, dst = (block.nodes[t[:edges].long()].cpu() for t in (block.graph.src, block.graph.dst))
        assert {(int(s), int(d), int(r)) for s, d, r in zip(src, dst, block.graph.etype[:edges].cpu())} <= whole


@pytest.mark.gpu
def test_on_a_gpu_blocks_are_those_of_a_cpu_and_nothing_waits_between_them() -> None:
    graph = typed(skewed(90, 300, 4))
    options: dict[str, Any] = {"fanout": (300, 300), "batch_size": 4, "shuffle": False}
    alone = some_blocks(graph, **options)
    blocks = iter(some_blocks(graph.to("cuda"), **options, together=5, buckets=alone.buckets))
    found = [next(blocks)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found += list(blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(alone, found, strict=True):
        for a, b in zip(bits(one), bits(other), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b.cpu()) and b.data_ptr() % 16 == 0


@pytest.mark.gpu
def test_on_a_gpu_blocks_are_replayed_with_the_losses_of_eager() -> None:
    made_blocks = some_blocks(skewed(device="cuda"), batch_size=8, together=8, buckets=2)
    with torch.device("cuda"):
        step, model = step_over(made_blocks.graph, next(iter(made_blocks)), cuda_graph=True, backend="inductor")
        torch.manual_seed(0)
        eager = Network(made_blocks.graph.num_nodes, made_blocks.graph.num_relations)
    eager.load_state_dict(model.state_dict())
    train_beside(eager, step, made_blocks, rel=1e-3)
    assert step.count == 50 and step.captures <= 2 and step.regions["cuda_graph"]["mode"] == "replayed"
