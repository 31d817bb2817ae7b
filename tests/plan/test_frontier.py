"""The planner: exact on a small problem, monotone, and good for models that are no transformers."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from scipy.optimize import milp
from tests.passes.test_recompute import Small, batches, loss_fn
from torch import nn

import wholestep
from wholestep.cost.devices import find_device
from wholestep.cost.measure import this_device
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pipeline, default_pipeline
from wholestep.plan import frontier as frontier_module
from wholestep.plan.frontier import Study, card_bytes, fastest, frontier, round_up, too_small
from wholestep.plan.memory import AGAIN_AT_ONCE, MemoryPlanner
from wholestep.plan.problem import Problem, Unit, Value

H200 = find_device("h200")


def prepared(model: nn.Module, loss: Any, batch: Any) -> TrainingGraph:
    """The graph as the planner gets it."""
    pipeline = Pipeline(default_pipeline().passes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = wholestep.compile(
        model, loss, optimizer, batch, passes=pipeline, backend="interpret", check="off", cache=False
    )
    assert step.graph is not None
    return step.graph


# ---- the solver ----


def chain(sizes: list[int], seconds: list[float], needed: set[int]) -> Problem:
    """Operations one behind the other, all of one layer, all seen in one stretch; the first operand is always there."""
    values, units = {}, {}
    for i, (size, time) in enumerate(zip(sizes, seconds, strict=True)):
        key = f"m/{i}"
        values[key] = Value(key, key, bytes=size, count=1, near=i in needed, alive={0: size}, stored=True)
        units[key] = Unit(key, time, near_reads={f"m/{i - 1}"} if i else set(), stretches={0})
    return Problem(values, units, [1000])


def by_hand(problem: Problem, target: float) -> float | None:
    """The least seconds over all subsets of kept values."""
    keys = list(problem.values)
    best = None
    for kept in itertools.product((False, True), repeat=len(keys)):
        keep = dict(zip(keys, kept, strict=True))
        again = {key: False for key in keys}
        for i in reversed(range(len(keys))):
            wanted = problem.values[keys[i]].near or (i + 1 < len(keys) and again[keys[i + 1]])
            again[keys[i]] = wanted and not keep[keys[i]]
        held = 1000 + sum(problem.values[k].bytes for k in keys if keep[k])
        held += sum(AGAIN_AT_ONCE * problem.values[k].bytes for k in keys if again[k])
        seconds = sum(problem.units[k].seconds for k in keys if again[k])
        if held <= target and (best is None or seconds < best):
            best = seconds
    return best


@pytest.mark.parametrize("target", [1000, 1150, 1200, 1260, 1300, 1400, 1500, 1700, 2000])
def test_the_solver_finds_the_best(target: int) -> None:
    problem = chain([100, 200, 50, 300, 150, 80], [1.0, 4.0, 0.5, 3.0, 2.0, 0.2], {0, 2, 3, 5})
    found, expected = MemoryPlanner(problem).within(target), by_hand(problem, target)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.seconds == pytest.approx(expected)


def test_what_the_solver_writes_below_python_is_not_seen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def chatty(*args: Any, **options: Any) -> Any:
        os.write(1, b"HighsMipSolverData")
        return milp(*args, **options)

    monkeypatch.setattr("scipy.optimize.milp", chatty)
    print("before")
    MemoryPlanner(chain([100, 200], [1.0, 4.0], {0, 1})).least()
    print("after")
    assert capfd.readouterr().out == "before\nafter\n"


def test_nothing_is_made_again_across_two_borders() -> None:
    """A layer's output may be recomputed for the next layer from what its own layer keeps, and from nothing further."""
    values = {
        "l.*/out": Value("l.*/out", "l.*/out", bytes=800, count=4, far=True, alive={0: 800}, made_from={"l.*/in"}),
        "l.*/in": Value("l.*/in", "l.*/in", bytes=400, count=4, near=True, alive={0: 400}),
    }
    units = {
        "l.*/in": Unit("l.*/in", 1.0, far_reads={"l.*/out"}, stretches={0}),
        "l.*/out": Unit("l.*/out", 1.0, near_reads={"l.*/in"}, stretches={0}),
    }
    least = MemoryPlanner(Problem(values, units, [0])).least()
    assert least.again == ("l.*/out",)  # not both: then every layer would start from the first one's input


