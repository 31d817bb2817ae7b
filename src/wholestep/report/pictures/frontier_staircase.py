"""Time against memory as a staircase: knees in, one SVG file out that needs nothing else.

x is memory on the card, y the time of a step. Each knee is a plan; on the tread to its right nothing faster fits. Left of the
smallest plan no plan fits: that zone is shaded. Every knee is numbered, and the numbers are told beside the plot, so that words
never lie on each other. Peers, where given, are hollow marks.
"""

from __future__ import annotations

from collections.abc import Sequence

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, rectangle, text
from wholestep.report.pictures.plot import FLOOR, MOST_LABELS, TOP, Plot, style

LEFT, SIDE = 78, 392
CARDS_GB = (8, 12, 16, 24, 32, 40, 48, 80, 141)
STYLE = style(
    light=""".none { fill: #d1242f; opacity: 0.09 } .none-words { fill: #b42318 }
  .stair { stroke: #0b5cad; stroke-width: 2.4; fill: none } .knee { fill: #0b5cad } .chosen { fill: #c2410c }
  .card { stroke: #818b98; stroke-dasharray: 3 4 } .budget { stroke: #c2410c; stroke-width: 1.6 } .budget-words { fill: #c2410c }
  .peer { fill: none; stroke: #59636e; stroke-width: 1.6 }""",
    dark=""".none { fill: #ff8a80; opacity: 0.13 } .none-words { fill: #ff8a80 } .stair { stroke: #8cc4ff } .knee { fill: #8cc4ff }
    .chosen { fill: #ffb077 } .budget { stroke: #ffb077 } .budget-words { fill: #ffb077 }
    .peer { stroke: #9aa4af } .card { stroke: #6b7682 }""",
)

Knee = tuple[float, float, str]
"""(GiB on the card, time, what changed against the knee before)."""
Peer = tuple[str, float, float]
"""(name, GiB, ms)."""


def frontier_staircase(
    knees: Sequence[Knee], *, title: str, subtitle: str, unit: str = "ms", budget: float | None = None, chosen: int | None = None,
    peers: Sequence[Peer] = (),
) -> str:  # fmt: skip
    """The picture; knees from the most memory to the least."""
    if not knees:
        return drawing.empty(title, "there is no plan", kind="frontier")
    xs = [x for x, _, _ in knees] + [gib for _, gib, _ in peers]
    ys = [y for _, y, _ in knees] + [ms for _, _, ms in peers]
    low, high = _range(xs, budget)
    bottom, top = min(ys) - 0.12 * _size(ys), max(ys) + 0.12 * _size(ys)
    plot = Plot(LEFT, SIDE, (low, high), (max(bottom, 0.0), top))
    across, up = plot.across, plot.up
    height = plot.height(min(len(knees), MOST_LABELS) + len(peers))
    above = "step, relative" if unit == "x" else f"step, {unit}"
    body = [STYLE, *plot.frame(height, title, subtitle, below="memory on the card, GiB", above=above)]
    body += _impossible(min(x for x, _, _ in knees), low, across)
    body += _verticals(low, high, budget, across)
    body.append(f'<path class="stair" d="{_path(knees, across, up)}"/>')
    body += _marks(plot, knees, peers, chosen, unit)
    said = "; ".join(f"{x:.1f} GiB {y:.4g} {unit} {words}" for x, y, words in knees)
    return drawing.svg(height, title, said, body, kind="frontier") + "\n"


def _size(values: Sequence[float]) -> float:
    return (max(values) - min(values)) or max(values) * 0.1 or 1.0


def _range(xs: Sequence[float], budget: float | None) -> tuple[float, float]:
    """Room at both sides; the budget is in the picture when it is not far off."""
    room = 0.15 * _size(xs)
    low, high = max(min(xs) - 1.6 * room, 0.0), max(xs) + room
    if budget is not None and low - 2 * room <= budget <= high + 2 * room:
        low, high = min(low, max(budget - room, 0.0)), max(high, budget + room)
    return low, high


def _impossible(least: float, low: float, across: drawing.Scale) -> list[str]:
    width = across(least) - across(low)
    body = [rectangle(across(low), TOP, width, FLOOR - TOP, "none", hover=f"less than {least:.1f} GiB: no plan fits")]
    words = drawing.fitted("no plan fits", width - 8)
    return body + ([text(across(low) + 6, FLOOR - 8, words, "none-words")] if words else [])


def _verticals(low: float, high: float, budget: float | None, across: drawing.Scale) -> list[str]:
    """Cards by the name of their size, in GB as vendors print it; and the budget."""
    body = []
    for gb in CARDS_GB:
        gib = gb * 1e9 / 2**30
        if low < gib < high:
            body += [
                line(across(gib), TOP, across(gib), FLOOR, "card"),
                text(across(gib), TOP - 6, f"{gb} GB", "faint", "middle"),
            ]
    if budget is not None and low <= budget <= high:
        body += [line(across(budget), TOP, across(budget), FLOOR, "budget")]
        body += [text(across(budget) + 5, TOP + 13, f"budget {budget:.4g} GiB", "budget-words")]
    return body


def _path(knees: Sequence[Knee], across: drawing.Scale, up: drawing.Scale) -> str:
    """From the right edge: along the tread to a knee, then up to the next plan."""
    parts = [f"M{drawing.WIDTH - SIDE:.1f} {up(knees[0][1]):.1f}"]
    for x, y, _ in knees:
        parts += [f"V{up(y):.1f}", f"H{across(x):.1f}"]
    return "".join(parts)


def _marks(plot: Plot, knees: Sequence[Knee], peers: Sequence[Peer], chosen: int | None, unit: str) -> list[str]:
    body, shown = [], _shown(len(knees), chosen)
    for number, (x, y, words) in enumerate(knees, start=1):
        kind = "chosen" if number - 1 == chosen else "knee"
        hover = f"{number}: {x:.2f} GiB, {y:.4g} {unit}. {words}"
        if number - 1 not in shown:
            body.append(dot(plot.across(x), plot.up(y), 3.5, kind, hover=hover))
            continue
        row, figures = shown.index(number - 1), f"{x:.1f} GiB, {y:.4g} {unit}"
        body += plot.numbered(x, y, number, kind, hover)
        body += plot.entry(row, number, kind, figures, words or "everything is kept", hover)
    for number, (name, gib, ms) in enumerate(peers):
        said = f"{name}: {gib:.1f} GiB, {ms:.4g} ms"
        body.append(dot(plot.across(gib), plot.up(ms), 6, "peer", hover=said))
        body += plot.plain_entry(len(shown) + number, 6, "peer", f"{said} (measured)")
    return body


def _shown(count: int, chosen: int | None) -> list[int]:
    """Which knees get words: all, or some that are evenly spread and the chosen one."""
    if count <= MOST_LABELS:
        return list(range(count))
    picked = {round(i * (count - 1) / (MOST_LABELS - 2)) for i in range(MOST_LABELS - 1)}
    return sorted(picked | ({chosen} if chosen is not None else set()))
