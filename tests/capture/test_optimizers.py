"""torch's optimizers as functional nodes: every number read live, every flag honoured, state where torch keeps it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from wholestep.capture import optimizers
from wholestep.errors import WholestepWarning

BATCHES = class_batches()
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.01, maximize=True, betas=(0.8, 0.95), eps=1e-6),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam, decoupled": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
}


def sides(make: Make) -> Callable[[], Side]:
    def build() -> Side:
        model = small_mlp()
        return Side(model, make(model.parameters()), classify)

    return build


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_equal_torch(name: str) -> None:
    """Losses, parameters and the whole optimizer.state_dict() after every step; fused rounds differently in places."""
    twins = Twins(sides(OPTIMIZERS[name]), BATCHES[0], clip_norm=0.5, check="off")
    twins.train(BATCHES, tolerance=1e-6)
    assert twins.step.captures == 1


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_bitwise_without_clipping(name: str) -> None:
    Twins(sides(OPTIMIZERS[name]), BATCHES[0], check="off").train(BATCHES[:4], tolerance=0.0)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    weights, biases = [p for p in every if p.dim() > 1], [p for p in every if p.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.5, "lr": 0.02},
            {"params": biases, "weight_decay": 0.0, "betas": (0.5, 0.9)},
        ],
        lr=0.001,
    )


def test_groups_with_their_own_numbers() -> None:
    Twins(sides(grouped), BATCHES[0], clip_norm=0.3, check="off").train(BATCHES, tolerance=1e-6)


def with_scheduler(make: Make, schedule: Callable[[Any], Any]) -> Callable[[], Side]:
    def build() -> Side:
        side = sides(make)()
        side.extra = schedule(side.optimizer)
        return side

    return build


SCHEDULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "OneCycleLR, betas": ("adamw", lambda o: OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=True)),
    "OneCycleLR, momentum": ("momentum", lambda o: OneCycleLR(o, 0.5, total_steps=8, cycle_momentum=True)),
    "LambdaLR": ("sgd", lambda o: LambdaLR(o, lambda i: 1.0 / (1 + i))),
    "StepLR": ("adam", lambda o: StepLR(o, 2, 0.1)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_read_live_and_stay_quiet(name: str) -> None:
    """Guards: numbers enter as HYPER inputs; `optimizer._opt_called` is set, else the scheduler warns of its order."""
    kind, schedule = SCHEDULES[name]
    twins = Twins(with_scheduler(OPTIMIZERS[kind], schedule), BATCHES[0], check="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins.train(BATCHES, after=lambda side: side.extra.step(), tolerance=1e-7)
    assert twins.step.captures == 1


def test_a_scheduler_would_warn_without_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(with_scheduler(OPTIMIZERS["sgd"], SCHEDULES["StepLR"][1]), BATCHES[0], check="off")
    twins.step(BATCHES[0])
    twins.ours.optimizer._opt_called = False
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        twins.ours.extra.step()


def test_numbers_fixed_at_capture_would_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard taken out: the numbers of the first step for ever."""
    twins = Twins(with_scheduler(OPTIMIZERS["adamw"], SCHEDULES["OneCycleLR, betas"][1]), BATCHES[0], check="off")
    first = twins.step._latest.binding
    first.refresh()
    numbers = first.numbers()
    monkeypatch.setattr(type(first), "numbers", lambda self: numbers)
    ours, theirs = twins.losses(BATCHES, after=lambda side: side.extra.step())
    assert ours[-1] != pytest.approx(theirs[-1], rel=1e-3)


def test_plateau_and_changes_by_hand() -> None:
    def change(side: Side) -> None:
        group = side.optimizer.param_groups[0]
        group["lr"] *= 0.5
        group["weight_decay"] += 0.05
        side.extra.step(1.0)

    twins = Twins(
        with_scheduler(OPTIMIZERS["adamw"], lambda o: ReduceLROnPlateau(o, patience=1)), BATCHES[0], check="off"
    )
    twins.train(BATCHES, after=change)
    assert twins.step.captures == 1


def test_a_learning_rate_that_is_a_tensor() -> None:
    twins = Twins(sides(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False)), BATCHES[0], check="off")
    twins.train(BATCHES[:3], after=lambda side: side.optimizer.param_groups[0]["lr"].mul_(0.5), tolerance=1e-6)


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adadelta(p, lr=0.1), lambda p: torch.optim.RAdam(p, lr=0.01)])
def test_other_optimizers_step_in_eager(make: Make) -> None:
    with pytest.warns(WholestepWarning, match="forward and backward are captured, the update runs in eager PyTorch"):
        twins = Twins(sides(make), BATCHES[0], clip_norm=0.4)
    twins.train(BATCHES[:4])
    assert twins.step.rung == "whole step"
    assert all(p.grad is None for p in twins.ours.model.parameters())


def test_an_optimizer_with_step_hooks_steps_in_eager() -> None:
    calls: list[int] = []

    def build() -> Side:
        side = sides(OPTIMIZERS["adamw"])()
        side.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
        return side

    with pytest.warns(WholestepWarning, match="step hooks"):
        twins = Twins(build, BATCHES[0])
    twins.train(BATCHES[:2])
    assert len(calls) == 4


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    class Halved(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    with pytest.warns(WholestepWarning, match="Halved is not one of"):
        twins = Twins(sides(lambda p: Halved(p, lr=0.1)), BATCHES[0])
    twins.train(BATCHES[:2])


def test_differentiable_is_left_to_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], differentiable=True)
    assert "differentiable" in (optimizers.supported(optimizer) or "")


def test_one_update_node_per_group() -> None:
    model = small_mlp()
    step = interpreted(Side(model, grouped(model.parameters()), classify), BATCHES[0])
    updates = [n for n in step.graph.operations() if n.target is torch.ops.ws.adamw.default]
    assert len(updates) == 2
