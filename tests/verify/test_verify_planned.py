"""verify(memory=..., plan=..., precision="fp16"): the step as a budget or a loss scale makes it, beside eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.passes.test_recompute import Small, batches, loss_fn

import wholestep
from wholestep.capture import loss_scale
from wholestep.capture.tracer import SCALE, Tracer
from wholestep.errors import BadOption, BudgetTooSmall


def report_of(layers: int = 2, steps: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Small(layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = wholestep.verify(
        model, loss_fn, optimizer, batches(2), steps=steps, seed=3, **{"backend": "interpret", **options}
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found


def values(report: Any) -> list[Any]:
    return [(row.step, row.kind, row.name, row.error, row.bitwise) for row in report.rows]


def test_a_step_within_a_budget_is_equal_to_eager_as_without() -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        report_of(memory="1KiB")
    planned = report_of(memory=int(1.02 * refused.value.smallest_bytes))
    assert planned.ok and any("recomputed in the backward pass" in note for note in planned.notes), planned.notes
    assert values(planned) == values(report_of())


def test_a_plan_is_carried_out() -> None:
    torch.manual_seed(0)
    model = Small(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(BudgetTooSmall) as refused:
        wholestep.compile(model, loss_fn, optimizer, batches(1)[0], memory="1KiB", backend="interpret", cache=False)
    least = refused.value.smallest_bytes
    step = wholestep.compile(model, loss_fn, optimizer, batches(1)[0], memory=least, backend="interpret", cache=False)
    plan = step.plan
    assert plan is not None and plan.recompute
    seen: list[wholestep.Plan] = []

    def watching(graph: Any, plan: wholestep.Plan) -> Any:
        seen.append(plan)
        return graph

    watched = wholestep.default_passes().insert_before("recompute", watching)
    report = report_of(plan=plan, passes=watched, eval_too=False)
    assert report.ok and values(report) == values(report_of(eval_too=False)) and set(map(id, seen)) == {id(plan)}


def test_a_wrong_apply_pass_is_named_under_a_budget() -> None:
    def spoils(graph: Any, plan: wholestep.Plan) -> Any:
        for node in graph.operations():
            if "native_layer_norm.default" in str(node.target):
                node.args = (*node.args[:-1], 0.5)
        graph.module.recompile()
        return graph

    report = report_of(memory="1GiB", passes=wholestep.default_passes().insert_after("recompute", spoils))
    assert not report.ok and report.first_departure.guilty_pass == "spoils"


def test_what_cannot_be_asked() -> None:
    for options, message in (
        ({"memory": "12GBs"}, "is not an amount of memory"),
        ({"memory": "auto"}, "memory='auto' on a CPU"),
        ({"memory": "1GiB", "plan": wholestep.Plan()}, "together with plan="),
        ({"plan": {}}, "give a wholestep.Plan"),
    ):
        with pytest.raises(BadOption, match=message):
            report_of(**options)


@pytest.mark.parametrize(("clip_norm", "accumulate"), [(None, 1), (0.5, 1), (0.5, 2)])
def test_fp16_is_equal_to_eager_with_unscaled_gradients(clip_norm: float | None, accumulate: int) -> None:
    report = report_of(precision="fp16", clip_norm=clip_norm, accumulate=accumulate)
    assert report.ok, str(report)
    assert {"loss", "gradient", "parameter", "state"} <= {row.kind for row in report.rows}


@pytest.mark.slow
def test_fp16_within_a_budget() -> None:
    with pytest.raises(BudgetTooSmall) as refused:
        report_of(precision="fp16", memory="1KiB")
    report = report_of(precision="fp16", memory=int(1.02 * refused.value.smallest_bytes))
    assert report.ok, str(report)


def test_a_scale_at_which_gradients_overflow_is_lowered_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**30)
    report = report_of(precision="fp16", steps=1, eval_too=False)
    assert report.ok, str(report)
    assert any("gradients overflow above a loss scale of" in note for note in report.notes), report.notes


def test_gradients_that_are_never_finite_are_compared_as_they_are() -> None:
    torch.manual_seed(0)
    model = Small(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def broken(model: Any, batch: Any) -> torch.Tensor:
        return loss_fn(model, batch) * float("inf")

    report = wholestep.verify(
        model, broken, optimizer, batches(1), steps=1, backend="interpret", precision="fp16", eval_too=False
    )
    assert report.ok, str(report)


def test_a_wrong_loss_scale_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update must divide by the scale: without that it is 65536 times too large."""
    kept = Tracer._clipped

    def forgetful(self: Tracer, values: Any, grads: Any) -> Any:
        norm, scale = kept(self, values, grads)
        return norm, scale * values[SCALE][0]

    with monkeypatch.context() as patched:
        patched.setattr(Tracer, "_clipped", forgetful)
        report = report_of(precision="fp16", steps=1, eval_too=False)
    assert not report.ok and any(row.kind in ("parameter", "state") and not row.ok for row in report.rows)
