"""Where the milliseconds of a step go, as a waterfall: (what, milliseconds) in, SVG out.

The first entries are what the device cannot avoid, each further one is added on top, and the last bar is the measured
step. No entry is below zero (`profile/measure/rows.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import line, rectangle, show_ms, text, ticks

TITLE = "From the least time to the measured step"
LEFT, RIGHT, ROW, TOP = 268, 120, 28, 10
FLOORS = ("arithmetic", "memory at")
"""How the entries begin that no kernel can avoid."""


def waterfall(entries: Sequence[tuple[str, float]], measured_ms: float, *, width: float = drawing.WIDTH) -> str:
    """The picture; without entries it says so."""
    if not entries or measured_ms <= 0:
        reason = "what the step has to do is not known, so neither is what it loses"
        return drawing.empty(TITLE, reason, kind="waterfall", width=width)
    narrow = drawing.is_narrow(width)
    left, right, row = (4, 12, 42) if narrow else (LEFT, RIGHT, ROW)
    ends = list(itertools.accumulate((ms for _, ms in entries), initial=0.0))
    across = drawing.scale(0.0, max(measured_ms, *ends), left, width - right)
    height = TOP + row * (len(entries) + 1) + 24
    body = []
    for value in ticks(0.0, max(measured_ms, *ends), 4 if narrow else 6):
        body.append(line(across(value), TOP, across(value), height - 24, "grid"))
        words = f"{value:g} ms" if narrow and value else f"{value:g}"
        body.append(
            text(across(value), height - 8, words, "faint", "start" if value == 0 else "end" if narrow else "middle")
        )
    body += [] if narrow else [text(width - 4, height - 8, "ms", "faint", "end")]
    for number, ((name, ms), (start, end)) in enumerate(zip(entries, itertools.pairwise(ends))):
        share = f"{show_ms(ms)} ({ms / measured_ms:.0%})"
        kind = "floor" if name.startswith(FLOORS) else "unknown" if name == "unattributed" else "lost"
        body += _bar(TOP + row * number, name, share, kind, (start, end), across, width)
        body.append(line(across(end), TOP + row * (number + 1) - 4, across(end), TOP + row * (number + 1) + 4, "joint"))
    y = TOP + row * len(entries)
    body += _bar(y, "measured step", show_ms(measured_ms), "measured", (0.0, measured_ms), across, width)
    described = ", ".join(f"{name} {show_ms(ms)}" for name, ms in entries)
    described += f"; measured {show_ms(measured_ms)}"
    return drawing.svg(height, TITLE, described, body, kind="waterfall", width=width)


def _bar(
    y: float, name: str, words: str, kind: str, ends: tuple[float, float], across: drawing.Scale, width: float
) -> list[str]:  # fmt: skip
    """Name, bar and figure in one line; above the bar where the picture is narrow."""
    ink, faint = ("ink strong", "ink strong") if kind == "measured" else ("ink", "faint")
    start, long, hover = across(ends[0]), max(across(ends[1]) - across(ends[0]), 1.0), f"{name}: {words}"
    if drawing.is_narrow(width):
        room = width - 10 - drawing.CHARACTER * len(words)
        return [
            text(4, y + 14, drawing.fitted(name, room), ink, hover=hover),
            text(width - 4, y + 14, words, faint, "end"),
            rectangle(start, y + 19, long, ROW - 12, kind, hover=hover),
        ]
    return [
        rectangle(start, y + 4, long, ROW - 8, kind, hover=hover),
        text(LEFT - 10, y + 19, drawing.fitted(name, LEFT - 16), ink, "end", hover=hover),
        text(across(ends[1]) + 7, y + 19, words, faint),
    ]
