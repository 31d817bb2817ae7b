"""Writes through views of which torch's functionalization does not know the way back: exact, or left to eager by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep
from wholestep.runtime.step import Step

Write = Callable[[Tensor], object]
EXACT: dict[str, Write] = {
    "expanded to what it is": lambda x: x.expand(2, 6)[:, :1].fill_(-torch.inf),
    "expanded twice": lambda x: x.expand_as(x).expand(2, 6)[..., :2].add_(1),
    "a rounding": lambda x: x.expand(2, 6).masked_fill_(x > 1, 0.1),
    "windows side by side": lambda x: x.unfold(1, 2, 2)[..., 0].mul_(2),
    "strided": lambda x: x.as_strided((2, 2), (6, 3), 1).mul_(2),
    "a diagonal": lambda x: x.diagonal(1).mul_(2),
    "a row of the transposed": lambda x: x.t()[2].zero_(),
}
LOST: dict[str, tuple[str, Write]] = {
    "repeated": ("repeats it", lambda x: x[:1].expand(3, 6)[0].fill_(0.1)),
    "overlapping windows": ("windows that overlap", lambda x: x.unfold(1, 3, 1)[:, 0].mul_(2)),
    "windows with gaps": ("leave something out", lambda x: x.unfold(1, 2, 3).mul_(2)),
    "windows that do not reach the end": ("leave something out", lambda x: x.unfold(1, 4, 4).mul_(2)),
    "a place twice": ("shows a place of it twice", lambda x: x.as_strided((3, 2), (1, 1))[1].mul_(2)),
}


def trained(write: Write, guards: str) -> Step:
    """Three steps as eager PyTorch takes them, bit by bit, where what is written holds infinities and large numbers."""

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        scores, mask = model(batch).clone(), torch.full((2, 6), 1e8)
        mask[0] = -torch.inf
        write(scores)
        write(mask)
        return scores.clamp(-9, 9).square().mean() + (mask.clamp(-2, 2) * scores.clamp(-9, 9)).sum()

    torch.manual_seed(0)
    ours, batch = nn.Linear(4, 6), torch.randn(2, 4)
    eager = copy.deepcopy(ours)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    options = {"backend": "interpret", "check": "off", "cache": False, "guards": guards}
    step = wholestep.compile(ours, loss_fn, optimizer, batch, **options)
    for _ in range(3):
        loss = step(batch)
        other.zero_grad()
        expected = loss_fn(eager, batch)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach()) and loss.isfinite()
    assert all(map(torch.equal, ours.parameters(), eager.parameters()))
    return step


@pytest.mark.parametrize("guards", ["dynamo", "off"])
@pytest.mark.parametrize("name", EXACT)
def test_whole_steps(name: str, guards: str) -> None:
    step = trained(EXACT[name], guards)
    assert step.rung == "whole step", step.explain()


@pytest.mark.parametrize("name", LOST)
def test_refused_by_name(name: str) -> None:
    why, write = LOST[name]
    step = trained(write, "dynamo")
    assert step.rung == "eager"
    assert why in step.explain()
