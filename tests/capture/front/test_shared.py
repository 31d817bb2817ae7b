"""Results that are views of arguments: what an operator wrote to by `out=` is one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp
from torch import nn

BATCHES = class_batches(3)


def test_a_buffer_that_is_written_by_out() -> None:
    def make() -> Side:
        model = small_mlp()
        model.register_buffer("direction", torch.ones(6))

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                model.direction = F.normalize(model[0].weight.sum(1), dim=0, out=model.direction)
            return classify(model, batch) + (model[0].bias * model.direction.clone()).sum()

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES)
    assert torch.equal(twins.ours.model.direction, twins.theirs.model.direction)
    assert twins.step.rung == "whole step", twins.step.explain()
