"""compile(memory=...): budgets are kept, a smaller one never takes more, and one too small names the smallest."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.passes.test_recompute import Small, batches, loss_fn
from tests.plan.test_frontier import Gelu
from torch import nn

import wholestep
from wholestep.budget import ForSpeed
from wholestep.capture.dry import dry_capture
from wholestep.cost import find_device
from wholestep.cost.node_costs import is_recomputed
from wholestep.errors import BadOption, BudgetTooSmall
from wholestep.passes.pipeline import Pipeline, default_pipeline, name_of
from wholestep.passes.update_early import update_early
from wholestep.report.memory import memory_profile


def compiled(memory: Any, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Small(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = batches(1)[0]
    step = wholestep.compile(
        model, loss_fn, optimizer, batch, memory=memory, backend="interpret", cache=False, seed=3, **options
    )
    return step, model, optimizer


def peak(step: Any, model: Any, optimizer: Any) -> int:
    batch = batches(1)[0]
    step(batch)
    profile = memory_profile(step, model=model, optimizer=optimizer, batch=batch)
    return profile.peak_bytes - profile.at_peak["other"]  # what earlier tests left


@pytest.fixture(scope="module")
def free() -> int:
    return peak(*compiled(None))


def test_budgets_are_kept_and_smaller_ones_never_take_more(free: int) -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        compiled(free // 4)
    least = refused.value.smallest_bytes
    assert free // 4 < least < 0.8 * free
    assert f"ask for {least / 2**20:.1f} MiB" in str(refused.value)
    peaks = []
    for share in (1.0, 0.66, 0.33, 0.0):
        budget = int(least + share * (free * 1.02 - least))
        peaks.append(peak(*compiled(budget)))
        assert peaks[-1] <= budget
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.8 * peaks[0]


def test_the_step_says_what_it_does_and_trains_the_same(free: int) -> None:
    step, _, _ = compiled(int(0.8 * free))
    assert step.plan.recompute and step.plan.budget_bytes == int(0.8 * free)
    told = step.explain()
    assert "memory: " in told and "made again in the backward pass" in told
    plain, _, _ = compiled(None)
    for batch in batches(3):
        assert float(step(batch)) == float(plain(batch))


def test_a_plan_is_carried_out_as_given(free: int) -> None:
    step, model, optimizer = compiled(int(0.7 * free))
    again, *rest = compiled(None, plan=step.plan)
    assert peak(again, *rest) == peak(step, model, optimizer) and again.plan == step.plan


def test_every_size_gets_its_own_plan(free: int) -> None:
    step, _, _ = compiled(int(0.8 * free))
    first = step.plan
    half = {name: tensor[:2] for name, tensor in batches(1)[0].items()}
    step(half)
    assert step.plan is not first and not step.plan.recompute


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "12GBs"}, "is not an amount of memory"),
        ({"memory": "auto"}, "memory='auto' on a CPU"),
        ({"memory": "8MiB", "dynamic": True}, "together with dynamic=True"),
        ({"memory": "8MiB", "plan": wholestep.Plan()}, "together with plan="),
        ({"memory": None, "plan": {}}, "give a wholestep.Plan"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        compiled(**options)


def test_a_plan_sets_the_precision_of_modules() -> None:
    batch = batches(1)[0]
    plain, _, _ = compiled(None, precision="bf16")
    mixed, _, _ = compiled(None, precision="bf16", plan=wholestep.Plan(precision={"head": "fp32", "blocks.1": "fp32"}))
    dtypes: dict[str, set[str]] = {}
    for node in mixed.graph.operations():
        if "mm" in str(node.target):
            dtypes.setdefault(node.meta["custom"]["module"].split(".qkv")[0], set()).add(str(node.meta["val"].dtype))
    assert dtypes["head"] == {"torch.float32"} and dtypes["blocks.1"] == {"torch.float32"}
    assert dtypes["blocks.0"] == {"torch.bfloat16"} == dtypes["blocks.2"]
    assert float(mixed(batch)) == pytest.approx(float(plain(batch)), rel=2e-2)
    with pytest.raises(BadOption, match="precision='fp16'"):
        compiled(None, precision="fp16", plan=wholestep.Plan(precision={"head": "fp32"}))


def early() -> Pipeline:
    """Updates of any size move, also those of a tiny model."""
    whole = default_pipeline()
    small: Any = functools.partial(update_early, min_bytes=1)
    return Pipeline(whole.passes, [small if name_of(one) == "update_early" else one for one in whole.apply])


def test_a_plan_decides_about_early_updates() -> None:
    def updates(plan: wholestep.Plan | None) -> int:
        step, _, _ = compiled(None, plan=plan, passes=early())
        return sum(str(node.target).startswith("ws.adamw") for node in step.graph.operations())

    assert updates(None) == updates(wholestep.Plan()) > 1 == updates(wholestep.Plan(early_update=False))


# ---- without a budget ----


def test_without_a_budget_the_fastest_plan_is_for_compiled_code_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.budget.this_device", lambda kind: find_device("h200"))
    made = {}
    for backend, kind in (("inductor", "cuda"), ("interpret", "cuda"), ("inductor", "cpu")):
        model = Gelu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        captured = dry_capture(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(512, 256), device=kind)
        lines = ForSpeed(default_pipeline(), backend, torch.device(kind)).run_on(captured)
        again = sum(is_recomputed(node) for node in captured.graph.operations())
        made[backend, kind] = (bool(captured.plan.recompute), again > 0, "quicker to make again than to keep" in lines[-1])
    assert made["inductor", "cuda"] == (True, True, True)
    assert made["interpret", "cuda"] == made["inductor", "cpu"] == (False, False, False)


def test_sizes_that_are_symbolic_are_planned_as_they_were_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans go by names, so one for the size of the example is good for others."""
    made = []

    class Forced(ForSpeed):
        def __init__(self, pipeline: Any, backend: str, device: torch.device) -> None:
            super().__init__(pipeline, "inductor", torch.device("cuda"))
            made.append(self)

    def trained(plan: wholestep.Plan | None) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        model = Gelu()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wholestep.compile(
            model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(512, 256), dynamic=True, plan=plan,
            backend="interpret", cache=False,
        )  # fmt: skip
        return step, [float(step(torch.randn(rows, 256))) for rows in (512, 8, 33)]

    monkeypatch.setattr("wholestep.budget.this_device", lambda kind: find_device("h200"))
    monkeypatch.setattr("wholestep.api.ForSpeed", Forced)
    step, losses = trained(None)
    assert step.captures == 1 and step.plan.recompute and "quicker to make again" in made[-1].said
    assert losses == trained(wholestep.Plan())[1]


