"""What the user's code rounds stays rounded when compiled: quantised training must not become plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import wholestep


def quantised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """With the straight-through gradient."""
    return x + (x.to(dtype).view(-1, 2).to(x.dtype).view_as(x) - x).detach()


def trained(
    backend: str | None, dtype: torch.dtype, device: str, wide: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device, wide)
    batch = torch.randn(5, 6).to(device, wide)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def loss(m: Any, b: torch.Tensor) -> torch.Tensor:
        return m[2](quantised(m[1](m[0](b)), dtype).mul(1.5).to(dtype).to(wide)).square().mean()

    if backend is None:
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    else:
        step = wholestep.compile(model, loss, optimizer, batch, backend=backend, check="off", cache=False)
        for _ in range(3):
            step(batch)
        assert step.rung == "whole step"
    return [p.detach() for p in model.parameters()]


CASES = [
    (torch.bfloat16, torch.float32),
    pytest.param(torch.float16, torch.float32, marks=pytest.mark.slow),
    pytest.param(torch.float32, torch.float64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("narrow", "wide"), CASES)
def test_compiled_rounds_as_eager_does(narrow: torch.dtype, wide: torch.dtype) -> None:
    eager = trained(None, narrow, "cpu", wide)
    close = {"rtol": 1e-6, "atol": 1e-7} if wide == torch.float32 else {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(trained("inductor", narrow, "cpu", wide), eager, **close)


@pytest.mark.gpu
@pytest.mark.parametrize(("narrow", "wide"), [*CASES, (torch.float8_e4m3fn, torch.float32)])
def test_on_a_gpu(narrow: torch.dtype, wide: torch.dtype) -> None:
    eager = trained(None, narrow, "cuda", wide)
    torch.testing.assert_close(trained("inductor", narrow, "cuda", wide), eager, rtol=1e-5, atol=1e-6)
