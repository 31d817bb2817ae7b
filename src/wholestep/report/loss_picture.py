"""The loss of a run as one SVG file: raw values, a light mean, held-out marks, skipped steps.

In: the rows of metrics.jsonl. Out: SVG text that needs nothing else - no script, no font, no link - and is readable on a light
and on a dark page. The axis of the loss is logarithmic when the loss falls by more than a factor of ten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from wholestep.report.pictures.drawing import scale, text, ticks
from wholestep.report.smooth import Point, losses_of, smoothed, thinned

WIDTH, HEIGHT = 960, 500
LEFT, RIGHT, TOP, BOTTOM = 78, 24, 74, 58
LOG_FROM = 10.0
MOST_POINTS = 900
"""More than the picture has columns shows nothing more."""
STYLE = """
  .page { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #59636e } .grid { stroke: #d9dee3 } .axis { stroke: #818b98 }
  .raw { stroke: #4c8fd6; fill: none } .raw-dot { fill: #4c8fd6 } .mean { stroke: #0b5cad; fill: none }
  .held { stroke: #c2410c; fill: #c2410c } .skipped { stroke: #b42318 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } .ink { fill: #e6e9ed } .faint { fill: #9aa4af } .grid { stroke: #2b323a } .axis { stroke: #6b7682 }
    .raw { stroke: #5b93c9 } .raw-dot { fill: #5b93c9 } .mean { stroke: #8cc4ff }
    .held { stroke: #ffb077; fill: #ffb077 } .skipped { stroke: #ff8a80 }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 13px }
  .title { font-size: 17px; font-weight: 600 }
"""


def loss_picture(rows: Sequence[dict[str, Any]], *, title: str, subtitle: str = "") -> str:
    """The picture, as SVG; of an empty run too, which then says so."""
    losses: list[Point] = [(float(step), loss) for step, loss in losses_of(rows)]
    held: list[Point] = [(float(step), loss) for step, loss in losses_of(rows, "held_out_loss")]
    skipped = [float(row["step"]) for row in rows if row.get("skipped")]
    body = [f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>', text(LEFT, 32, title, "ink title")]
    if subtitle:
        body.append(text(LEFT, 54, subtitle, "faint"))
    if not losses:
        body.append(text(WIDTH / 2, HEIGHT / 2, "no step has been taken yet", "faint", "middle"))
    else:
        body += _plot(losses, held, skipped)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _plot(losses: list[Point], held: list[Point], skipped: list[float]) -> list[str]:
    low, high, logarithmic = _range(losses, held)
    mean = smoothed(losses)
    if logarithmic:  # of what is seen: the mean of the logarithms
        mean = [(x, math.exp(y)) for x, y in smoothed([(x, math.log(y)) for x, y in losses])]
    first, last = losses[0][0], max(losses[-1][0], *(x for x, _ in held), losses[0][0] + 1)
    across = scale(first, last, LEFT, WIDTH - RIGHT)
    up = scale(*((math.log(low), math.log(high)) if logarithmic else (low, high)), HEIGHT - BOTTOM, TOP)

    def place(point: Point) -> str:
        y = min(max(point[1], low), high)
        return f"{across(point[0]):.1f},{up(math.log(y) if logarithmic else y):.1f}"

    body = _axes(first, last, low, high, logarithmic, across, up)
    raw = thinned(losses, MOST_POINTS)
    if len(raw) > 60:
        body.append(f'<polyline class="raw" stroke-width="1" opacity="0.45" points="{" ".join(map(place, raw))}"/>')
    else:
        body += [f'<circle class="raw-dot" opacity="0.6" r="2.5" {_centre(place(point))}/>' for point in raw]
    body.append(
        '<polyline class="mean" stroke-width="2.2" stroke-linejoin="round" '
        f'points="{" ".join(map(place, thinned(mean, MOST_POINTS)))}"/>'
    )
    if len(held) > 1:
        dashes = 'style="fill:none" stroke-width="1.2" stroke-dasharray="4 4" opacity="0.8"'
        body.append(f'<polyline class="held" {dashes} points="{" ".join(map(place, held))}"/>')
    body += [f'<circle class="held" stroke="none" r="4" {_centre(place(point))}/>' for point in held]
    floor = HEIGHT - BOTTOM
    body += [
        f'<path class="skipped" stroke-width="1.5" d="M{across(x):.1f} {floor}v-9"/>'
        for x in skipped[:: len(skipped) // 300 + 1]
    ]
    return body + _legend(bool(held), len(skipped))


def _range(losses: list[Point], held: list[Point]) -> tuple[float, float, bool]:
    """(lowest, highest, logarithmic): a few wild values do not flatten all the others."""
    ordered = sorted(y for _, y in losses)
    kept = ordered[len(ordered) // 200 : len(ordered) - len(ordered) // 200]
    values = [*kept, losses[0][1], *(y for _, y in held)]
    low, high = min(values), max(values)
    if ordered[0] > 0 and low > 0 and high / low > LOG_FROM:
        return low / 1.08, high * 1.08, True
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin, False


def _axes(
    first: float, last: float, low: float, high: float, logarithmic: bool, across: Callable[[float], float],
    up: Callable[[float], float],
) -> list[str]:  # fmt: skip
    floor, body = HEIGHT - BOTTOM, []
    for value in log_ticks(low, high) if logarithmic else ticks(low, high, 6):
        y = up(math.log(value) if logarithmic else value)
        body.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        body.append(text(LEFT - 10, y + 4.5, f"{value:.6g}", "faint", "end"))
    steps = [t for t in ticks(first, last, 8) if t == int(t)]
    if not steps or across(steps[0]) - LEFT > 40:
        steps.insert(0, first)
    for value in steps:
        x = across(value)
        body.append(f'<path class="axis" d="M{x:.1f} {floor}v5"/>')
        body.append(text(x, floor + 21, f"{int(value):,}", "faint", "middle"))
    body.append(f'<path class="axis" d="M{LEFT} {floor}H{WIDTH - RIGHT}"/>')
    body.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "step", "ink", "middle"))
    label = "loss (logarithmic)" if logarithmic else "loss"
    middle = (TOP + floor) / 2
    body.append(
        f'<text class="ink" text-anchor="middle" transform="translate(20 {middle:.0f}) rotate(-90)">{escape(label)}</text>'
    )
    return body


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten; only the powers where that would be many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1,)):
        found = [m * 10.0**p for p in powers for m in digits if low <= m * 10.0**p <= high]
        if len(found) <= 9:
            break
    return found or [low, high]


def _legend(held: bool, skipped: int) -> list[str]:
    """Right to left, on the line of the title."""
    entries = [("raw", "loss of each step"), ("mean", "mean around it")]
    entries += [("held", "held out")] if held else []
    entries += [("skipped", f"{skipped} skipped")] if skipped else []
    body, x = [], float(WIDTH - RIGHT)
    for kind, label in reversed(entries):
        x -= 7.2 * len(label) + 6
        body.append(text(x, 32, label, "faint"))
        x -= 26
        y = 27.5
        if kind == "held":
            body.append(f'<circle class="held" stroke="none" r="4" cx="{x + 12:.1f}" cy="{y}"/>')
        elif kind == "skipped":
            body.append(f'<path class="skipped" stroke-width="1.5" d="M{x + 12:.1f} {y + 4.5}v-9"/>')
        else:
            width = 2.2 if kind == "mean" else 1
            body.append(f'<path class="{kind}" stroke-width="{width}" d="M{x:.1f} {y}h20"/>')
        x -= 14
    return body


def _centre(place: str) -> str:
    x, y = place.split(",")
    return f'cx="{x}" cy="{y}"'
