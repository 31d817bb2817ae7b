"""Advice when memory runs out: the budget it names is one that `compile` accepts and keeps."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.passes.test_recompute import Small, batches, loss_fn

import wholestep
from wholestep.graph.bytes import parse_bytes
from wholestep.lower.footprint.predict import predict_profile
from wholestep.profile.memory import budget_fix as budget_fix_module
from wholestep.profile.memory.budget_fix import asked_for, budget_fix
from wholestep.profile.memory.oom import explain_oom, ranked_fixes


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Small(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return wholestep.compile(model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False, **options)


def test_the_budget_it_names_can_be_asked_for() -> None:
    graph = compiled().graph
    peak = predict_profile(graph).peak_bytes
    limit = int(0.85 * peak)
    text = explain_oom(graph, limit_bytes=limit)
    found = re.search(
        r'memory="([^"]+)" \(--memory\): .* \(fits\); \d+ values are recomputed in the backward pass', text
    )
    assert found is not None, text
    step = compiled(memory=found[1])
    assert step.plan.recompute and step.plan.predicted_bytes <= limit * 1.1


def test_without_a_limit_it_is_the_leanest_plan() -> None:
    graph = compiled().graph
    peak = predict_profile(graph).peak_bytes
    leanest, near = budget_fix(graph, peak), budget_fix(graph, peak, limit_bytes=int(0.95 * peak))
    assert leanest is not None and near is not None and leanest.exact
    assert leanest.peak_bytes < near.peak_bytes <= 0.95 * peak
    assert budget_fix(graph, peak, limit_bytes=2 * peak) is None, "everything fits: no budget is needed"


@pytest.mark.slow
def test_a_step_that_was_planned_is_told_of_a_smaller_budget_that_is_granted() -> None:
    step = compiled(memory=int(0.95 * predict_profile(compiled().graph).peak_bytes))
    peak = predict_profile(step.graph).peak_bytes
    fix = budget_fix(step.graph, peak)
    assert step.plan.recompute and fix is not None and fix.peak_bytes < 0.95 * peak
    named = re.search(r'memory="([^"]+)"', fix.name)
    assert named is not None
    leaner = compiled(memory=named[1])
    assert predict_profile(leaner.graph).peak_bytes <= parse_bytes(named[1]) < peak


def test_advice_does_not_fail_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(budget_fix_module, "frontier", full)
    graph = compiled().graph
    assert "recompute cheap activations" in explain_oom(graph)
    fixes = ranked_fixes(predict_profile(graph))
    assert any('memory="' in fix.how for fix in fixes if fix.name.startswith("recompute"))


def test_budgets_are_of_the_card_on_a_gpu() -> None:
    assert asked_for(3 * 2**30, on_gpu=False) == 'memory="3.0GiB"'
    assert asked_for(3 * 2**30, on_gpu=True) == 'memory="3.9GiB"', (
        "the CUDA context and the allocator's slack come on top"
    )
