"""Every model of the zoo, captured and run beside eager PyTorch.

By default each case is captured once and checked bit for bit on backend `interpret` for two SGD steps. The full matrix
(two optimizers, clipping, both backends, five steps, edge batches, eval mode) has the mark `zoo`: `make zoo`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.passes.away import Away
from tests.zoo.case import Built, OptimizerKind
from tests.zoo.models import ZOO

import wholestep
from wholestep.cost.devices import find_device
from wholestep.plan.budget import ForSpeed
from wholestep.plan.frontier import Study

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")


def verify(built: Built, kind: OptimizerKind, *, backend: str, steps: int, **options: Any) -> Any:
    return wholestep.verify(
        built.model, built.loss_fn, built.make_optimizer(kind), built.batches, steps=steps, backend=backend, **options
    )


def steps_of(case_name: str) -> list[Built]:
    """The builds to check: one, or two where two Steps share their modules."""
    built = ZOO[case_name].build()
    return [built] if built.partner is None else [built, built.partner]


@pytest.mark.parametrize("name", ZOO)
def test_two_sgd_steps_equal_eager_bit_for_bit(name: str) -> None:
    for built in steps_of(name):
        report = verify(built, "sgd", backend="interpret", steps=2, eval_too=False)
        assert report.rung == ZOO[name].expect_rung, str(report)
        assert report.ok and (report.bitwise or not ZOO[name].bitwise), str(report)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ZOO)
def test_the_step_says_how_it_was_captured(name: str) -> None:
    case, built = ZOO[name], ZOO[name].build()
    step = wholestep.compile(
        built.model, built.loss_fn, built.make_optimizer("sgd"), built.batches[0], backend="interpret"
    )
    loss = step(built.batches[1])
    if step.graph is None:  # some are tried again after one real step
        loss = step(built.batches[0])
    assert step.rung == case.expect_rung, step.explain()
    assert bool(step.falls) == (case.expect_rung != "whole step"), step.falls
    assert loss.isfinite() and not loss.requires_grad and step.captures <= 1


@pytest.mark.zoo
@pytest.mark.parametrize("backend", ["interpret", "inductor"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", ZOO)
def test_full_matrix(name: str, kind: OptimizerKind, backend: str) -> None:
    for built in steps_of(name):
        report = verify(built, kind, backend=backend, steps=5, edge_batches=built.edge_batches, clip_norm=1.0)
        assert report.ok, str(report)
        if backend == "interpret":
            assert report.bitwise or not ZOO[name].bitwise, str(report)


class Planned(ForSpeed):
    """The fastest or the leanest plan for an H200, on whatever runs the test."""

    leanest = False

    def plan(self, prepared: Any) -> wholestep.Plan:
        study = Study(prepared.graph, find_device("h200"), self.pipeline.carry_out)
        return (study.carried_out(study.least) if self.leanest else study.fastest).plan


@pytest.mark.zoo
@pytest.mark.parametrize("leanest", [False, True], ids=["fastest", "leanest"])
@pytest.mark.parametrize("name", ZOO)
def test_the_plans_of_a_gpu_change_no_bit(name: str, leanest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "leanest", leanest)
    monkeypatch.setattr("wholestep.compiler.ForSpeed", Planned)
    for built in steps_of(name):
        report = verify(built, "adamw", backend="interpret", steps=3, edge_batches=built.edge_batches, eval_too=False)
        assert report.ok and (report.bitwise or not ZOO[name].bitwise), str(report)


FEW = ("gpt2", "lstm", "inplace_buffers", "tied_frozen")
"""Of the zoo by default."""


def moved_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch, *, half_recomputed: bool) -> None:
    """Every value that can leave, and all optimizer state, on the host; half of the values recomputed or none."""
    monkeypatch.setattr(Away, "half_recomputed", half_recomputed)
    monkeypatch.setattr(Away, "moved", 0)
    monkeypatch.setattr("wholestep.compiler.ForSpeed", Away)
    monkeypatch.setattr("wholestep.passes.stream_state.MOST_BYTES", 10_000)
    for built in steps_of(name):
        report = verify(built, "adamw", backend="interpret", steps=2, eval_too=False, cache=False)
        assert report.ok and (report.bitwise or not ZOO[name].bitwise), str(report)
        assert Away.moved or report.rung != "whole step"


@pytest.mark.parametrize("name", FEW)
def test_what_leaves_the_card_changes_no_bit_in_a_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_to_the_host(name, monkeypatch, half_recomputed=False)


@pytest.mark.zoo
@pytest.mark.parametrize("half_recomputed", [False, True], ids=["moved", "half recomputed"])
@pytest.mark.parametrize("name", ZOO)
def test_what_leaves_the_card_changes_no_bit(name: str, half_recomputed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved_to_the_host(name, monkeypatch, half_recomputed=half_recomputed)


def eager_step(built: Built, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None
    loss = built.loss_fn(built.model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def without_dropout(built: Built) -> Built:
    """The same build with dropout off, so that plain eager PyTorch is the reference, without any mode of ours."""
    modules = built.model.values() if isinstance(built.model, dict) else [built.model]
    for module in [m for root in modules for m in root.modules() if isinstance(m, torch.nn.Dropout)]:
        module.p = 0.0
    return built


def test_two_steps_on_shared_modules_train_a_gan() -> None:
    ours, theirs = (without_dropout(ZOO["wgan_gp"].build()) for _ in range(2))
    steps = [
        wholestep.compile(b.model, b.loss_fn, b.make_optimizer("adamw"), b.batches[0], backend="interpret")
        for b in (ours, ours.partner)
        if b is not None
    ]
    optimizers = [b.make_optimizer("adamw") for b in (theirs, theirs.partner) if b is not None]
    for batch in ours.batches:
        for step, built, optimizer in zip(steps, (theirs, theirs.partner), optimizers):
            torch.testing.assert_close(step(batch), eager_step(built, optimizer, batch), rtol=1e-6, atol=1e-7)
    for name in ("generator", "critic"):
        mine, its = ours.model[name].state_dict(), theirs.model[name].state_dict()
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert [step.captures for step in steps] == [1, 1]


def test_a_teacher_in_the_closure_stays_live() -> None:
    ours, theirs = (without_dropout(ZOO["teacher_student"].build()) for _ in range(2))
    step = wholestep.compile(ours.model, ours.loss_fn, ours.make_optimizer("sgd"), ours.batches[0], backend="interpret")
    optimizer = theirs.make_optimizer("sgd")
    for batch in ours.batches:
        torch.testing.assert_close(step(batch), eager_step(theirs, optimizer, batch), rtol=1e-6, atol=1e-7)
        for built in (ours, theirs):
            assert built.between_steps is not None
            built.between_steps()
    assert step.captures == 1


def test_the_zoo_is_what_it_says() -> None:
    """Batches differ, losses are finite, and a build does not depend on what ran before it."""
    for case in ZOO.values():
        torch.manual_seed(123)
        built, again = case.build(), case.build()
        assert len(built.batches) >= 5 and built.edge_batches, case.name
        with warnings.catch_warnings(), torch.no_grad() if case.name != "wgan_gp" else torch.enable_grad():
            torch.manual_seed(1)
            losses = [built.loss_fn(built.model, b).item() for b in built.batches[:3]]
            torch.manual_seed(1)
            assert losses == [again.loss_fn(again.model, b).item() for b in again.batches[:3]], case.name
        assert len(set(losses)) == len(losses), case.name
