"""Predicted against measured as a scatter: (name, predicted, measured, was the answer right) in, one SVG file out.

On the diagonal both agree; the band around it is ten per cent. A wrong yes or no is a cross, so that misses are seen first. Both
axes are logarithmic: an error of a tenth is as wide at 2 GiB as at 100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from wholestep.report.loss_picture import ticks
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, rectangle, text

HEIGHT, TOP, LEFT, SIDE, FLOOR = 720, 78, 88, 300, 650
BAND = 0.10
MOST_NAMES = 15
STYLE = """<style>
  .page { fill: #ffffff } .ink { fill: #1f2328 } .faint { fill: #59636e } .grid { stroke: #e3e7eb } .same { stroke: #818b98 }
  .band { fill: #0b5cad; opacity: 0.09 } .right { fill: #0b5cad; opacity: 0.75 } .miss { stroke: #c2410c; stroke-width: 2.4 }
  .miss-words { fill: #c2410c } .title { font-size: 17px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14181d } .ink { fill: #e6e9ed } .faint { fill: #9aa4af } .grid { stroke: #2b323a } .same { stroke: #6b7682 }
    .band { fill: #8cc4ff; opacity: 0.12 } .right { fill: #8cc4ff } .miss { stroke: #ffb077 } .miss-words { fill: #ffb077 }
  }
  text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", Arial, sans-serif; font-size: 12px }
</style>"""

Compared = tuple[str, float, float, bool]


def predicted_scatter(points: Sequence[Compared], *, title: str, unit: str) -> str:
    """The picture; without points it says so."""
    if not points:
        return drawing.empty(title, "nothing was measured yet", kind="scatter")
    values = [value for _, predicted, measured, _ in points for value in (predicted, measured)]
    low, high = math.log(min(values) / 1.25), math.log(max(values) * 1.25)
    end = drawing.WIDTH - SIDE
    across, up = drawing.scale(low, high, LEFT, end), drawing.scale(low, high, FLOOR, TOP)
    errors = sorted(abs(predicted / measured - 1) for _, predicted, measured, _ in points)
    misses = sum(not right for *_, right in points)
    spread = f"median {_percent(errors[len(errors) // 2])}, largest {_percent(errors[-1])}"
    said = f"{len(points)} steps, {misses} wrong answers; error: {spread}"
    body = [STYLE, rectangle(0, 0, drawing.WIDTH, HEIGHT, "page")]
    body += [text(LEFT, 30, title, "ink title"), text(LEFT, 52, said, "faint")]
    body += _ground(low, high, unit, across, up)
    for name, predicted, measured, right in points:
        x, y = across(math.log(predicted)), up(math.log(measured))
        hover = f"{name}: predicted {predicted:.2f} {unit}, measured {measured:.2f} {unit}"
        body += [dot(x, y, 5, "right", hover=hover)] if right else _cross(x, y)
    body += _misses(points, end + 24)
    return drawing.svg(HEIGHT, title, said, body, kind="scatter") + "\n"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ground(low: float, high: float, unit: str, across: drawing.Scale, up: drawing.Scale) -> list[str]:
    end = drawing.WIDTH - SIDE
    more = math.log(1 + BAND)
    corners = [
        (low, low - more),
        (low, low + more),
        (high - more, high),
        (high, high),
        (high, high - more),
        (low + more, low),
    ]
    inside = [(min(max(x, low), high), min(max(y, low), high)) for x, y in corners]
    drawn = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in inside)
    body = [f'<polygon class="band" points="{drawn}"/>', line(across(low), up(low), across(high), up(high), "same")]
    for value in _round_numbers(math.exp(low), math.exp(high)):
        place = math.log(value)
        if low <= place <= high:
            body += [
                line(across(place), TOP, across(place), FLOOR, "grid"),
                line(LEFT, up(place), end, up(place), "grid"),
            ]
            body.append(text(across(place), FLOOR + 18, f"{value:g}", "faint", "middle"))
            body.append(text(LEFT - 8, up(place) + 4, f"{value:g}", "faint", "end"))
    body.append(text((LEFT + end) / 2, FLOOR + 42, f"predicted, {unit}", "ink", "middle"))
    return [*body, text(LEFT - 62, TOP - 10, f"measured, {unit}", "ink")]


def _round_numbers(low: float, high: float) -> list[float]:
    """Even steps over a narrow range; over a wide one 1, 2, 5 and their tens."""
    if high < 4 * low:
        return ticks(low, high, 8)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**power for power in powers for m in (1, 2, 5)]


def _cross(x: float, y: float) -> list[str]:
    return [line(x - 6, y - 6, x + 6, y + 6, "miss"), line(x - 6, y + 6, x + 6, y - 6, "miss")]


def _misses(points: Sequence[Compared], x: float) -> list[str]:
    wrong = [point for point in points if not point[3]]
    body = [text(x, TOP + 10, "wrong answers:" if wrong else "no wrong answer", "miss-words" if wrong else "ink")]
    for number, (name, predicted, measured, _) in enumerate(wrong[:MOST_NAMES]):
        y = TOP + 34 + 36 * number
        body.append(text(x, y, drawing.fitted(name, SIDE - 40), "ink"))
        body.append(text(x, y + 15, f"predicted {predicted:.1f}, measured {measured:.1f}", "faint"))
    return body