# ---- whole steps ----


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 8, 8, 16]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def classify(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def made(kind: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (16,))
    if kind == "convolutions":
        return Convolutions(), classify, (torch.randn(16, 3, 12, 12), labels)
    return Small(), loss_fn, batches(1)[0]


@pytest.mark.parametrize("worth", [0.0, 0.99], ids=["fastest", "kept"])
def test_plans_by_events_and_by_sums_begin_with_the_same(worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` on a laptop looks at events, `compile` at sums: without a tight budget they choose alike."""
    monkeypatch.setattr(frontier_module, "WORTH_SECONDS", worth)
    graph, apply = (
        prepared(Gelu(), lambda m, x: m(x).square().mean(), torch.randn(512, 256)),
        default_pipeline().carry_out,
    )
    ways = [frontier(graph, H200, apply, targets=6, exact=exact) for exact in (True, False)]
    assert ways[0][0].plan == ways[1][0].plan == Study(graph, H200, apply).quickest.plan
    assert bool(ways[0][0].plan.recompute) is (worth == 0.0)
    for points in ways:
        seconds = [point.seconds for point in points]
        assert seconds == sorted(seconds) and all(p.plan.predicted_seconds == p.seconds for p in points)


@pytest.mark.parametrize("kind", ["transformer", "convolutions"])
def test_peaks_fall_and_times_rise(kind: str) -> None:
    points = frontier(prepared(*made(kind)), H200, default_pipeline().carry_out, targets=6)
    peaks, seconds = [p.peak_bytes for p in points], [p.seconds for p in points]
    assert len(points) >= 2 and peaks == sorted(set(peaks), reverse=True) and seconds == sorted(set(seconds))
    for point in points:
        assert sum(point.breakdown.values()) == point.peak_bytes == point.plan.predicted_bytes
        assert set(point.plan.reasons) <= set(point.plan.recompute)
        assert point.change
    least = card_bytes(peaks[-1])
    assert too_small(points[-1], least, least - 1).smallest_bytes >= least


@pytest.mark.parametrize("kind", ["transformer", "convolutions"])
def test_the_leanest_plan_trains_the_same(kind: str) -> None:
    model, loss, batch = made(kind)
    plan = frontier(prepared(model, loss, batch), H200, default_pipeline().carry_out, targets=3)[-1].plan
    assert plan.recompute
    results = []
    for chosen in (Plan(), plan):
        torch.manual_seed(1)
        model, loss, batch = made(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = wholestep.compile(model, loss, optimizer, batch, plan=chosen, backend="interpret", cache=False)
        losses = [float(step(batch)) for _ in range(4)]
        results.append((losses, {name: value.clone() for name, value in model.state_dict().items()}))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


class Gelu(nn.Module):
    """Layers with a GELU written in Python: autograd keeps five tensors of it, all one fused kernel away from its input."""

    def __init__(self, layers: int = 3, width: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        y = 0.5 * y * (1 + torch.tanh(0.79788456 * (y + 0.044715 * y.pow(3))))
        return x + self.down(y)


@pytest.fixture(scope="module")
def gelu() -> TrainingGraph:
    return prepared(Gelu(), lambda model, x: model(x).square().mean(), torch.randn(512, 256))


def test_what_is_quicker_to_compute_than_to_keep_is_made_again(gelu: TrainingGraph) -> None:
    apply = default_pipeline().carry_out
    kept, plan = Study(gelu, H200, apply).kept, fastest(gelu, H200, apply)
    assert (
        plan.recompute and plan.predicted_seconds < 0.99 * kept.seconds and plan.predicted_bytes < 0.9 * kept.peak_bytes
    )
    assert not any("addmm" in key for key in plan.recompute), "matrix products are not quicker"
    assert not fastest(gelu, this_device("cpu"), apply).recompute, "a CPU computes no faster than it stores"


def test_the_sums_agree_with_the_events(gelu: TrainingGraph) -> None:
    study = Study(gelu, H200, default_pipeline().carry_out)
    for share in (0.8, 0.5, 0.2, 0.0):
        decision = study.planner.within(study.least.bytes + share * (study.first.bytes - study.least.bytes))
        assert decision is not None
        exact, summed = study.carried_out(decision), study.summed_up(decision)
        assert summed.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.08)
        assert summed.seconds == pytest.approx(exact.seconds, rel=0.05)


@pytest.mark.parametrize("kind", ["transformer", pytest.param("convolutions", marks=pytest.mark.slow)])
def test_a_smaller_budget_never_takes_more_and_is_never_faster(kind: str) -> None:
    graph, apply = prepared(*made(kind)), default_pipeline().carry_out
    whole = frontier(graph, H200, apply, targets=2)
    most, least = whole[0].peak_bytes, whole[-1].peak_bytes
    chosen = []
    for share in (1.1, 0.95, 0.8, 0.63, 0.5, 0.37, 0.2, 0.05):
        budget = int(least + share * (most - least))
        points = frontier(graph, H200, apply, targets=4, near=budget, exact=False)
        chosen.append(next((point for point in points if point.peak_bytes <= budget), points[-1]))
    for before, after in itertools.pairwise(chosen):
        assert after.peak_bytes <= before.peak_bytes and after.seconds >= before.seconds * (1 - 1e-3)
    assert chosen[-1].peak_bytes < chosen[0].peak_bytes


@pytest.mark.parametrize("count", [1, 1023, 1025, 5 * 2**20 + 1, 99 * 2**30 + 12345, 27_586_123_456])
def test_what_is_printed_can_be_asked_for(count: int) -> None:
    from wholestep.graph.bytes import parse_bytes, show_bytes

    assert parse_bytes(show_bytes(round_up(count)).replace(" B", "").replace(" ", "")) >= count
