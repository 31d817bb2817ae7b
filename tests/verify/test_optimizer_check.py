"""The update, compared with what torch's own optimizer makes of our gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wholestep


def test_gradients_lie_as_autograd_leaves_them() -> None:
    """A gradient has the memory order of a transposed batch; sums over rows, which Adafactor keeps, round by it."""

    def loss_fn(model: nn.Linear, batch: Tensor) -> Tensor:
        return (batch + model.weight).tanh().square().sum()

    torch.manual_seed(0)
    model, batch = nn.Linear(67, 33, bias=False), torch.randn(67, 33).t()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    report = wholestep.verify(model, loss_fn, optimizer, batch, steps=2, backend="interpret")
    assert report.ok, report
