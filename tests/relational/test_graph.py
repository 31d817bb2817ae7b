"""RelGraph: its tables against edges taken one by one; bad ids by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.relational.graphs import NAMES, edges_of, made

from wholestep.capture.batch import flatten
from wholestep.errors import BadOption
from wholestep.relational import RelGraph


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_the_edges_it_was_given(name: str) -> None:
    src, dst, etype, nodes, relations = edges_of(name)
    graph = made(name)
    assert (graph.num_nodes, graph.num_edges, graph.num_relations) == (nodes, len(src), relations)
    for here, given in ((graph.src, src), (graph.dst, dst), (graph.etype, etype)):
        assert here.dtype == torch.int32 and torch.equal(here.long(), given[graph.order])
    keys = graph.dst.long() * relations + graph.etype
    assert bool((keys[1:] >= keys[:-1]).all())
    assert torch.equal(graph.degree, torch.bincount(dst, minlength=nodes))


@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_the_nodes_with_a_relation(name: str) -> None:
    graph = made(name)
    for pairs, node in ((graph.sources, graph.src), (graph.destinations, graph.dst)):
        told = list(zip(pairs.relation.tolist(), pairs.of_node.index.tolist(), strict=True))
        assert told == sorted({(r, n) for r, n in zip(graph.etype.tolist(), node.tolist(), strict=True)})
        found = [told[pair] for pair in pairs.to_edge.index.tolist()]
        assert found == list(zip(graph.etype.tolist(), node.tolist(), strict=True))
        ends = [sum(r <= relation for r, _ in told) for relation in range(graph.num_relations)]
        assert pairs.ends.tolist() == ends


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", ["rows", "only_sources"])
def test_rows_sum_over_all_edges_whatever_the_side(name: str, rows: str) -> None:
    graph = made(name)
    table, generator = getattr(graph, rows), torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (graph.num_nodes, graph.num_edges))
    found = table.spread(table.gathered(x[:, None], weight), weight)[:, 0]
    wanted = torch.zeros(graph.num_nodes, dtype=torch.float64)
    wanted = wanted.index_add(0, graph.dst.long(), weight * x[graph.src.long()])
    assert torch.allclose(found, wanted)
    assert bool(graph.only_sources.by_source.all())
    assert table.gathered.ptr.shape[0] - 1 <= max(graph.num_edges, 0)


@pytest.mark.parametrize("name", NAMES)
def test_tables_turned_round_are_the_same_entries(name: str) -> None:
    graph = made(name)
    for table in (graph.rows.gathered, graph.rows.spread, graph.incoming, graph.neighbours):
        if table.edge is None or table.back_edge is None:
            none = torch.full_like(table.index, -1)
            table = dataclasses.replace(table, edge=none, back_edge=none)
        forth = {
            (t, int(table.index[j]), int(table.edge[j]), j - int(table.ptr[t]) if table.edge[j] < 0 else 0)
            for t in range(table.ptr.shape[0] - 1) for j in range(int(table.ptr[t]), int(table.ptr[t + 1]))
        }  # fmt: skip
        back = [
            (int(table.back_index[j]), r, int(table.back_edge[j]))
            for r in range(table.back_ptr.shape[0] - 1)
            for j in range(int(table.back_ptr[r]), int(table.back_ptr[r + 1]))
        ]
        assert sorted(entry[:3] for entry in forth) == sorted(back)


def test_the_better_side_has_fewer_rows() -> None:
    graph = made("hubs")
    rows = graph.rows.gathered.ptr.shape[0] - 1
    assert rows <= min(graph.sources.relation.shape[0], graph.destinations.relation.shape[0])
    assert f"{rows}" in graph.report() and "5 relations" in graph.report()


@pytest.mark.parametrize("ntype", [[2, 0, 0, 2], [0, 0, 2, 2]])
def test_nodes_in_the_order_of_types(ntype: list[int]) -> None:
    types = RelGraph([0, 3], [1, 2], [0, 0], ntype=ntype, num_types=4).types
    assert types is not None and types.count == 4 and types.ends.tolist() == [2, 2, 4, 4]
    assert types.to_node(torch.arange(4.0)).tolist() == ntype
    assert (types.order is None) == (ntype == sorted(ntype))
    x = torch.tensor(ntype, dtype=torch.float64, requires_grad=True)
    if types.order is not None:
        there = types.order(x)
        assert there.tolist() == sorted(ntype)
        assert torch.autograd.grad((there * torch.arange(4.0, dtype=torch.float64)).sum(), x)[0].tolist() == [
            2,
            0,
            1,
            3,
        ]


def test_it_is_tensors_only_so_that_graphs_of_equal_sizes_are_one_batch() -> None:
    src, dst, etype, nodes, relations = edges_of("plain")
    others = [torch.randperm(nodes)[ids] for ids in (src, dst)]
    graphs = [RelGraph(*ends, etype, num_nodes=nodes, num_relations=relations) for ends in ((src, dst), others)]
    tensors, spec = flatten({"graph": graphs[0]})
    assert spec == flatten({"graph": graphs[1]})[1] and len(tensors) > 30


def test_without_edges_and_with_counts_of_numpy() -> None:
    graph = RelGraph([], [], [], num_nodes=torch.arange(3).numpy()[2], num_relations=torch.tensor(1))
    assert (graph.num_nodes, graph.num_edges, graph.num_relations) == (2, 0, 1)


def test_from_triples_and_without_counts() -> None:
    assert RelGraph([], [], [], num_nodes=3, num_relations=1).num_edges == 0
    graph = RelGraph.from_triples([(0, 1, 2), (3, 0, 2)])
    assert (graph.num_nodes, graph.num_relations, graph.src.tolist(), graph.etype.tolist()) == (4, 2, [3, 0], [0, 1])
    moved = graph.to("meta")
    assert all(t.device.type == "meta" for t in flatten(moved)[0]) and moved.num_edges == 2
    assert [f.name for f in dataclasses.fields(moved)] == [f.name for f in dataclasses.fields(graph)]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            dict(src=[0, 9], dst=[0, 1], etype=[0, 0], num_nodes=3),
            r"src\[1\] is 9, and num_nodes is 3.*ids go from 0 to 2",
        ),
        (dict(src=[0, 1], dst=[0, -1], etype=[0, 0]), r"dst\[1\] is -1"),
        (dict(src=[0], dst=[0], etype=[4], num_relations=4), r"etype\[0\] is 4, and num_relations is 4"),
        (dict(src=[0, 1], dst=[0], etype=[0, 0]), "edges of unequal number: src 2, dst 1, etype 2"),
        (dict(src=[0.5], dst=[0], etype=[0]), "src is torch.float32"),
        (dict(src=[[0]], dst=[0], etype=[0]), r"src is torch.int64 of shape \(1, 1\)"),
        (dict(src=[0], dst=[0], etype=[0], num_nodes=-1), "num_nodes=-1"),
        (dict(src=[0, 1], dst=[1, 1], etype=[0, 0], ntype=[0]), "ntype has 1 rows, and there are 2 nodes"),
        (dict(src=[0], dst=[0], etype=[0], ntype=[3], num_types=3), r"ntype\[0\] is 3, and num_types is 3"),
        (dict(src=[0], dst=[0], etype=[0], ntype=[0.5]), "ntype is torch.float32.*per node"),
        (dict(src="0", dst=[0], etype=[0]), "src is no tensor"),
        (dict(src=[0], dst=None, etype=[0]), "dst is no tensor"),
        (dict(src=[0], dst=[0, [1]], etype=[0]), "dst is no tensor"),
        (dict(src=[0], dst=[0], etype=torch.zeros(1, dtype=torch.int64, device="meta")), "several devices.*etype meta"),
        (dict(src=[0], dst=[0], etype=[0], num_nodes=1.0), "num_nodes=1.0"),
        (dict(src=[0], dst=[0], etype=[0], num_nodes=True), "num_nodes=True"),
    ],
)
def test_bad_ids_are_named_with_their_place(given: dict[str, Any], told: str) -> None:
    with pytest.raises(BadOption, match=told):
        RelGraph(**given)
