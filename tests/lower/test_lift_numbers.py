"""Layers that differ in a number compile once, and compute what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep


class Layer(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.floor(torch.rand(x.shape[0], 1) + (1.0 - self.drop))
        return x + self.down(torch.tanh(self.up(self.norm(x)))).div(1.0 - self.drop) * kept * 2.0


class Deep(nn.Module):
    """Stochastic depth, as vision transformers have it."""

    def __init__(self, drops: tuple[float, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(drop) for drop in drops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(backend: str, drops: tuple[float, ...]) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = Deep(drops), torch.randn(5, 8)
    step = wholestep.compile(
        model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), 0.1), batch,
        backend=backend, check="off", cache=False,
    )  # fmt: skip
    losses = [step(batch) for _ in range(3)]
    return step, [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.slow
def test_stochastic_depth_compiles_as_equal_layers_do() -> None:
    drops = (0.1, 0.2, 0.3, 0.4)
    step, ours = trained("inductor", drops)
    assert step.regions["unique_regions"] <= step.regions["regions"] - 4, step.regions  # eight of them are layers
    torch.testing.assert_close(ours, trained("interpret", drops)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    torch.manual_seed(0)
    model, batch = Deep((0.0, 0.25, 0.5)).cuda().requires_grad_(), torch.randn(6, 8, device="cuda")
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: x + layer.down(torch.tanh(layer.up(layer.norm(x)))).div(1.0 + layer.drop)
    results = []
    for backend in ("interpret", "inductor"):
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        step = wholestep.compile(
            model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), 0.1), batch,
            backend=backend, check="off", cache=False, precision="bf16",
        )  # fmt: skip
        results.append([*(step(batch) for _ in range(12)), *(p.detach().clone() for p in model.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-3)
