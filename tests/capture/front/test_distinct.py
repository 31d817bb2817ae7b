"""Objects that were compared, were two, and become one."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp

BATCHES = class_batches(5)
COMPARED = {
    "is": lambda held: held.one is held.other,
    "is not": lambda held: held.one is not held.other,
    "==": lambda held: held.one == held.other,
    "in": lambda held: held.one in [held.other],
}


class Part:
    pass


@pytest.mark.parametrize("how", COMPARED)
def test_captured_anew_once_where_two_objects_become_one_and_once_where_it_is_named(how: str) -> None:
    def make() -> Side:
        model, held = small_mlp(), types.SimpleNamespace(one=Part(), other=Part())
        held.first = held.one

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            return classify(model, batch) * (2.0 if COMPARED[how](held) else 1.0)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, held)

    twins = Twins(make, BATCHES[0], check="off")
    second = [side.extra.other for side in (twins.ours, twins.theirs)]
    for i, batch in enumerate(BATCHES):
        for side, other in zip((twins.ours, twins.theirs), second):
            side.extra.other = side.extra.one if i in (2, 4) else other
        twins.train([batch])
    assert twins.step.rung == "whole step" and twins.step.captures == 2, twins.step.explain()
    assert "held.other is not" in str(twins.step.explain()) or "held.one is not" in str(twins.step.explain())


def test_other_objects_in_their_places_are_two_still() -> None:
    """Only who is whom is asked: objects that are replaced cost no capture by that."""

    def make() -> Side:
        model, held = small_mlp(), types.SimpleNamespace(one=[], other=[])

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            return classify(model, batch) * (2.0 if held.one is held.other else 1.0)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, held)

    twins = Twins(make, BATCHES[0], check="off")
    for batch in BATCHES:
        for side in (twins.ours, twins.theirs):
            side.extra.other = []
        twins.train([batch])
    assert twins.step.captures == 1, twins.step.explain()
