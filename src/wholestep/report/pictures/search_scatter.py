"""Throughput against peak memory: points of a search in, one SVG file out that needs nothing else.

x is memory at the peak, y what a second trains on. Filled marks were measured, hollow ones are predictions as the measured ones
corrected them; the line joins the measured points of which no other is both faster and leaner. Measured points are numbered,
and the numbers are told beside the plot, so that words never lie on each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, text
from wholestep.report.pictures.plot import FLOOR, MOST_LABELS, TOP, Plot, style

LEFT, SIDE = 90, 372
STYLE = style(
    light=""".measured { fill: #0b5cad } .best { fill: #c2410c }
  .predicted { fill: none; stroke: #59636e; stroke-width: 1.4 } .worth { stroke: #0b5cad; stroke-width: 1.6; fill: none }
  .limit { stroke: #c2410c; stroke-width: 1.6; stroke-dasharray: 5 4 } .limit-words { fill: #c2410c }""",
    dark=""".measured { fill: #8cc4ff } .best { fill: #ffb077 } .predicted { stroke: #9aa4af }
    .worth { stroke: #8cc4ff } .limit { stroke: #ffb077 } .limit-words { fill: #ffb077 }""",
)


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
    plot = Plot(LEFT, SIDE, across_range, _room(ys, 0.12))
    across, up = plot.across, plot.up
    ranked = sorted((mark for mark in marks if mark.measured), key=lambda mark: -mark.rate)
    height = plot.height(min(len(ranked), MOST_LABELS) + 1)
    below, above = f"memory at the peak, {size}", f"{unit} per second"
    body = [STYLE, *plot.frame(height, title, subtitle, below=below, above=above)]
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
    body += _numbered(plot, ranked, unit, size)
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


def _numbered(plot: Plot, ranked: Sequence[Mark], unit: str, size: str) -> list[str]:
    body = []
    for number, mark in reversed(list(enumerate(ranked, start=1))):  # the best lies on top
        kind, hover = "best" if number == 1 else "measured", f"{number}: {_told(mark, unit, size)}"
        body += plot.numbered(mark.peak, mark.rate, number, kind, hover)
        if number <= MOST_LABELS:
            figures = f"{mark.rate:,.0f} {unit}/s, {mark.peak:.4g} {size}"
            body += plot.entry(number - 1, number, kind, figures, mark.name, hover)
    return body + plot.plain_entry(min(len(ranked), MOST_LABELS), 4.5, "predicted", "predicted, not measured")


def _told(mark: Mark, unit: str, size: str) -> str:
    return f"{mark.name}: {mark.rate:,.0f} {unit}/s, {mark.peak:.4g} {size}"