def test_a_step_does_not_fail_for_want_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise KeyError("add_3")

    monkeypatch.setattr("wholestep.budget.this_device", lambda kind: find_device("h200"))
    monkeypatch.setattr("wholestep.budget.fastest", fails)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    captured = dry_capture(model, lambda m, x: m(x).square().mean(), optimizer, torch.randn(2, 4))
    lines = ForSpeed(default_pipeline(), "inductor", torch.device("cuda")).run_on(captured)
    assert captured.plan == wholestep.Plan() and "everything is kept" in lines[-1] and "KeyError: 'add_3'" in lines[-1]


def test_a_plan_that_keeps_everything_can_be_asked_for() -> None:
    assert compiled(None, plan=wholestep.Plan())[0].plan == compiled(None)[0].plan == wholestep.Plan()


@pytest.mark.gpu
def test_the_fastest_plan_trains_the_same_on_a_gpu() -> None:
    losses = []
    for plan in (None, wholestep.Plan()):
        torch.manual_seed(0)
        model = Small(layers=4).cuda()
        data = [{name: tensor.cuda() for name, tensor in batch.items()} for batch in batches(6)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = wholestep.compile(model, loss_fn, optimizer, data[0], plan=plan, cache=False, seed=3)
        losses.append([float(step(batch)) for batch in data])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
