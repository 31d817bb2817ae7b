"""What a loss writes to what its own update reads, or to a class whose objects it reads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import class_batches, classify, small_mlp
from torch import nn

import wholestep
from wholestep.errors import WholestepWarning

BATCH = class_batches(1)[0]


class Counting:
    steps = 0


def count(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    Counting.steps += 1
    return Counting().steps


def set_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def add_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})


def give_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


LEVEL = 1.0


def write_through_a_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    sys.modules[__name__].__dict__["LEVEL"] = LEVEL * 2
    return LEVEL


def read_through_a_descriptor(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    SLOTTED.level += 1.0
    return Slotted.level.__get__(SLOTTED)


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 1.0


SLOTTED = Slotted()


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (count, "Counting.steps is written|builtin operator `setattr`"),
        (set_rate, "groups of the optimizer"),
        (add_group, "groups of the optimizer"),
        (give_gradient, "a gradient is given"),
        (write_through_a_table, "module's __dict__ is written to"),
        (read_through_a_descriptor, "read through a descriptor"),
    ],
)
def test_it_is_refused_by_name(act: Callable[..., Any], told: str) -> None:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        act(model, optimizer)
        return classify(model, batch)

    step = wholestep.compile(model, loss_fn, optimizer, BATCH, backend="interpret", cache=False)
    assert optimizer.param_groups[0]["lr"] == 0.1
    with pytest.warns(WholestepWarning, match=told):
        for _ in range(2):
            step(BATCH)
    assert step.rung == "eager"


def test_gradients_may_be_cleared_and_groups_read() -> None:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        return classify(model, batch) * optimizer.param_groups[0]["lr"]

    step = wholestep.compile(model, loss_fn, optimizer, BATCH, backend="interpret", cache=False)
    step(BATCH)
    assert step.rung == "whole step", step.explain()
