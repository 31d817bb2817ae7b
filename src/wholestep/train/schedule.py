"""Learning-rate schedules: a factor of the peak rate as a function of the steps taken.

The default needs no total: a run of 5 steps resumed to 10 takes the same steps as a run of 10. Each is a plain object whose
fields are numbers, because LambdaLR puts them into its `state_dict`, and a checkpoint holds JSON.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch.optim import Optimizer

COSINE_FLOOR = 0.1
"""The part of the peak at which cosine ends, and stays."""


@dataclasses.dataclass  # without slots: LambdaLR reads __dict__
class Sqrt:
    """Linear warm-up to 1 at step w, then sqrt(w / n): independent of how long the run will be."""

    warmup: int

    def __call__(self, taken: int) -> float:
        number, warmup = taken + 1, max(self.warmup, 1)
        return min(number / warmup, math.sqrt(warmup / number))


@dataclasses.dataclass
class Cosine:
    """Linear warm-up, then half a cosine down to COSINE_FLOOR at step `total`."""

    warmup: int
    total: int

    def __call__(self, taken: int) -> float:
        number, warmup = taken + 1, max(self.warmup, 1)
        if number <= warmup:
            return number / warmup
        done = min((number - warmup) / max(self.total - warmup, 1), 1.0)
        return COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


@dataclasses.dataclass
class Constant:
    """Linear warm-up, then the peak."""

    warmup: int

    def __call__(self, taken: int) -> float:
        return min((taken + 1) / max(self.warmup, 1), 1.0)


def make_scheduler(kind: str, optimizer: Optimizer, *, warmup: int, total: int) -> Any:
    """torch's LambdaLR over one of the schedules above."""
    factors = {"sqrt": Sqrt(warmup), "cosine": Cosine(warmup, total), "constant": Constant(warmup)}
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors[kind])
