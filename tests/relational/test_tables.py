"""Tables with room: whatever fills them, every one stays valid, and what is real stands where it stood."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.relational.graphs import NAMES, made
from torch import Tensor

from wholestep.relational import building
from wholestep.relational.building import in_order, in_rows, one_row, sides_of, sizes_of
from wholestep.relational.graph import RelGraph
from wholestep.relational.tables import Sizes, Table, Taking, side_of


def with_room(graph: RelGraph, more: int) -> RelGraph:
    ids = (t.long() for t in (graph.src, graph.dst, graph.etype))
    edges = in_order(*ids, graph.num_nodes, graph.num_relations)
    by_source, counts = sizes_of(edges, sides_of(edges), 1)
    sizes = Sizes(*(size + more for size in (graph.num_nodes, *counts[0, :-1].tolist())))
    filled, _ = in_rows(edges, torch.tensor([0, graph.num_edges]), torch.tensor([0]), 0, sizes)
    made_ = one_row(building.tables_of(filled, sides_of(filled), by_source, sizes))
    return RelGraph._of({"order": torch.arange(graph.num_edges + more), "types": None} | made_)


def entries(ptr: Tensor, *values: Tensor) -> list[tuple[int, ...]]:
    assert bool((torch.diff(ptr) >= 0).all()) and int(ptr[0]) == 0
    assert all(int(ptr[-1]) == len(value) for value in values)
    group = torch.repeat_interleave(torch.arange(len(ptr) - 1), torch.diff(ptr).long())
    return list(zip(group.tolist(), *(value.tolist() for value in values), strict=True))


def tables_of(graph: RelGraph) -> list[Table]:
    rows = [table for rows in (graph.rows, graph.only_sources) for table in (rows.gathered, rows.spread)]
    return [*rows, graph.incoming, graph.neighbours, graph.at_destinations, graph.of_relations]


def edges_of(edge: Tensor | None, index: Tensor) -> Tensor:
    """-1 where there is none."""
    return torch.full_like(index, -1) if edge is None else edge


def takings_of(graph: RelGraph) -> list[Taking]:
    pairs = [taking for pairs in (graph.sources, graph.destinations) for taking in (pairs.of_node, pairs.to_edge)]
    return [graph.from_src, graph.from_dst, *pairs]


@pytest.mark.parametrize("more", [1, 5])
@pytest.mark.parametrize("name", NAMES)
def test_every_table_with_room_is_a_table(name: str, more: int) -> None:
    graph = with_room(made(name), more)
    for table in tables_of(graph):
        forth = entries(table.ptr, table.index, edges_of(table.edge, table.index))
        back = entries(table.back_ptr, table.back_index, edges_of(table.back_edge, table.back_index))
        assert sorted(forth) == sorted((target, row, edge) for row, target, edge in back)
        named = [edge for *_, edge in forth if edge >= 0]
        assert len(named) == len(set(named))  # an edge has one entry, or none
    for taking in takings_of(graph):
        back = entries(taking.back_ptr, taking.back_index)
        assert sorted(back) == sorted((row, place) for place, row in enumerate(taking.index.tolist()))
    for pairs in (graph.sources, graph.destinations):
        ends = torch.searchsorted(pairs.relation.long(), torch.arange(graph.num_relations), right=True)
        assert torch.equal(ends, pairs.ends.long())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_real_stands_where_it_stood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "side_of", lambda *_: None)  # with room every relation has its own
    alone, graph = made(name), with_room(made(name), 3)
    for with_more, without in zip(
        tables_of(graph)[:-1], tables_of(alone)[:-1], strict=True
    ):  # the last numbers pairs anew
        for field in dataclasses.fields(Table):
            if not field.name.endswith("ptr"):
                here, there = getattr(with_more, field.name), getattr(without, field.name)
                if there is None:
                    assert here is None or bool((here == -1).all())
                else:
                    assert torch.equal(here[: len(there)], there)
    assert bool((graph.src[alone.num_edges :] == graph.num_nodes - 1).all())
    assert bool((graph.dst[alone.num_edges :] == graph.num_nodes - 1).all())


@pytest.mark.parametrize(
    ("pairs", "side"),
    [
        ((29_286, 17_083, 17_083), True), ((88_860, 51_835, 51_835), False), ((370_086, 201_862, 201_862), False),
        ((161_874, 161_874, 63_884), None), ((238_400, 227_400, 217_900), True), ((3_231_149, 1_700_604, 1_700_604), False),
    ],
    ids=["aifb", "mutag", "bgs", "fb15k-237", "biokg", "am"],
)  # fmt: skip
def test_the_side_that_is_quicker_on_a_gpu(pairs: tuple[int, int, int], side: bool | None) -> None:
    """As layers of width 64 were measured by either."""
    assert side_of(*pairs, on_gpu=True) is side


@pytest.mark.parametrize(
    ("name", "by_source"), [("few sources", {True}), ("few destinations", {False}), ("either side", {True, False})]
)
def test_all_relations_take_one_side_unless_two_are_much_better(name: str, by_source: set[bool]) -> None:
    graph = made(name)
    assert set(graph.rows.by_source.tolist()) == by_source
    assert (graph.rows is graph.only_sources) == (by_source == {True})
    assert [table.edge is None for table in (graph.rows.gathered, graph.rows.spread)] == [
        by_source == {True}, by_source == {False},
    ]  # fmt: skip


def test_room_is_for_what_fills_it_too() -> None:
    there = Sizes(4, 5, 3, 3, 3, 4, 4)
    assert Sizes(5, 6, 4, 4, 4, 5, 5).hold(there) and not there.hold(there)
    assert not Sizes(5, 5, 4, 4, 4, 5, 5).hold(there)


@pytest.mark.parametrize("count", [0, 100, 20_000, 40_000])
def test_equal_ids_stay_in_order_however_many_there_are(count: int) -> None:
    ids = torch.randint(0, 50, (count,))
    found = building.order_of(ids, 50)
    assert torch.equal(found, ids.argsort(stable=True)) and found.shape == (count,)
