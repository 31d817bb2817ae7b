"""Gradients of what is not trained, asked for within the loss: whole steps, and the caller's tensors as eager leaves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins
from torch import nn
from torch.autograd import Variable, grad


def batches() -> list[Any]:
    source = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(rows, 3, generator=source)} for rows in (4, 4, 1)]


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (found,) = grad(model(x).sum(), x, create_graph=True)
    return found.square().mean()


def by_method(model: Any, batch: Any) -> torch.Tensor:
    return slope(model, batch["x"].requires_grad_())


def by_attribute(model: Any, batch: Any) -> torch.Tensor:
    x = batch["x"]
    before = x[:, :1]  # learns nothing of it
    x.requires_grad = True
    return slope(model, x) + before.sum()


def of_its_own(model: Any, batch: Any) -> torch.Tensor:
    x = batch["x"].clone()
    x.requires_grad = True
    return slope(model, x)


def by_variable(model: Any, batch: Any) -> torch.Tensor:
    """A Variable is cut off from what made it."""
    hidden = model[0](batch["x"])
    return slope(model, Variable(batch["x"], requires_grad=True)) + model[1:](Variable(hidden)).sum()


def made_with_a_gradient(model: Any, batch: Any) -> torch.Tensor:
    turn = torch.eye(3, requires_grad=True)
    (found,) = grad(model(batch["x"] @ turn).sum(), turn, create_graph=True)
    return found.square().mean() + (model(batch["x"]) * torch.ones(1, requires_grad=True)).sum()


def of_what_yields_them(model: Any, batch: Any) -> torch.Tensor:
    loss, by_name = model(batch["x"]).square().mean(), dict(model.named_parameters())
    weights = (p for p in model.parameters() if p.dim() == 2)
    asked = (model.parameters(), by_name.values(), weights, filter(torch.is_tensor, by_name.values()))
    return loss + sum(g.square().sum() for each in asked for g in grad(loss, each, create_graph=True))


def side(loss: Callable[..., Any]) -> Side:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize(
    "loss", [by_method, by_attribute, of_its_own, by_variable, made_with_a_gradient, of_what_yields_them]
)
def test_a_whole_step_as_in_eager(loss: Any, check: str) -> None:
    twins = Twins(lambda: side(loss), batches()[0], check=check)
    given = batches()
    ours, theirs = twins.losses(given)
    assert twins.step.rung == "whole step", twins.step.explain()
    assert ours == pytest.approx(theirs, rel=1e-6)
    for a, b in zip(twins.ours.model.parameters(), twins.theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("loss", [by_method, by_attribute])
def test_the_callers_tensor_is_told(loss: Any) -> None:
    """And found so by the next step, if it comes again."""
    twins = Twins(lambda: side(loss), batches()[0], check="off")
    given = batches()[0]
    assert not given["x"].requires_grad
    first = twins.step(given)
    assert given["x"].requires_grad and given["x"].is_leaf
    assert twins.step(given) != first and twins.step.rung == "whole step"


def test_a_frozen_weight_is_not_thawed_unseen() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        model[0].weight.requires_grad_()
        return model(batch["x"]).square().mean()

    def frozen() -> Side:
        made = side(loss)
        made.model[0].weight.requires_grad_(False)
        return made

    twins = Twins(frozen, batches()[0], check="off")
    assert twins.step.rung == "not captured yet"
    ours, theirs = twins.losses(batches())
    assert ours == pytest.approx(theirs, rel=1e-6)
