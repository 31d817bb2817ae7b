"""How long a training runs before and while it is measured: the warm-up rule, the sampled window, the steps whose loss is kept.

Warm-up: at least `least_warm_up` iterations; then until the median of the last five times lies within 3 % of the median of the
five before them. The first iteration (capture, compilation) is never among those ten. The least is twelve, for the choice
between a CUDA graph and direct launches takes about eight steps, and nothing that is still being decided may be sampled. A
training that has not settled after `most_warm_up` iterations or `warm_up_seconds` is measured all the same; its row says so.

Window: `steps` iterations, or as many as fit into `seconds`, but at least `least_steps`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

SETTLED_OVER = 5
SETTLED_WITHIN = 0.03


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One for all rows of a table."""

    steps: int = 20
    seconds: float = 60.0
    least_steps: int = 7
    least_warm_up: int = 12
    most_warm_up: int = 60
    warm_up_seconds: float = 120.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "least_steps", min(self.least_steps, self.steps))

    def loss_steps(self) -> tuple[int, ...]:
        """The iterations whose loss is compared: every system makes them, however soon it settles."""
        last = self.least_warm_up + self.least_steps - 1
        return tuple(sorted({0, min(4, last), last}))

    def warm(self, milliseconds: Sequence[float], seconds: float) -> bool:
        """Is the warm-up over? Times of all iterations so far, the first one included, and seconds since the first ended."""
        if len(milliseconds) < self.least_warm_up:
            return False
        return len(milliseconds) >= self.most_warm_up or seconds > self.warm_up_seconds or settled(milliseconds[1:])

    def sampled(self, count: int, seconds: float) -> bool:
        """Is the window over?"""
        return count >= self.steps or (seconds > self.seconds and count >= self.least_steps)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


SMOKE = Protocol(steps=8, seconds=float(10**6), least_steps=8, least_warm_up=4, most_warm_up=4)
"""Twelve iterations, always: a smoke run is about losses, and its times are not worth comparing."""


def settled(milliseconds: Sequence[float]) -> bool:
    """Has the running median of the last five come to rest?"""
    if len(milliseconds) < 2 * SETTLED_OVER:
        return False
    now = statistics.median(milliseconds[-SETTLED_OVER:])
    before = statistics.median(milliseconds[-2 * SETTLED_OVER : -SETTLED_OVER])
    return abs(now - before) <= SETTLED_WITHIN * before
