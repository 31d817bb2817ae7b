"""What leaves the card, as the planner decides it: never in vain, and what it counts is what the pass does."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import pytest
import torch
from tests.passes.test_offload import captured
from torch import fx

from wholestep.cost.devices import find_device
from wholestep.errors import BadOption
from wholestep.graph.copies import copy_graph
from wholestep.graph.plan import Plan
from wholestep.options import Options
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan.budget import hidden
from wholestep.plan.frontier import HIDDEN, SURELY_HIDDEN, Point, Study, frontier
from wholestep.plan.moves import Room
from wholestep.plan.peak import WORKSPACE, timeline
from wholestep.plan.room import refuse_room, room_of
from wholestep.plan.seconds import Lanes

ROOM = Room(1 << 40)


@functools.cache
def points(room: Room | None) -> list[Point]:
    return frontier(captured("bf16"), slow_card(), default_pipeline().carry_out, targets=6, room=room)


@functools.cache
def slow_card() -> Any:
    """A card on which so small a model takes as long beside its link as a large one does on a real card."""
    card = find_device("h200")
    slow = {kind: rate / 1e4 for kind, rate in card.peaks.items()}
    return dataclasses.replace(card, peaks=slow, bandwidth=card.bandwidth / 1e4)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("passes.stream_state", "plan.moves"):
        monkeypatch.setattr(importlib.import_module(f"wholestep.{module}"), "MOST_BYTES", 4096)
    for module in ("plan.moves", "plan.memory"):
        monkeypatch.setattr(importlib.import_module(f"wholestep.{module}"), "STATE_IN_FLIGHT", 4 * 4096)


def test_room_outside_makes_leaner_plans_and_no_slower_ones() -> None:
    with_room, without = points(ROOM), points(None)
    assert with_room[-1].peak_bytes - WORKSPACE < 0.9 * (without[-1].peak_bytes - WORKSPACE)
    for point in without:
        beside = [p for p in with_room if p.peak_bytes <= point.peak_bytes * 1.005]
        assert beside and min(p.seconds for p in beside) <= point.seconds * 1.005, "a plan beats the mixed ones in both"
    peaks, seconds = [p.peak_bytes for p in with_room], [p.seconds for p in with_room]
    assert peaks == sorted(peaks, reverse=True) and seconds == sorted(seconds)


def test_without_room_nothing_moves_and_with_it_both_ways_are_told() -> None:
    assert not any(p.plan.moves or p.host_bytes or p.moved_bytes for p in points(None))
    moving = [p for p in points(ROOM) if p.plan.moves]
    assert moving
    for point in moving:
        assert point.moved_bytes["out"] == point.moved_bytes["in"] > 0 and point.host_bytes > 0
        named = {*point.plan.host, *point.plan.state}
        assert named <= set(point.plan.reasons) and all("link hides" in point.plan.reasons[k] for k in point.plan.host)


def test_what_is_counted_is_what_the_passes_make() -> None:
    for point in points(ROOM):
        line = timeline(default_pipeline().carry_out(copy_graph(captured("bf16")), point.plan))
        assert line.peak_bytes == point.peak_bytes
        out = [n for w in line.works for n in [w.node] if n.target is torch.ops.ws.copy_out.default]
        assert sum(n.meta["val"].nbytes for n in out) == point.moved_bytes.get("out", 0)


def test_the_host_holds_no_more_than_it_may() -> None:
    most = max(p.host_bytes for p in points(ROOM))
    limited = points(Room(most // 6))
    assert any(p.plan.moves for p in limited) and all(p.host_bytes <= most // 6 for p in limited)
    files = points(Room(most // 6, files=True))
    assert any(p.plan.file for p in files) and files[-1].peak_bytes < limited[-1].peak_bytes


def test_the_sums_of_the_solver_are_near_the_events() -> None:
    study = Study(captured("bf16"), slow_card(), default_pipeline().carry_out, ROOM)
    exact = study.carried_out(study.least)
    assert abs(study.least.bytes - exact.peak_bytes) < 0.15 * (exact.peak_bytes - WORKSPACE), (
        "copies wait for one another"
    )


def test_without_a_budget_only_what_is_free_leaves() -> None:
    best = hidden(points(ROOM))
    assert best.seconds <= (1 + HIDDEN) * points(ROOM)[0].seconds
    most = (1 + SURELY_HIDDEN) * points(ROOM)[0].seconds
    assert not any(p.peak_bytes < best.peak_bytes for p in points(ROOM) if p.seconds <= most)


def test_all_of_what_is_granted_is_taken_only_for_much_memory() -> None:
    """Predictions do not see how copies slow the computation down."""
    fast, sure, leaner = (
        dataclasses.replace(points(None)[0], seconds=s, peak_bytes=b) for s, b in ((1, 100), (1.003, 60), (1.009, 58))
    )
    assert hidden([fast, sure, leaner]) is sure
    much = dataclasses.replace(leaner, peak_bytes=50)
    assert hidden([fast, sure, much]) is much


def test_the_leanest_in_a_time_is_leaner_than_any_of_the_list_and_takes_no_longer() -> None:
    study = Study(captured("bf16"), slow_card(), default_pipeline().carry_out, ROOM)
    for share in (0.001, 0.01, 0.1):
        seconds = study.first.seconds + share * study.kept.seconds
        least = study.planner.least_in(seconds)
        assert least is not None and least.seconds <= seconds + 1e-6
        again = study.planner.within(least.bytes)
        assert again is not None and again.seconds <= least.seconds + 1e-3 * study.kept.seconds
    assert study.planner.least_in(study.first.seconds - study.kept.seconds) is None


def node(num_bytes: int) -> fx.Node:
    made = fx.Graph().placeholder("x")
    made.meta["val"] = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    return made


def test_copies_lie_beside_the_computation() -> None:
    """55 GB/s one way, 40 each way when both are busy."""
    lanes = Lanes(find_device("h200"))
    first, second, back = node(55_000_000), node(55_000_000), node(40_000_000)
    lanes.begin("out", first)
    lanes.begin("out", second)
    lanes.run(1e-3)
    assert lanes.wait(first) == 0.0
    assert lanes.wait(second) == pytest.approx(1e-3)
    lanes.begin("out", node(40_000_000))
    lanes.begin("in", back)
    assert lanes.wait(back) == pytest.approx(1e-3)
    assert lanes.wait() == 0.0 and lanes.waits == pytest.approx(2e-3)
    assert lanes.moved == {"out": 150_000_000, "in": 40_000_000}


def test_a_copy_that_is_longer_than_the_computation_is_waited_for() -> None:
    lanes = Lanes(find_device("h200"))
    slow = node(110_000_000)
    lanes.begin("in", slow)
    lanes.run(0.5e-3)
    assert lanes.wait(slow) == pytest.approx(1.5e-3)


def test_bad_rooms_are_one_line(tmp_path: Any) -> None:
    card = torch.device("cuda")
    with pytest.raises(BadOption, match=r"host_memory='900TiB': this machine has .*give at most"):
        refuse_room(Options(host_memory="900TiB"), card)
    with pytest.raises(BadOption, match="is not an amount of memory"):
        Options(host_memory="much")
    with pytest.raises(BadOption, match=r"offload_path='.*nowhere' is no folder"):
        refuse_room(Options(offload_path=tmp_path / "nowhere"), card)
    with pytest.raises(BadOption, match="host_memory='1GiB' together with plan"):
        Options(host_memory="1GiB", plan=Plan())
    with pytest.raises(BadOption, match=r"moves values to files.*offload_path"):
        Options(plan=Plan(file=("a/b",)))
    assert room_of(Options()) is None and room_of(Options(host_memory="2GiB")) == Room(2 << 30)
    with pytest.warns(UserWarning, match="host_memory= moves nothing on a CPU"):
        refuse_room(Options(host_memory="1MiB"), torch.device("cpu"))
