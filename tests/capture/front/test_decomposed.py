"""Operators that torch takes apart wrongly while it traces: equal to eager's kernels."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins
from torch import nn

from wholestep import compat

LABELS = [[0, 2, -1, 1, 3], [-1, 0, 0, 0, 0], [4, 3, 2, 1, 0], [1, -1, 1, 1, 2]]
"""Of several classes: what stands behind the first -1 of a row is none of them."""


LABELLED = [(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)), None) for i in range(3)]
IMAGES = torch.randn(2, 3, 4, 4, 4, generator=torch.Generator().manual_seed(4))


def several_labels(reduction: str) -> Any:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return F.multilabel_margin_loss(model(batch[0]), torch.tensor(LABELS), reduction=reduction).sum()

    return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_margins_of_several_labels(reduction: str) -> None:
    def made() -> Side:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), several_labels(reduction))

    twins = Twins(made, LABELLED[0], check="off")
    ours, theirs = twins.losses(LABELLED)
    assert twins.step.rung == "whole step", twins.step.explain()
    assert ours == pytest.approx(theirs, rel=1e-6)


def resized(images: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """And what its gradient is."""
    images = images.detach().requires_grad_(True)
    out = F.interpolate(images, **options)
    weights = torch.arange(out.numel(), dtype=out.dtype).cos().reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, images, weights)]


@pytest.mark.parametrize(
    ("mode", "dimensions"),
    [("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 2), ("linear", 1), ("bilinear", 2), ("trilinear", 3),
     ("bicubic", 2)],
)  # fmt: skip
def test_resizing_as_the_kernel(mode: str, dimensions: int) -> None:
    """By a scale that leaves the size as it is, or doubles it, and by others."""
    images = IMAGES[(slice(None), slice(None), *[slice(None)] * dimensions, *[0] * (3 - dimensions))].contiguous()
    kept_whole = 0
    for scale, recompute in itertools.product((1.0, 1.1, 1.2, 1.5, 2.0, 2.1, 0.6), (None, True)):
        options = {"scale_factor": scale, "recompute_scale_factor": recompute, "mode": mode}
        fakes = compat.new_fake_mode()
        graph = compat.trace(functools.partial(resized, **options), [compat.to_fake(fakes, images)], mode=fakes)
        kept_whole += any("upsample" in str(node.target) for node in graph.graph.nodes)
        torch.testing.assert_close(graph(images), resized(images, **options), rtol=1e-4, atol=1e-5)
    assert 0 < kept_whole < 7, "taken apart but for where the kernel has a rule of its own"
