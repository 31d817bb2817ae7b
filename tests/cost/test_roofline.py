"""The least seconds of operators and graphs on a device, and MFU and HFU of a measured step."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.cost.captured import captured, traced
from torch import nn

from wholestep.cost.devices import DEVICES
from wholestep.cost.node_costs import at_sizes, cost_of, node_costs, total_flops
from wholestep.cost.roofline import Fp32Units, bound, fp32_units_here, roofline
from wholestep.cost.utilisation import utilisation
from wholestep.errors import BadOption

H200 = DEVICES["h200"]
R = torch.randn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.fixture(scope="module")
def costs():
    return node_costs(captured(Two(), lambda m, x: m(x).square().mean(), R(8, 16)))


def mm(side, dtype=torch.bfloat16):
    (node,) = traced(torch.mm, torch.empty(side, side, dtype=dtype), torch.empty(side, side, dtype=dtype))
    return cost_of(node)


def test_a_large_product_waits_for_the_units_and_a_small_one_for_memory() -> None:
    large, small = bound(mm(8192), H200), bound(mm(64), H200)
    assert large.limit == "compute" and large.seconds == pytest.approx(2 * 8192**3 / 989.4e12)
    assert small.limit == "memory" and small.seconds == pytest.approx(3 * 2 * 64**2 / 4.8e12)


def test_fp32_products_and_convolutions_have_a_switch_each() -> None:
    product = mm(8192, torch.float32)
    assert bound(product, H200).seconds == pytest.approx(2 * 8192**3 / 67e12)
    assert bound(product, H200, Fp32Units(matmul="tf32")).seconds == pytest.approx(2 * 8192**3 / 494.7e12)
    convolution = dataclasses.replace(product, kind="convolution")
    assert bound(convolution, H200).seconds == pytest.approx(2 * 8192**3 / 494.7e12)
    assert bound(convolution, DEVICES["t4"]).seconds == pytest.approx(2 * 8192**3 / 8.1e12)


def test_torchs_switches_are_read() -> None:
    assert fp32_units_here() == Fp32Units(matmul="fp32", convolution="tf32")
    torch.set_float32_matmul_precision("high")
    try:
        assert fp32_units_here() == Fp32Units(matmul="tf32", convolution="tf32")
    finally:
        torch.set_float32_matmul_precision("highest")


def test_elementwise_work_has_the_vector_peak() -> None:
    (node,) = traced(lambda x: torch.nn.functional.gelu(x), R(1024).bfloat16())
    heavy = dataclasses.replace(cost_of(node), flops=10**12)
    assert bound(heavy, H200).seconds == pytest.approx(1e12 / 67e12)


def test_a_view_takes_no_time_and_a_missing_format_is_named() -> None:
    (node,) = traced(lambda x: x.t(), R(3, 4))
    assert bound(cost_of(node), H200) == dataclasses.replace(bound(cost_of(node), H200), seconds=0.0, limit="nothing")
    with pytest.raises(BadOption, match="T4 has no peak for bf16"):
        bound(mm(64), DEVICES["t4"])


def test_sums_of_every_grouping_are_the_total(costs) -> None:
    found = roofline(costs, H200)
    for groups in (found.by_phase, found.by_kind, found.by_module, found.by_limit):
        for field in ("operators", "flops", "bytes", "seconds"):
            assert sum(getattr(sums, field) for sums in groups.values()) == pytest.approx(
                getattr(found.total, field)
            ), field
    assert found.total.flops == total_flops(costs) and found.total.operators == len(costs)
    assert set(found.by_phase) == {"forward", "backward", "update"}
    assert found.by_kind["matmul"].flops == 2 * 8 * (16 * 64 * 2 + 64 * 4 * 3)
    assert {"first", "second"} <= set(found.by_module)


def test_module_paths_are_cut() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
    counted = node_costs(captured(model, lambda m, x: m(x).sum(), R(3, 4)))
    assert {"0.0", "0.1", "1"} <= set(roofline(counted, H200).by_module)
    assert {"0", "1"} <= set(roofline(counted, H200, depth=1).by_module)
    assert "0.0" not in roofline(counted, H200, depth=1).by_module


def test_symbolic_seconds_are_expressions() -> None:
    nodes = traced(lambda x, y: x @ y, R(6, 4), R(4, 5), symbolic=True)
    counted = [cost_of(node) for node in nodes]
    symbolic = roofline(counted, H200).total.seconds
    sizes = {symbol.name: 4096 for symbol in symbolic.free_symbols}
    assert bound(counted[-1], H200).limit == "unknown"
    at = roofline(at_sizes(counted, sizes), H200)
    assert float(symbolic.subs({symbol: 4096 for symbol in symbolic.free_symbols})) == pytest.approx(at.total.seconds)
    assert at.total.seconds == pytest.approx(2 * 4096**3 / 67e12)
    with pytest.raises(BadOption, match="symbolic"):
        utilisation(counted, 1.0, H200)


# ---- MFU and HFU ----


def test_both_lines_name_numerator_denominator_and_source(costs) -> None:
    flops = 2 * 8 * (16 * 64 * 2 + 64 * 4 * 3)
    found = utilisation(costs, 1e-6, H200)
    assert found.model_flops == found.executed_flops == flops
    assert found.mfu == found.hfu == pytest.approx(flops / (1e-6 * 67e12))
    first, second = found.lines()
    assert first.startswith(f"MFU {found.mfu:.1%} = 45.06 kFLOP of forward and backward")
    assert "(0.001 ms x 67 TFLOP/s fp32 dense, NVIDIA H200 (SXM): NVIDIA H200 data sheet" in first
    assert second.startswith("HFU") and "executed" in second


def test_recomputation_counts_for_the_hardware_only() -> None:
    graph = captured(Two(), lambda m, x: m(x).square().mean(), R(8, 16))
    before = utilisation(node_costs(graph), 1.0, H200)
    node = next(n for n in graph.operations() if "addmm" in str(n.target))
    with graph.graph.inserting_after(node):
        again = graph.graph.node_copy(node)
    again.meta["custom"] = {**again.meta["custom"], "recomputed": True}
    after = utilisation(node_costs(graph), 1.0, H200)
    assert after.model_flops == before.model_flops
    assert after.executed_flops == before.executed_flops + 2 * 8 * 16 * 64


def test_the_scores_that_the_backward_of_attention_makes_again_are_no_model_flops() -> None:
    def loss(m, x):
        q = m(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).square().mean()

    counted = node_costs(captured(nn.Linear(8, 8), loss, R(2, 6, 8)))
    forward = 4 * 2 * 6 * 6 * 8
    found = utilisation(counted, 1.0, H200)
    products = 2 * 2 * 12 * 8 * 8  # nobody asks for the gradient of x
    assert found.model_flops == 3 * forward + products
    assert found.executed_flops == 3.5 * forward + products


def test_micro_batches_and_mixed_formats(costs) -> None:
    assert utilisation(costs, 1.0, H200, repeats=4).model_flops == 4 * utilisation(costs, 1.0, H200).model_flops
    mixed = [*costs, dataclasses.replace(mm(64), phase="forward")]
    found = utilisation(mixed, 1.0, H200)
    assert found.number_format == "bf16" and 0.9 < found.share_in_format < 0.95
    assert "of them not in bf16" in found.lines()[0]
    assert "measured" not in found.lines()[0]


def test_nothing_to_count_is_an_error() -> None:
    with pytest.raises(BadOption, match="no matrix products"):
        utilisation([], 1.0, H200)
    with pytest.raises(BadOption, match="seconds=0"):
        utilisation([mm(64)], 0, H200)
