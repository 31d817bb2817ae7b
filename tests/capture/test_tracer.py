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
    ours = Replacing(REPLACED[how])
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
    assert torch.equal(ours.held, eager.held) and ours.held.dtype == eager.held.dtype
    assert step.rung == "eager" and "buffer:held is replaced" in step.explain()
