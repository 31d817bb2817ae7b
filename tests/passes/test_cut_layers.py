"""Layers are cut where a plan moves values: alike in all layers, beside products, and nowhere else; trips use the pieces."""

from __future__ import annotations

import itertools

import pytest
from tests.passes.away import all_away
from tests.passes.test_offload import applied, captured, moved
from torch import fx

from wholestep.graph.copies import copy_graph
from wholestep.graph.layers import parts_of
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, phase_of
from wholestep.passes import cut_layers as module
from wholestep.passes import trips as places
from wholestep.passes.cut_layers import cut_layers
from wholestep.passes.trips import Trips, product_flops
from wholestep.plan.peak import timeline

GELU = "blocks.*/gelu"


def cuts(graph: TrainingGraph) -> list[fx.Node]:
    return [node for node in graph.operations() if "piece" in (node.meta.get("custom") or {})]


def cut(precision: str = "fp32") -> TrainingGraph:
    return cut_layers(copy_graph(captured(precision)), Plan(cut_layers=True))


def test_only_where_values_move_and_never_if_the_plan_says_so() -> None:
    for plan in (Plan(), Plan(state={"*": "host"}), Plan(host=(GELU,), cut_layers=False), Plan(recompute=(GELU,))):
        assert not cuts(applied("fp32", plan)), plan
    for plan in (Plan(host=(GELU,)), Plan(file=(GELU,)), Plan(cut_layers=True)):
        assert cuts(applied("fp32", plan)), plan


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_equal_layers_are_cut_alike_in_pieces_of_about_equal_work(precision: str) -> None:
    graph = cut(precision)
    places = [(str(n.target), n.meta["custom"]["phase"], n.meta["custom"]["piece"]) for n in cuts(graph)]
    by_layer = [places[i : i + 3] for i in range(0, len(places), 3)]
    forward = [layer for layer in by_layer if layer[0][1] == "forward"]
    assert len(forward) == 3 and forward[0] == forward[1] == forward[2]
    assert by_layer[3] == by_layer[4], "the backward of the first layer has no gradient to hand on"
    work: dict[tuple[str, str | None, int], float] = dict.fromkeys(parts_of(graph.graph.nodes).values(), 0.0)
    for node, part in parts_of(graph.graph.nodes).items():
        work[part] += product_flops(node)
    whole = sum(flops for (phase, layer, _), flops in work.items() if (phase, layer) == ("forward", "blocks.1"))
    mine = [flops for (phase, layer, _), flops in work.items() if (phase, layer) == ("forward", "blocks.1")]
    assert len(mine) == 4 and max(mine) < 0.45 * whole and min(mine) > 0.1 * whole


def test_many_layers_are_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENOUGH", 3)
    assert not cuts(cut())


def test_a_cut_tears_no_kernel() -> None:
    """The gradient of a bias is summed in the piece that makes what is summed."""
    graph = cut()
    parts = parts_of(graph.graph.nodes)
    made = [n for n in graph.operations() if "gelu_backward" in str(n.target)]
    for node in made:
        readers = [user for view in (node, *node.users) for user in view.users]
        sums = [user for user in readers if "sum.dim_IntList" in str(user.target)]
        assert sums and all(parts[user] == parts[node] for user in sums)
    assert len(made) == 3


def test_every_bit_stays_in_pieces_and_more_leaves_than_between_whole_layers() -> None:
    away = all_away(captured("fp32"))
    whole = applied("fp32", Plan(host=away.host, state=away.state, cut_layers=False))
    pieces = applied("fp32", away)
    assert len(moved(pieces)) > len(moved(whole))
    assert timeline(pieces).peak_bytes < timeline(whole).peak_bytes


def spans(graph: TrainingGraph, monkeypatch: pytest.MonkeyPatch, flops_per_byte: float) -> list[tuple[int, int]]:
    """Stations that copies of all gelus have: on the way out, and back."""
    monkeypatch.setattr(places, "FLOPS_PER_BYTE", flops_per_byte)
    trips = Trips(graph)
    values = [n for n in graph.operations() if "gelu.default" in str(n.target) and phase_of(n) == "forward"]
    at = {node: index for index, node in enumerate(trips.stations)}
    found = trips.together(values).values()
    return [(at[t.out_done] - at[t.out], at[t.back_done] - at[t.back]) for t in found]


def test_a_copy_has_the_time_that_the_link_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = cut()
    quick = spans(graph, monkeypatch, 1e-6)
    assert set(quick) == {(1, 1)}, "a link that is quick needs one piece"
    gelu = next(n for n in graph.operations() if "gelu.default" in str(n.target))
    layer = sum(
        product_flops(n) for n, part in parts_of(graph.graph.nodes).items() if part[:2] == ("forward", "blocks.1")
    )
    slower = spans(graph, monkeypatch, layer / 2 / gelu.meta["val"].nbytes)
    assert all(2 <= out <= 3 and 1 <= back <= 2 for out, back in slower[:2]), slower
    slowest = spans(graph, monkeypatch, 1e9)
    assert slowest and all(out <= places.LONGEST and back <= places.LONGEST for out, back in slowest), slowest


def test_what_is_asked_back_first_comes_first() -> None:
    graph = applied("fp32", all_away(captured("fp32"), state=False))
    order = {node: index for index, node in enumerate(graph.operations())}
    came = [node for node in order if "copy_in" in str(node.target)]
    waited = {node: order[next(iter(node.users))] for node in came}
    together = [(one, other) for one, other in itertools.pairwise(came) if other.prev is one]
    assert len(together) > 10 and all(waited[one] < waited[other] for one, other in together)
