"""A noisy curve made readable: fewer points, and a light mean."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

Point = tuple[float, float]


def smoothed(points: Sequence[Point], span: float | None = None) -> list[Point]:
    """The mean over about `span` points around each (by default a thirtieth of all).

    Centred, so that it lies in the middle of what it smooths also where the curve is steep; near the start, where a loss falls
    fastest, the window is narrower.
    """
    half = max(int((len(points) / 30 if span is None else span) / 2), 0)
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    found = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i // 4)
        a, b = i - reach, min(i + reach + 1, len(points))
        found.append((x, (sums[b] - sums[a]) / (b - a)))
    return found


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most about `most` points: the lowest and the highest of every stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    found: list[Point] = []
    stretches = max(most // 2, 1)
    for i in range(stretches):
        part = points[i * len(points) // stretches : (i + 1) * len(points) // stretches]
        if part:
            found += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return found


def losses_of(rows: Sequence[dict[str, Any]], key: str = "loss") -> list[tuple[int, float]]:
    """(step, value) wherever the rows have one that is finite."""
    return [(row["step"], float(row[key])) for row in rows if isinstance(row.get(key), int | float)]
