"""The roofline: rows of the table in, SVG out, both axes logarithmic.

The slope is the memory's bandwidth, the flat lines are the peaks of matrix units and of vector units. What rows reached beyond
them is drawn as a roof too, and named: a cache's bandwidth, or a peak measured while the machine was busy. The ten costliest
rows that compute anything are numbered, and named beside the plot, or below a narrow one, so that names never lie on each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, show_ms, show_rate, text

TITLE = "Roofline: what was reached against what the device allows"
HEIGHT, TOP, BOTTOM, LEFT, SIDE = 420, 16, 46, 94, 356
SHOWN, ENTRY, NOTE = 10, 32, 18
BEYOND, CLOSE = 1.001, 2.0
"""Rounding apart; roofs that are drawn as one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Plot:
    """Where the plot lies in the picture, and the list of rows beside or below it."""

    width: float
    left: float
    end: float
    bottom: float
    list_x: float
    list_y: float
    list_room: float


def _plot(width: float) -> _Plot:
    if drawing.is_narrow(width):
        return _Plot(width, 88, width - 16, 300 - BOTTOM, 4, 326, width - 34)
    return _Plot(width, LEFT, width - SIDE, HEIGHT - BOTTOM, width - SIDE + 20, TOP + 24, SIDE - 50)


def roofline_chart(
    rows: Sequence[Mapping[str, Any]], device: Mapping[str, Any], *, number_format: str = "fp32",
    width: float = drawing.WIDTH,
) -> str:  # fmt: skip
    """The picture; without rows that compute it says so."""
    drawn = [r for r in rows if r["flops"] and r["bytes"] and r["ms"] > 0]
    drawn = sorted(drawn, key=lambda r: -r["ms"])[:SHOWN]
    if not drawn:
        return drawing.empty(TITLE, "no row has FLOPs, bytes and time", kind="roofline", width=width)
    peak = device["peaks"].get(number_format) or device["vector_peak"]
    points = [(row["flops"] / row["bytes"], row["flops"] / row["ms"] * 1e3) for row in drawn]
    plot, highest = _plot(width), max(peak, *(y for _, y in points))
    ridge = peak / device["bandwidth"]
    xs = _powers([x for x, _ in points] + [ridge / 4, ridge * 4])
    ys = _powers([y / 2 for _, y in points] + [highest * 1.5])  # room for numbers that are moved down
    across, up = drawing.scale(*xs, plot.left, plot.end), drawing.scale(*ys, plot.bottom, TOP)
    body = _axes(xs, ys, across, up, plot)
    true = [(across(math.log10(x)), up(math.log10(y))) for x, y in points]
    places = _apart(true)
    body += _roofs(xs, ys, device, peak, number_format, points, places, across, up)
    for place, at in zip(true, places):
        body += [line(*place, *at, "leader"), dot(*place, 2.5, "mark")] if place != at else []
    for number, (row, (x, y)) in enumerate(zip(drawn, places), start=1):
        body += _point(number, row, x, y, plot)
    without = sum(1 for r in rows if not r["flops"] and r["ms"] > 0)
    moved = max(y / x for x, y in points)
    below = (
        [f"dashed slope: {show_rate(moved, 'B')} reached, from caches"] if moved > BEYOND * device["bandwidth"] else []
    )
    below += [f"without FLOPs, not drawn: {without} {'row' if without == 1 else 'rows'}"] if without else []
    end = plot.list_y + ENTRY * len(drawn)
    first = end if drawing.is_narrow(width) else HEIGHT - 30 - NOTE * (len(below) - 1)
    body += [text(plot.list_x, first + NOTE * i, words, "faint") for i, words in enumerate(below)]
    described = "; ".join(
        f"{i} {_name(r)} {show_rate(y, 'FLOP')}" for i, (r, (_, y)) in enumerate(zip(drawn, points), start=1)
    )
    height = end + 10 + NOTE * max(len(below) - 1, 0) if drawing.is_narrow(width) else HEIGHT
    return drawing.svg(height, TITLE, described, body, kind="roofline", width=width)


