"""The eager reference: same masks in float64, nothing live touched, hooks and buffers as in a real step."""

from __future__ import annotations

import pytest
import torch
from tests.verify.small_models import Mlp, Normed, batches, everything, loss_fn
from torch import nn

import wholestep
from wholestep.capture.subject import make_subject
from wholestep.verify.reference import float64_reference, reference_gradients


def test_without_randomness_it_is_plain_backward() -> None:
    model, batch = Normed(), batches(1)[0]
    kept = everything(model, None)
    subject = make_subject(model, loss_fn, None)
    found = reference_gradients(subject, batch, 1, 0, 0, num_sites=0)
    now = everything(model, None)
    assert all(torch.equal(v, now[n]) if isinstance(v, torch.Tensor) else v == now[n] for n, v in kept.items())
    loss, _ = loss_fn(model, batch)
    loss.backward()
    assert torch.equal(found.loss, loss.detach())
    assert all(torch.equal(found.gradients[n], p.grad) for n, p in model.named_parameters())
    assert all(torch.equal(found.buffers[n], b) for n, b in model.named_buffers())
    assert not torch.equal(kept["model.norm.running_mean"], model.norm.running_mean)


def test_float64_draws_the_same_masks_and_is_closer_to_the_truth() -> None:
    model, batch = Mlp(), batches(1)[0]
    subject = make_subject(model, loss_fn, None)
    single = reference_gradients(subject, batch, 1, 0, 0, num_sites=2, keep_outputs=True)
    double = float64_reference(subject, batch, 1, 0, 0, num_sites=2, keep_outputs=True)
    assert not isinstance(double, str)
    assert double.loss.dtype == torch.float64 and model.first.weight.dtype == torch.float32
    for name in ("drop_one", "drop_two"):
        ours, theirs = single.module_outputs[name], double.module_outputs[name]
        assert torch.equal(ours == 0, theirs == 0) and (ours == 0).any()
    for name, gradient in double.gradients.items():
        torch.testing.assert_close(single.gradients[name].double(), gradient, rtol=1e-4, atol=1e-6)
    assert single.draws == double.draws == 2
    assert reference_gradients(subject, batch, 1, 0, 0, num_sites=0).draws == 2
    other = reference_gradients(subject, batch, 1, 1, 0, num_sites=2)
    assert not torch.equal(other.loss, single.loss)


def test_hooks_on_parameters_are_heard() -> None:
    model, batch = Mlp(), batches(1)[0]
    subject = make_subject(model, loss_fn, None)
    plain = reference_gradients(subject, batch, 1, 0, 0, num_sites=2).gradients["head.bias"]
    model.head.bias.register_hook(lambda g: g * 3)
    assert torch.equal(reference_gradients(subject, batch, 1, 0, 0, num_sites=2).gradients["head.bias"], plain * 3)


def test_tensors_of_the_default_dtype_are_made_double_when_needed() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) @ torch.ones(4, 4)

    subject = make_subject(Mixing(), loss_fn, None)
    found = float64_reference(subject, batches(1)[0], 1, 0, 0, num_sites=0)
    assert not isinstance(found, str) and found.loss.dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("guards", ["dynamo", "off"])
def test_parameters_are_parameters(guards: str) -> None:
    """A loss that asks: `get_parameter` raises for other tensors."""

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        decayed = [p.square().sum() for p in model.parameters() if isinstance(p, nn.Parameter)]
        return (model.get_parameter("weight") * batch).sum() + sum(decayed)

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = wholestep.verify(model, loss_fn, optimizer, torch.ones(3, 3), backend="interpret", guards=guards)
    assert report.ok and report.bitwise and report.rung == "whole step", report
