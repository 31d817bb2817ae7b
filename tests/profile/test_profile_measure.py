"""The parts of a measurement: kernels to calls, calls to rows, least times of regions, warm-up."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import wholestep
from wholestep.cost.devices import DEVICES
from wholestep.cost.node_costs import node_costs
from wholestep.cost.roofline import Fp32Units
from wholestep.graph.layers import layer_pattern
from wholestep.profile.measure import timing
from wholestep.profile.measure.calls import TimedCall, calls_of_graph, common_path, with_kernels
from wholestep.profile.measure.kernels import PREFIX, Activity, Kernel, busy_seconds, by_call
from wholestep.profile.measure.rows import by_module, by_phase, fitted, median_calls, rows_of, waterfall
from wholestep.profile.measure.work import Work, sum_of

WORK = Work(1e6, 1e3, 2e-4, 4e-4)
H100, FP32 = DEVICES["h100"], Fp32Units()


def call(name: str = "mm", seconds: float = 1e-3, work: Work | None = WORK, **more: str) -> TimedCall:
    facts = {"kind": "matmul", "phase": "forward", "module": "blocks.0"} | more
    return TimedCall(name, facts["kind"], facts["phase"], facts["module"], work, name, seconds)


# ---- kernels ----

SEEN = [
    Activity(f"{PREFIX}0", 0, 100, False), Activity("cudaLaunchKernel", 10, 12, False, 7), Activity("gemm", 200, 260, True, 7),
    Activity(f"{PREFIX}1", 110, 150, False), Activity("cuLaunchKernelEx", 120, 125, False, 8), Activity("gelu", 240, 300, True, 8),
    Activity("cudaMemcpyAsync", 160, 165, False, 9), Activity("Memcpy HtoD", 400, 410, True, 9),
    Activity("aten::mm", 5, 90, False, 8), Activity(f"{PREFIX}0", 200, 260, True, 7), Activity("lost", 500, 505, True, 99),
]  # fmt: skip


def test_kernels_go_to_the_call_that_launched_them() -> None:
    found, others = by_call(SEEN)
    assert found == {0: [Kernel("gemm", 1, 60 / 1e9)], 1: [Kernel("gelu", 1, 60 / 1e9)]}
    assert [kernel.name for kernel in others] == ["Memcpy HtoD", "lost"], "launched by no call, or by nobody known"


def test_without_its_launch_a_kernel_goes_by_the_operator_around_it() -> None:
    seen = [
        Activity(f"{PREFIX}4", 0, 100, False),
        Activity("aten::mm", 5, 90, False, 31),
        Activity("gemm", 200, 260, True, 7, 31),
    ]
    assert by_call(seen) == ({4: [Kernel("gemm", 1, 60 / 1e9)]}, [])


def test_busy_counts_overlapping_kernels_once() -> None:
    assert busy_seconds(SEEN) == pytest.approx((100 + 10 + 5) / 1e9)


def test_kernels_of_no_call_are_told_as_unattributed() -> None:
    calls = with_kernels([call("a", 0.0), call("b", 0.0)], SEEN)
    assert [c.seconds for c in calls[:2]] == pytest.approx([60e-9, 60e-9])
    assert [(c.name, c.phase, c.work) for c in calls[2:]] == [
        ("Memcpy HtoD", "unattributed", None),
        ("lost", "unattributed", None),
    ]


# ---- rows ----


def test_equal_work_is_one_row_with_rates_and_loss() -> None:
    rows = rows_of([call(), call(), call("gelu", 5e-3)], 10e-3)
    assert [(r.name, r.calls) for r in rows] == [("gelu", 1), ("mm", 2)], "most to be won first"
    assert rows[1].lost_ms == pytest.approx(1.2) and rows[1].tflops_per_second == pytest.approx(2e6 / 2e-3 / 1e12)
    assert rows[1].share == pytest.approx(0.2) and rows[1].bound == "compute"


def test_unknown_work_has_no_numbers_and_comes_last() -> None:
    row = rows_of([call("x", 9e-3, None), call()], 10e-3)[-1]
    assert (row.name, row.flops, row.lost_ms, row.bound) == ("x", None, None, "unattributed")


def test_the_waterfall_adds_up_whatever_is_in_it() -> None:
    calls = [call(), call("fast", 1e-4, kind="movement"), call("x", 2e-3, None)]
    entries = waterfall(calls, 10e-3)
    assert sum(ms for _, ms in entries) == pytest.approx(10.0)
    assert dict(entries)["lost in movement"] < 0 and dict(entries)["unattributed"] == pytest.approx(2.0)
    many = [call(f"c{i}", 1e-3, kind=f"kind{i}") for i in range(9)]
    folded = waterfall(many, 10e-3)
    assert sum(ms for _, ms in folded) == pytest.approx(10.0) and "lost elsewhere" in dict(folded)


def test_phases_and_modules_keep_all_time() -> None:
    calls = [call(), call("b", 2e-3, phase="backward", module="")]
    assert by_phase(calls, 5e-3) == pytest.approx({"forward": 1.0, "backward": 2.0, "between calls": 2.0})
    assert by_module(calls) == {"": {"backward": 2.0}, "blocks.0": {"forward": 1.0}}


def test_medians_and_scaling() -> None:
    steps = [[call(seconds=s)] for s in (1e-3, 3e-3, 2e-3)]
    assert median_calls(steps)[0].seconds == 2e-3
    assert median_calls([[call(seconds=7e-3)], [call("other")]])[0].seconds == 7e-3, "other calls cannot be averaged"
    short, factor = fitted([call(seconds=3e-3), call(seconds=1e-3)], None, 2e-3)
    assert factor == 0.5 and sum(c.seconds for c in short) == pytest.approx(2e-3)
    assert fitted([call()], None, 1.0)[1] == 1.0
    same_share, _ = fitted([call(seconds=3e-3)], 4e-3, 8e-3)
    assert same_share[0].seconds == pytest.approx(6e-3), (
        "three quarters of the watched step, three quarters of the sampled one"
    )
    assert fitted([call(seconds=5e-3)], 4e-3, 8e-3)[0][0].seconds == pytest.approx(8e-3), "never longer than the step"


def test_paths() -> None:
    assert layer_pattern("blocks.3.fc") == "blocks.*.fc" and layer_pattern("") == ""
    assert (
        common_path(["a.b.c", "a.b.d"]) == "a.b"
        and common_path(["a.b", "a"]) == "a"
        and common_path([]) == "" == common_path(["a", "b"])
    )


# ---- least times ----


def graph_of_a_small_step() -> wholestep.graph.TrainingGraph:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    step = wholestep.compile(
        model, lambda m, b: m(b).square().mean(), torch.optim.AdamW(model.parameters()), torch.randn(16, 32), backend="interpret",
        check="off", cache=False, verbose=False,
    )  # fmt: skip
    assert step.graph is not None
    return step.graph


def test_interpreted_calls_have_the_work_of_their_nodes() -> None:
    graph = graph_of_a_small_step()
    calls = calls_of_graph(graph, "interpret", H100, FP32)
    costs = node_costs(graph)
    total = sum_of(c.work for c in calls if c.work is not None)
    assert total.flops == sum(cost.flops for cost in costs) and total.floor_seconds >= total.compute_seconds > 0
    assert {c.phase for c in calls} == {"forward", "backward", "update"}
    assert {c.module for c in calls if c.name == "addmm"} == {"0", "2", "4"}


def test_regions_have_all_flops_and_fewer_bytes_than_their_operators() -> None:
    graph = graph_of_a_small_step()
    alone = sum_of(c.work for c in calls_of_graph(graph, "interpret", H100, FP32) if c.work is not None)
    regions = [c for c in calls_of_graph(graph, "inductor", H100, FP32)]
    fused = sum_of(c.work for c in regions if c.work is not None)
    assert any(c.kind == "region" for c in regions)
    assert fused.flops == alone.flops and 0 < fused.bytes < alone.bytes
    assert fused.compute_seconds <= fused.floor_seconds < alone.floor_seconds


# ---- warm-up ----


def test_warm_up_ends_when_times_rest() -> None:
    assert not timing.settled([1.0] * 8) and timing.settled([1.0] * 9) and not timing.settled([3.0] * 5 + [1.0] * 5)


def test_steps_and_batches_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(i) for i in range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    asked: list[int] = []
    found = timing.time_steps(lambda batch: batch, lambda n: asked.append(n), torch.device("cpu"), samples=4)
    assert found.steps == (1.0,) * 4 and found.data == (1.0,) * 4 and found.settled
    assert asked == list(range(found.warm_up_steps + 4)), "every step gets the next batch"
    assert dataclasses.replace(found, steps=(1.0, 5.0, 2.0)).median == 2.0
