"""A Job small enough to train in milliseconds: dropout, BatchNorm, AdamW, a schedule, numbered batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.train.job import Job

Spoil = Callable[[int, dict[str, Tensor]], dict[str, Tensor]]


class Numbered:
    """Batches that depend on their number alone."""

    unit = "samples"
    units = 8

    def __init__(self, spoil: Spoil | None = None, device: str = "cpu") -> None:
        self.spoil, self.device = spoil, device

    def batch(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        x = torch.randn(8, 6, generator=generator)
        made = {"x": x, "y": x.sum(1, keepdim=True)}
        if self.device != "cpu":
            made = {key: value.pin_memory().to(self.device, non_blocking=True) for key, value in made.items()}
        return made if self.spoil is None else self.spoil(number, made)

    def describe(self) -> str:
        return "sums of six numbers"


def squared_error(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def halving(step: int) -> float:
    return 0.5 ** (step / 50)


def tiny_job(
    *, steps: int = 10, spoil: Spoil | None = None, lr: float = 0.05, device: str = "cpu", **changes: Any
) -> Job:
    """The same numbers every time it is made."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = Numbered(spoil, device)
    facts: dict[str, Any] = dict(
        name="tiny", settings={"model": "tiny", "data": "sums", "lr": lr, "steps": steps, "seed": 5}, model=model,
        loss_fn=squared_error, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, halving),
        batches=batches, compile_options={"clip_norm": 1.0}, held_out=[batches.batch(-1), batches.batch(-2)],
        write_sample=lambda: f"the sum of six ones is {float(model(torch.ones(1, 6, device=device))):.3f}",
    )  # fmt: skip
    return Job(**(facts | changes))
