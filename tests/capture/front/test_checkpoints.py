"""What eager's second forward of an activation checkpoint writes: written twice by a whole step too, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, interpreted
from torch import nn
from torch.utils.checkpoint import checkpoint

from wholestep.errors import WholestepWarning

BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]


class Shared(nn.Module):
    """One norm in two checkpoints and outside of them: the order in which it counts matters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.5), nn.Linear(6, 3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, checkpoint(self.part, x, use_reentrant=False) * 2 + 1, use_reentrant=False)
        return self.b(self.norm(x))


class Nested(Shared):
    def outer(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(checkpoint(self.part, x, use_reentrant=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.outer, x, use_reentrant=False)


class Codebook(Shared):
    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.norm.running_mean.mul_(0.5).add_(1.0)
        return self.a(x)


def plain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), *layers, nn.Linear(5, 3))


def in_a_checkpoint(model: Any, batch: Any) -> torch.Tensor:
    return checkpoint(model, batch, use_reentrant=False).square().mean()


def in_autocast(model: Any, batch: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return in_a_checkpoint(model, batch).float()


def of_a_teacher(model: Any, batch: Any) -> torch.Tensor:
    """Where nothing is differentiated, nothing is computed again."""
    with torch.no_grad():
        target = checkpoint(model, batch, use_reentrant=False)
    return F.mse_loss(model(batch), target + 1)


def side(make: Callable[[], nn.Module], loss_fn: Any) -> Side:
    torch.manual_seed(0)
    model = make()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


@pytest.mark.parametrize("check", ["off", "first"])
@pytest.mark.parametrize("loss_fn", [in_a_checkpoint, in_autocast, of_a_teacher])
def test_statistics_count_a_batch_as_often_as_in_eager(loss_fn: Any, check: str) -> None:
    require_equal(Twins(lambda: side(plain, loss_fn), BATCHES[0], check=check))


def test_in_the_order_of_the_backward() -> None:
    require_equal(Twins(lambda: side(Shared, lambda m, b: m(b).square().mean()), BATCHES[0], check="off"))


def require_equal(twins: Twins) -> None:
    ours, theirs = twins.losses(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()
    assert ours == pytest.approx(theirs, rel=1e-2)
    expected = dict(twins.theirs.model.named_buffers())
    for name, buffer in twins.ours.model.named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("make", "loss_fn", "told"),
    [
        (Nested, lambda m, b: m(b).square().mean(), "activation checkpoint"),
        (Codebook, lambda m, b: m(b).square().mean(), "mul_ reads or writes what an activation checkpoint writes to"),
        (lambda: plain(nn.Dropout(0.5)), in_a_checkpoint, "and dropout, which may draw random numbers"),
    ],
)
def test_the_rest_is_refused_by_name(make: Any, loss_fn: Any, told: str) -> None:
    with pytest.warns(WholestepWarning, match=told):
        step = interpreted(side(make, loss_fn), BATCHES[0])
        for batch in BATCHES:
            step(batch)
    assert step.rung == "eager"
