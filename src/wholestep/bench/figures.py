"""Numbers from samples: median, spread, and how sure the median is.

The interval comes from order statistics, so it assumes nothing about the shape of the distribution: of n samples, the k-th
lowest and the k-th highest enclose the true median unless fewer than k samples fall on one side of it, which has the
probability of fewer than k heads in n throws of a coin. It speaks about one process; another process may differ by a per cent
or two more, which is why `wholestep compare` asks for both a gap between intervals and more than 2 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

CONFIDENCE = 0.95


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the samples lie, between two samples by proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(low, high, its real confidence). With fewer than six samples even lowest to highest is less sure than asked."""
    ordered, count = sorted(values), len(values)
    below, tail, rank = 0.0, 0.0, 0
    for k in range(max(count // 2, 1)):
        below += math.comb(count, k) / 2**count  # fewer than k + 1 heads
        if 2 * below > 1 - CONFIDENCE and k > 0:
            break
        tail, rank = below, k
    return ordered[rank], ordered[count - 1 - rank], 1 - 2 * tail


def summarised(milliseconds: Sequence[float]) -> dict[str, Any]:
    """What a row holds about its sampled steps, all of them included."""
    low, high, confidence = median_interval(milliseconds)
    return {
        "median": statistics.median(milliseconds),
        "p10": percentile(milliseconds, 0.1),
        "p90": percentile(milliseconds, 0.9),
        "interval": [low, high],
        "confidence": confidence,
        "all": list(milliseconds),
    }
