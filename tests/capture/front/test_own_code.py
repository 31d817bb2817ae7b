"""Code of classes and enums that Dynamo would run once, or pass over."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch
from tests.runtime.twins import class_batches, classify, small_mlp

import wholestep
from wholestep.errors import WholestepWarning

NOW = {"weight": 1.0}


class Registry(type):
    def __len__(cls) -> int:
        return int(NOW["weight"])


class Known(metaclass=Registry):
    pass


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2

    def __bool__(self) -> bool:
        return NOW["weight"] < 3

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = enum.Enum.__hash__


def compiled(weight: Any) -> Any:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wholestep.compile(
        model, lambda m, b: classify(m, b) * weight(), optimizer, class_batches(1)[0], backend="interpret", cache=False
    )


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(lambda: len(Known), "Registry.__len__"), (lambda: 2.0 if Mode.SLOW else 1.0, "Mode.__bool__")],
)
def test_code_of_a_class_is_refused_by_name(weight: Any, reason: str) -> None:
    with pytest.warns(WholestepWarning, match=reason):
        step = compiled(weight)
        for batch in class_batches(2):
            step(batch)
    assert step.rung == "eager"


def test_what_reads_nothing_that_changes_is_captured() -> None:
    assert compiled(lambda: 2.0 if Mode.SLOW == Mode.FAST else 1.0).rung == "whole step"


def test_a_function_marked_as_constant_is_read_at_every_step() -> None:
    held = {"weight": 1.0}

    @torch.compiler.assume_constant_result
    def weight() -> float:
        return held["weight"]

    step, batch = compiled(weight), class_batches(1)[0]
    before = float(step(batch))
    held["weight"] = 100.0
    assert step.rung == "whole step" and float(step(batch)) > 10 * before
