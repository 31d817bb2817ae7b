"""The function that is traced, where no guards are asked for and the user's own code runs once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep

REPLACED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "shape": lambda held, x: torch.cat([held, x[:1]]),
    "dtype": lambda held, x: held.double(),
    "size by data": lambda held, x: torch.zeros(1) + torch.bincount((x > 0).long()),
}


class Replacing(nn.Module):
    def __init__(self, replaced: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.held, self.replaced = nn.Parameter(torch.ones(3)), nn.Buffer(torch.zeros(1)), replaced

    def forward(self, x: Tensor) -> Tensor:
        loss = (self.weight * x).sum() + self.held.sum()
        self.held = self.replaced(self.held, x)
        return loss


@pytest.mark.parametrize("how", REPLACED)
def test_a_buffer_that_becomes_another_kind_of_tensor(how: str) -> None:
    assert "buffer:held is replaced" in trained(Replacing(REPLACED[how]))


class GivenMemory(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.held, self.name = nn.Parameter(torch.ones(3)), nn.Buffer(torch.ones(1)), name

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.name == "batch" else getattr(self, self.name)
        given.data = given.data * 0.5
        return (self.weight * x).sum() + self.held.sum()


@pytest.mark.parametrize("name", ["weight", "held", "batch"])
def test_other_memory_is_told(name: str) -> None:
    """No operator does it, so that a trace would go on with what was there before."""
    assert f"the loss gives {name} other memory" in trained(GivenMemory(name))


def trained(ours: nn.Module) -> str:
    """Three steps in eager, as they should be; why."""
    eager = copy.deepcopy(ours)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    options = {"backend": "interpret", "check": "off", "cache": False, "guards": "off"}
    step = wholestep.compile(ours, lambda m, b: m(b), optimizer, torch.ones(3), **options)
    for number in range(3):
        loss = step(torch.full((3,), float(number)))
        other.zero_grad()
        expected = eager(torch.full((3,), float(number)))
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
    for (name, mine), theirs in zip(ours.state_dict().items(), eager.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype, name
    assert step.rung == "eager"
    return step.explain()