def _powers(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around positive values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _apart(places: list[tuple[float, float]], least: float = 17.0) -> list[tuple[float, float]]:
    """Places for the numbers: at their points, or below and beside where two would cover each other; never above, where
    they would seem to break through the roof."""
    found: list[tuple[float, float]] = []
    for x, y in places:
        tried = [(x, y)] + [
            (x + least * ring * math.cos(turn * math.pi / 8), y + least * ring * math.sin(turn * math.pi / 8))
            for ring in (1, 1.5, 2, 3, 4) for turn in (4, 2, 6, 0, 8, 1, 7, 3, 5)
        ]  # fmt: skip
        free = [at for at in tried if all(math.dist(at, other) >= least for other in found)]
        found.append(free[0] if free else (x, y))
    return found


def _axes(
    xs: tuple[int, int], ys: tuple[int, int], across: drawing.Scale, up: drawing.Scale, plot: _Plot
) -> list[str]:  # fmt: skip
    floor, end = plot.bottom, plot.end
    body = []
    for power in range(xs[0], xs[1] + 1):
        body += [line(across(power), TOP, across(power), floor, "grid")]
        body += [text(across(power), floor + 17, f"{10.0**power:g}", "faint", "middle")]
    for power in range(ys[0], ys[1] + 1):
        body += [line(plot.left, up(power), end, up(power), "grid")]
        body += [text(plot.left - 6, up(power) + 4, show_rate(10.0**power, "FLOP"), "faint", "end")]
    return body + [text((plot.left + end) / 2, floor + 38, "FLOPs per byte moved", "ink", "middle")]


def _roofs(
    xs: tuple[int, int], ys: tuple[int, int], device: Mapping[str, Any], peak: float, number_format: str,
    points: Sequence[tuple[float, float]], places: Sequence[tuple[float, float]], across: drawing.Scale, up: drawing.Scale,
) -> list[str]:  # fmt: skip
    """The slope up to each peak, and the peak to the right edge; clipped to the plot. Then what was reached beyond them.
    `places`: of the numbers, which words keep clear of."""
    bandwidth = device["bandwidth"]
    body = []
    peaks = [(peak, "roof", f"{show_rate(peak, 'FLOP')} {number_format}")]
    reached, moved = max(y for _, y in points), max(y / x for x, y in points)
    if BEYOND * peak < reached < CLOSE * peak:  # two lines would cover each other's words
        peaks = [(reached, "roof", f"{peaks[0][2]}, {show_rate(reached, 'FLOP')} reached")]
    elif reached > BEYOND * peak:
        peaks.insert(0, (reached, "roof dashed", f"{show_rate(reached, 'FLOP')} reached"))
    start = max(xs[0], ys[0] - math.log10(max(moved, bandwidth)))
    if abs(device["vector_peak"] / peak - 1) > 0.05:
        peaks.append((device["vector_peak"], "roof dashed", f"{show_rate(device['vector_peak'], 'FLOP')} vector units"))
    for value, kind, words in peaks:
        corner = min(max(math.log10(value / bandwidth), start), xs[1])
        body.append(line(across(corner), up(math.log10(value)), across(xs[1]), up(math.log10(value)), kind))
        body.append(text(across(xs[1]) - 6, up(math.log10(value)) - 6, words, "ink", "end"))
    slopes = [(bandwidth, "roof", f"{show_rate(bandwidth, 'B')} memory")]
    slopes += [(moved, "roof dashed", "")] if moved > BEYOND * bandwidth else []  # named beside the plot
    for rate, kind, words in slopes:
        first = max(start, ys[0] - math.log10(rate))
        corner = min(math.log10(max(v for v, _, _ in peaks) / rate), xs[1])
        ends = (across(first), up(first + math.log10(rate))), (across(corner), up(corner + math.log10(rate)))
        body.append(line(*ends[0], *ends[1], kind))
        body += [_along(ends, words, places, below=len(slopes) > 1)] if words else []
    return body


def _along(
    ends: tuple[tuple[float, float], tuple[float, float]], words: str, places: Sequence[tuple[float, float]], *, below: bool
) -> str:  # fmt: skip
    """Words along a slope, where they are furthest from the numbers, or in its middle where nothing is near."""
    (x1, y1), (x2, y2) = ends
    angle = math.atan2(y2 - y1, x2 - x1)
    half, offset = drawing.CHARACTER * len(words) / 2, 14 if below else -7
    length = math.dist(*ends)

    def clear(part: float) -> float:
        """Pixels between the words and the nearest number, up to as many as are enough."""
        x, y = x1 + part * (x2 - x1), y1 + part * (y2 - y1)
        nearest = 24.0
        for px, py in places:
            along = (px - x) * math.cos(angle) + (py - y) * math.sin(angle)
            aside = (py - y) * math.cos(angle) - (px - x) * math.sin(angle) - (offset - 4)
            nearest = min(nearest, math.hypot(max(abs(along) - half, 0.0), aside))
        return nearest

    room = min((half + 12) / length, 0.5)  # of the slope, to leave free at its ends: axes and peaks have words too
    part = max((0.5, *(room + (1 - 2 * room) * i / 10 for i in range(11))), key=clear)
    x, y = x1 + part * (x2 - x1), y1 + part * (y2 - y1)
    said = text(0, offset, words, "ink", "middle")
    return f'<g transform="translate({x:.1f} {y:.1f}) rotate({math.degrees(angle):.1f})">{said}</g>'


def _name(row: Mapping[str, Any]) -> str:
    if row["kind"] == "region":  # its title tells the phase
        return " ".join(word for word in (row["name"].partition(" (")[0], row["module"]) if word)
    return f"{row['name']} {row['phase']}" + (f" {row['module']}" if row["module"] else "")


def _point(number: int, row: Mapping[str, Any], x: float, y: float, plot: _Plot) -> list[str]:
    kind = "compute" if row["bound"] == "compute" else "memory-bound"
    hover = f"{_name(row)}: {show_ms(row['ms'])}, {row['bound']}-bound, least {show_ms(row['floor_ms'])}"
    side, line_y = plot.list_x, plot.list_y + ENTRY * (number - 1)
    figures = f"{show_ms(row['ms'])}, {row['bound']}-bound, least {show_ms(row['floor_ms'])}"
    return [
        dot(x, y, 8, kind, hover=hover),
        text(x, y + 4, str(number), "on-dot", "middle", hover=hover),
        dot(side + 8, line_y - 5, 8, kind),
        text(side + 8, line_y - 1, str(number), "on-dot", "middle"),
        text(side + 24, line_y - 4, drawing.fitted(_name(row), plot.list_room), "ink", hover=hover),
        text(side + 24, line_y + 10, figures, "small"),
    ]
