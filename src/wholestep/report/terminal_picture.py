"""The loss of a run in a terminal: a line of bars, or a small chart of block characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import IO

from wholestep.report.smooth import Point, smoothed

BARS = "▁▂▃▄▅▆▇█"
PLAIN_BARS = "_.-=+*#@"
"""For terminals whose encoding has no blocks."""


def columns(points: Sequence[Point], width: int) -> list[float]:
    """The running mean of the points, one value for each column."""
    values = [y for _, y in smoothed(points, max(len(points) / 60, 1.0))]
    if len(values) <= width:
        return values
    cuts = [i * len(values) // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def blocks_fit(stream: IO[str]) -> bool:
    """Whether the stream's encoding has block characters."""
    try:
        "█┤".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def sparkline(points: Sequence[Point], width: int = 48, *, blocks: bool = True) -> str:
    """One line; empty without points."""
    values = columns(points, width)
    if not values:
        return ""
    bars = BARS if blocks else PLAIN_BARS
    low, size = min(values), (max(values) - min(values)) or 1.0
    return "".join(bars[min(int((value - low) / size * len(bars)), len(bars) - 1)] for value in values)


def chart(points: Sequence[Point], width: int = 60, height: int = 6, *, blocks: bool = True) -> list[str]:
    """`height` lines with the highest and the lowest value at the side, and the steps below; empty without points."""
    values = columns(points, width)
    if len(values) < 2:
        return []
    bars = " " + (BARS if blocks else PLAIN_BARS)
    low, high = min(values), max(values)
    size = (high - low) or 1.0
    eighths = [1 + round((value - low) / size * (8 * height - 1)) for value in values]
    labels = {0: f"{high:.3g}", height - 1: f"{low:.3g}"}
    margin = max(map(len, labels.values()))
    wall, corner, floor = ("┤", "└", "─") if blocks else ("|", "+", "-")
    lines = []
    for row in range(height):
        base = 8 * (height - 1 - row)
        cells = "".join(bars[min(max(filled - base, 0), 8)] for filled in eighths)
        lines.append(f"{labels.get(row, ''):>{margin}} {wall}{cells}".rstrip())
    first, last = f"step {points[0][0]:.0f}", f"{points[-1][0]:.0f}"
    lines.append(" " * (margin + 1) + corner + floor * len(values))
    lines.append(" " * (margin + 2) + first + f"{last:>{max(len(values) - len(first), len(last) + 1)}}")
    return lines
