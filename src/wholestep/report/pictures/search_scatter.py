"""Throughput against peak memory: points of a search in, one SVG file out that needs nothing else.

x is memory at the peak, y what a second trains on. Filled marks were measured, hollow ones are predictions as the measured ones
corrected them; the line joins the measured points of which no other is both faster and leaner. Measured points are numbered,
and the numbers are told beside the plot, so that words never lie on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wholestep.report.loss_picture import ticks
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, rectangle, text

HEIGHT, TOP, LEFT, SIDE, ROW = 470, 78, 90, 372, 33
FLOOR = HEIGHT - 62
MOST_LABELS = 14
STYLE = """<style>
  .page { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #59636e } .grid { stroke: #e3e7eb } .axis { stroke: #818b98 }
  .title { font-size: 17px; font-weight: 600 } .measured { fill: #0b5cad } .best { fill: #c2410c } .on-dot { fill: #fff }
  .predicted { fill: none; stroke: #59636e; stroke-width: 1.4 } .worth { stroke: #0b5cad; stroke-width: 1.6; fill: none }
  .limit { stroke: #c2410c; stroke-width: 1.6; stroke-dasharray: 5 4 } .limit-words { fill: #c2410c }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } .ink { fill: #e6e9ed } .faint { fill: #9aa4af } .grid { stroke: #2b323a } .axis { stroke: #6b7682 }
    .measured { fill: #8cc4ff } .best { fill: #ffb077 } .on-dot { fill: #14181d } .predicted { stroke: #9aa4af }
    .worth { stroke: #8cc4ff } .limit { stroke: #ffb077 } .limit-words { fill: #ffb077 }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 12px }
  .on-dot { font-size: 10px; font-weight: 600 } .small { font-size: 11px }
</style>"""


class Mark(NamedTuple):
    """One point."""

    name: str
    peak: float
    """MiB or GiB, as the picture's unit says."""
    rate: float
    """A second."""
    measured: bool


def search_scatter(
    marks: Sequence[Mark], *, title: str, subtitle: str, unit: str, size: str = "GiB", limit: float | None = None
) -> str:
    """The picture; `unit` is what a rate counts, `size` what memory is counted in, `limit` the memory there is."""
    if not marks:
        return drawing.empty(title, "no point fits", kind="search")
    xs, ys = [mark.peak for mark in marks], [mark.rate for mark in marks]
    across_range = _room(xs, 0.12)
    if limit is not None and limit < 1.4 * max(xs):
        across_range = across_range[0], max(across_range[1], 1.04 * limit)
    across = drawing.scale(*across_range, LEFT, drawing.WIDTH - SIDE)
    up_range = _room(ys, 0.12)
    up = drawing.scale(*up_range, FLOOR, TOP)
    ranked = sorted((mark for mark in marks if mark.measured), key=lambda mark: -mark.rate)
    height = max(HEIGHT, TOP + ROW * (min(len(ranked), MOST_LABELS) + 1) + 60)
    body = [STYLE, rectangle(0, 0, drawing.WIDTH, height, "page")]
    body += [text(LEFT, 30, title, "ink title"), text(LEFT, 52, subtitle, "faint")]
    body += _axes(across_range, up_range, unit, size, across, up)
    if limit is not None and across_range[0] <= limit <= across_range[1]:
        body += [line(across(limit), TOP, across(limit), FLOOR, "limit")]
        body += [text(across(limit) - 5, TOP + 13, f"{limit:.4g} {size} there are", "limit-words", "end")]
    worth = leading(ranked)
    if len(worth) > 1:
        path = "L".join(f"{across(mark.peak):.1f} {up(mark.rate):.1f}" for mark in worth)
        body.append(f'<path class="worth" d="M{path}"/>')
    for mark in marks:
        if not mark.measured:
            body.append(
                dot(across(mark.peak), up(mark.rate), 4.5, "predicted", hover=f"predicted, {_told(mark, unit, size)}")
            )
    body += _numbered(ranked, unit, size, across, up)
    said = "; ".join(_told(mark, unit, size) for mark in ranked) or "nothing was measured"
    return drawing.svg(height, title, said, body, kind="search") + "\n"


def leading(marks: Sequence[Mark]) -> list[Mark]:
    """Those of which no other is both faster and leaner, from the leanest."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda mark: (mark.peak, -mark.rate)):
        if not found or mark.rate > found[-1].rate:
            found.append(mark)
    return found


def _room(values: Sequence[float], share: float) -> tuple[float, float]:
    size = (max(values) - min(values)) or max(values) * 0.2 or 1.0
    return max(min(values) - share * size, 0.0), max(values) + share * size


def _axes(
    xs: tuple[float, float], ys: tuple[float, float], unit: str, size: str, across: drawing.Scale, up: drawing.Scale
) -> list[str]:
    end, body = drawing.WIDTH - SIDE, []
    for value in ticks(*xs, 7):
        if xs[0] <= value <= xs[1]:
            body.append(line(across(value), FLOOR, across(value), FLOOR + 5, "axis"))
            body.append(text(across(value), FLOOR + 19, f"{value:g}", "faint", "middle"))
    for value in ticks(*ys, 6):
        if ys[0] <= value <= ys[1]:
            body.append(line(LEFT, up(value), end, up(value), "grid"))
            body.append(text(LEFT - 8, up(value) + 4, f"{value:,.10g}", "faint", "end"))
    body += [line(LEFT, FLOOR, end, FLOOR, "axis")]
    body += [text((LEFT + end) / 2, FLOOR + 42, f"memory at the peak, {size}", "ink", "middle")]
    return [*body, text(LEFT - 72, TOP - 10, f"{unit} per second", "ink")]


def _numbered(ranked: Sequence[Mark], unit: str, size: str, across: drawing.Scale, up: drawing.Scale) -> list[str]:
    side, body = drawing.WIDTH - SIDE + 22, []
    for number, mark in reversed(list(enumerate(ranked, start=1))):  # the best lies on top
        kind, hover = "best" if number == 1 else "measured", f"{number}: {_told(mark, unit, size)}"
        body += [dot(across(mark.peak), up(mark.rate), 8, kind, hover=hover)]
        body += [text(across(mark.peak), up(mark.rate) + 3.5, str(number), "on-dot", "middle", hover=hover)]
        if number > MOST_LABELS:
            continue
        at = TOP + 10 + ROW * (number - 1)
        body += [dot(side, at - 4, 8, kind), text(side, at - 0.5, str(number), "on-dot", "middle")]
        body.append(text(side + 15, at, f"{mark.rate:,.0f} {unit}/s, {mark.peak:.4g} {size}", "ink"))
        body.append(
            text(side + 15, at + 14, drawing.fitted(mark.name, SIDE - 48, character=5.9), "small faint", hover=hover)
        )
    at = TOP + 10 + ROW * min(len(ranked), MOST_LABELS)
    return [*body, dot(side, at - 4, 4.5, "predicted"), text(side + 15, at, "predicted, not measured", "faint")]


def _told(mark: Mark, unit: str, size: str) -> str:
    return f"{mark.name}: {mark.rate:,.0f} {unit}/s, {mark.peak:.4g} {size}"
