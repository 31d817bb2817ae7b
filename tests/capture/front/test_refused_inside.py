"""What is refused in the middle of a loss leaves torch as it was for the rest of the process: autocast, gradients, modes."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import wholestep

BATCH = torch.ones(2, 6)
CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "nothing": contextlib.nullcontext,
}


def surroundings() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.get_default_dtype(), torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", CONTEXTS)
def test_a_refusal_inside_of_a_context_leaves_nothing_on(name: str, precision: Any) -> None:
    if name == "autocast" and precision == "bf16":
        pytest.skip("two autocasts are refused before")
    model, refused = nn.Linear(6, 6), nn.RReLU()

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with CONTEXTS[name]():
            beside = refused(model(batch))  # has no keyed form
        return model(batch).float().square().mean() + beside.detach().float().mean() * 0

    before = surroundings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, loss_fn, optimizer, BATCH, precision=precision, backend="interpret", cache=False)
    assert surroundings() == before
    step(BATCH)
    assert surroundings() == before
    wholestep.verify(model, loss_fn, optimizer, [BATCH], steps=1, precision=precision, backend="interpret")
    assert surroundings() == before
