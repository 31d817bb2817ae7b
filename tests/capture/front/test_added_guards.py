"""Guards that Dynamo has and skips: attributes of what it takes for immutable, or knows by its keys alone."""

from __future__ import annotations

import builtins
import enum
import weakref
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn

BATCHES = class_batches(4)


class Phase(enum.IntEnum):
    WARM = 1


class Number(float):
    pass


class Settings(dict):
    """Its keys are its attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__ = self


def held_by_a_layer(make: Any) -> Side:
    model = small_mlp()
    model[0].held = make()
    model[0].held.scale = 1.0

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch) * model[0].held.scale

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, model[0].held)


@pytest.mark.parametrize("make", [lambda: Phase.WARM, lambda: Number(2.0), lambda: Settings(other=1)])
def test_attributes_of_what_a_module_holds_are_guarded(make: Any) -> None:
    twins = Twins(lambda: held_by_a_layer(make), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    for held in (twins.ours.extra, twins.theirs.extra):
        held.scale = 0.1
    twins.train(BATCHES[2:])
    assert twins.step.captures == 2 and twins.step.rung == "whole step"


def test_nothing_is_written_to_parameters() -> None:
    """Dynamo marks tensors whose address does not change, for recorded CUDA graphs."""
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch) * optimizer.param_groups[0]["lr"]

    interpreted(Side(model, optimizer, loss_fn), BATCHES[0], check="off")
    assert not any(vars(p) for p in model.parameters())


def of_an_unknown_module() -> Side:
    table = {"__name__": __name__, "__builtins__": builtins, "WEIGHT": 1.0}
    exec("def weigh(x):\n    return x * WEIGHT", table)
    weigh: Any = table["weigh"]
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Side(model, optimizer, lambda m, b: weigh(classify(m, b)), lambda: table.update(WEIGHT=0.1))


def of_a_weak_dictionary() -> Side:
    weights: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Side(
        model, optimizer, lambda m, b: classify(m, b) * weights.get(m[0], 1.0), lambda: weights.update({model[0]: 0.1})
    )


@pytest.mark.parametrize("make", [of_an_unknown_module, of_a_weak_dictionary])
def test_what_is_found_by_no_name_is_guarded(make: Any) -> None:
    """Variables of a function that are not those of the module of that name; keys that are made while looking."""
    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    for side in (twins.ours, twins.theirs):
        side.extra()
    twins.train(BATCHES[2:])
    assert twins.step.captures == 2 and twins.step.rung == "whole step"
