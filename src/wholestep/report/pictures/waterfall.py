"""Where the milliseconds of a step go, as a waterfall: (what, milliseconds) in, SVG out.

The first entries are what the device cannot avoid, each further one is added on top, and the last bar is the measured
step. An entry below zero (work done faster than the roofline allows, from a cache) goes back to the left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from wholestep.report.loss_picture import ticks
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import line, rectangle, show_ms, text

TITLE = "From the least time to the measured step"
LEFT, RIGHT, ROW, TOP = 268, 120, 28, 10
FLOORS = ("arithmetic", "memory at")
"""How the entries begin that no kernel can avoid."""


def waterfall(entries: Sequence[tuple[str, float]], measured_ms: float) -> str:
    """The picture; without entries it says so."""
    if not entries or measured_ms <= 0:
        return drawing.empty(
            TITLE, "what the step has to do is not known, so neither is what it loses", kind="waterfall"
        )
    ends = list(itertools.accumulate((ms for _, ms in entries), initial=0.0))
    across = drawing.scale(min(0.0, *ends), max(measured_ms, *ends), LEFT, drawing.WIDTH - RIGHT)
    height = TOP + ROW * (len(entries) + 1) + 24
    body = []
    for value in ticks(min(0.0, *ends), max(measured_ms, *ends), 6):
        body.append(line(across(value), TOP, across(value), height - 24, "grid"))
        body.append(text(across(value), height - 8, f"{value:g}", "faint", "middle"))
    body.append(text(drawing.WIDTH - 4, height - 8, "ms", "faint", "end"))
    for number, ((name, ms), (start, end)) in enumerate(zip(entries, itertools.pairwise(ends))):
        body += _bar(number, name, ms, start, end, measured_ms, across)
    y = TOP + ROW * len(entries)
    hover = f"measured: {show_ms(measured_ms)}"
    body.append(rectangle(across(0), y + 4, across(measured_ms) - across(0), ROW - 8, "measured", hover=hover))
    body += [text(LEFT - 10, y + 19, "measured step", "ink strong", "end")]
    body += [text(across(measured_ms) + 7, y + 19, show_ms(measured_ms), "ink strong")]
    said = ", ".join(f"{name} {show_ms(ms)}" for name, ms in entries)
    return drawing.svg(height, TITLE, f"{said}; measured {show_ms(measured_ms)}", body, kind="waterfall")


def _bar(
    number: int, name: str, ms: float, start: float, end: float, measured: float, across: drawing.Scale
) -> list[str]:  # fmt: skip
    y = TOP + ROW * number
    kind = "floor" if name.startswith(FLOORS) else "won" if ms < 0 else "unknown" if name == "unattributed" else "lost"
    low, high = min(start, end), max(start, end)
    hover = f"{name}: {show_ms(ms)}, {ms / measured:.1%} of the step"
    width = max(across(high) - across(low), 1.0)
    return [
        line(across(end), y + 4, across(end), y + ROW + 4, "joint"),
        rectangle(across(low), y + 4, width, ROW - 8, kind, hover=hover),
        text(LEFT - 10, y + 19, drawing.fitted(name, LEFT - 16), "ink", "end", hover=hover),
        text(across(high) + 7, y + 19, f"{show_ms(ms)} ({ms / measured:.0%})", "faint"),
    ]
