"""Numbers of a graph beside tensors, and values of modules that are called inside of a transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.twins import Side, class_batches, classify, interpreted, small_mlp
from torch import nn
from torch.func import functional_call, vmap

BATCH = class_batches(1)[0]
WEIGHTS = np.array([0.5, 2.0])


@pytest.mark.parametrize(
    "make",
    [
        lambda w, s: torch.as_tensor(w),
        lambda w, s: torch.full((), w) * s.half(),
        lambda w, s: torch.tensor(w, dtype=torch.float64) * s,
        lambda w, s: torch.tensor([w, 1.0]),
        lambda w, s: torch.tensor([True, w > 0.3]),
        lambda w, s: s * WEIGHTS[0],
        lambda w, s: torch.arange(3) * WEIGHTS.max(),
        lambda w, s: torch.tensor(WEIGHTS[1]) * s,
    ],
)
def test_types_are_those_of_eager(make: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model, held = small_mlp(), {"weight": 0.5}

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        loss = classify(model, batch)
        return loss, {"made": make(held["weight"], loss.detach())}

    step = interpreted(Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn), BATCH, check="off")
    for weight in (0.5, 0.4, 0.2):
        held["weight"] = weight
        wanted = loss_fn(model, BATCH)[1]["made"]
        torch.testing.assert_close(step(BATCH)[1]["made"], wanted)
    assert step.rung == "whole step"


@pytest.mark.parametrize("check", ["off", "first"])
def test_modules_called_inside_of_vmap(check: str) -> None:
    model = small_mlp()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        weights = dict(model.named_parameters())
        out = vmap(lambda x: functional_call(model, weights, (x,)))(batch[0])
        return torch.nn.functional.cross_entropy(out, batch[1])

    step = interpreted(Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn), BATCH, check=check)
    wanted = loss_fn(model, BATCH).detach()
    torch.testing.assert_close(step(BATCH), wanted)
    assert step.rung == "whole step"
