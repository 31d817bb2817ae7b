"""How long a step takes: a call and its batches in, sampled times out, warm-up left aside.

Warm-up ends when the median of the last five steps lies within 5 % of that of the five before (compilation, autotuning and
the choice of a CUDA graph are over then), or after a bound in steps and seconds, which is said. Each sampled step is timed by
itself, with the device idle before it and waited for after it; fetching the batch is timed apart.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.lower.footprint.cuda import wait

OVER = 5
WITHIN = 0.05
LEAST_WARM_UP = 10
MOST_WARM_UP = 60
WARM_UP_SECONDS = 60.0
SAMPLE_SECONDS = 60.0
LEAST_SAMPLES = 3
BUSY = 0.2
"""A spread beyond which other programs are taken to have run beside the step."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of sampled steps, and how they were reached."""

    steps: tuple[float, ...]
    data: tuple[float, ...]
    """Waiting for the batch of each of these steps."""
    first_step: float
    warm_up_steps: int
    settled: bool

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> float:
        """How far the middle half of the steps lies apart, over the median."""
        if len(self.steps) < 4:
            return max(self.steps) / min(self.steps) - 1
        low, _, high = statistics.quantiles(self.steps, n=4)
        return (high - low) / self.median

    @property
    def data_median(self) -> float:
        return statistics.median(self.data)


def time_steps(
    step: Callable[[Any], Any], batch: Callable[[int], Any], device: torch.device, *, samples: int
) -> Timing:
    """Warm up, then sample; `batch(number)` gives the batch of a step."""
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < LEAST_WARM_UP or not settled(taken[1:]):
        late = time.perf_counter() - began > WARM_UP_SECONDS and len(taken) >= 2
        if len(taken) >= MOST_WARM_UP or late:
            break
        taken.append(_timed(step, batch, len(taken), device)[1])
    found: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(found) < samples:
        if time.perf_counter() - began > SAMPLE_SECONDS and len(found) >= min(samples, LEAST_SAMPLES):
            break
        found.append(_timed(step, batch, len(taken) + len(found), device))
    return Timing(
        tuple(step for _, step in found), tuple(data for data, _ in found), taken[0], len(taken), settled(taken[1:])
    )


def settled(seconds: Sequence[float]) -> bool:
    """Whether the running median has come to rest."""
    if len(seconds) < 2 * OVER - 1:
        return False
    now, before = statistics.median(seconds[-OVER:]), statistics.median(seconds[-2 * OVER : -OVER])
    return abs(now - before) <= WITHIN * before


def _timed(
    step: Callable[[Any], Any], batch: Callable[[int], Any], number: int, device: torch.device
) -> tuple[float, float]:
    """(seconds for the batch, seconds for the step)."""
    start = time.perf_counter()
    given = batch(number)
    wait(device)
    ready = time.perf_counter()
    step(given)
    wait(device)
    return ready - start, time.perf_counter() - ready
