"""What Dynamo does otherwise from version to version of torch: the same here, on each."""

from __future__ import annotations

import types
from typing import Any

import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp

BATCHES = class_batches(4)


def trained(loss_fn: Any, extra: Any = None) -> Side:
    model = small_mlp()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, extra)


def test_the_module_of_a_weights_class_is_a_text() -> None:
    """As libraries of adapters ask whether a weight is quantised."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        plain = type(model[0].weight).__module__.startswith("torch.nn")
        return classify(model, batch) * (1.0 if plain and type(batch[0]).__name__ == "Tensor" else 2.0)

    twins = Twins(lambda: trained(loss), BATCHES[0], check="off")
    twins.train(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_a_class_of_an_object_in_a_closure_is_guarded() -> None:
    def side() -> Side:
        config = types.SimpleNamespace(kinds=[torch.nn.Tanh, torch.nn.ReLU])

        def loss(model: Any, batch: Any) -> torch.Tensor:
            scores = model(batch[0])
            bent = (
                scores.tanh()
                if config.kinds[1] is torch.nn.Tanh or config.kinds[0] is config.kinds[1]
                else scores.relu()
            )
            return (bent - torch.nn.functional.one_hot(batch[1], 3)).square().mean()

        return trained(loss, config)

    twins = Twins(side, BATCHES[0], check="off")
    for batch, kind in zip(BATCHES, (torch.nn.ReLU, torch.nn.Tanh, torch.nn.ReLU, torch.nn.Tanh)):
        twins.both(lambda side, kind=kind: side.extra.kinds.__setitem__(1, kind))
        twins.train([batch])
    assert twins.step.rung == "whole step", twins.step.explain()


def test_a_range_is_handed_on_entry_by_entry() -> None:
    """`f(*range(2, 5))` is f(2, 3, 4); torch's own Dynamo makes f(2, 5, 1) of it."""

    def weighed(*numbers: int) -> int:
        return sum(place * number for place, number in enumerate(numbers, 1))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0].permute(*range(batch[0].dim() - 1, -1, -1)).T
        return (
            classify(model, (x, *batch[1:]))
            * weighed(*range(2, 5))
            * max(*range(3, 10, 4))
            * torch.ones(*range(2, 4)).sum()
        )

    twins = Twins(lambda: trained(loss), BATCHES[0], check="off")
    twins.train(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()
