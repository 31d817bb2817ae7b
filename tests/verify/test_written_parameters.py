"""A loss that writes to its own parameters in the forward: references leave them alone, and start where the step starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins
from torch import nn

import wholestep
from wholestep.capture.subject import make_subject
from wholestep.verify.reference import reference_gradients


class Shrinking(nn.Module):
    """Not the same when it is done twice."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return self.head(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))


def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


NUMBERS = [torch.randn(4, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]
PLACES = [torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(n)) for n in range(3)]
BOTH = pytest.mark.parametrize("make, batches", [(Shrinking, NUMBERS), (Normed, PLACES)], ids=["half", "max_norm"])


@BOTH
def test_the_first_step_is_eagers(make: Any, batches: list[torch.Tensor]) -> None:
    def side() -> Side:
        model = make()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(side, batches[0])
    twins.train(batches)
    assert twins.step.rung == "whole step"


@pytest.mark.parametrize("accumulate", [1, 2])
@BOTH
def test_verify_starts_where_the_step_starts(make: Any, batches: list[torch.Tensor], accumulate: int) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = batches if accumulate == 1 else [[batch, batch] for batch in batches]
    report = wholestep.verify(model, loss_fn, optimizer, given, steps=2, accumulate=accumulate, backend="interpret")
    assert report.ok, report
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_reference_touches_nothing_live() -> None:
    model = Shrinking()
    before = model.head.weight.detach().clone()
    found = reference_gradients(
        make_subject(model, loss_fn, None), NUMBERS[0], 1, 0, 0, num_sites=0, written=("head.weight",)
    )
    assert torch.equal(model.head.weight, before) and torch.equal(found.written["head.weight"], before / 2)
