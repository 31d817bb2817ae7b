"""What all pictures share: an SVG with a title and a description, text, rectangles, axes, and how wide a text is.

Nothing here knows what is drawn. All text is escaped here and only here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from xml.sax.saxutils import escape, quoteattr

from wholestep.graph.counted import digits

WIDTH = 1000
NARROW = 372
"""The same pictures for the screen of a phone: drawn anew, so that text keeps its size."""
CHARACTER = 6.6
"""Width of a character of 12 px text, generously."""
LEGEND_LINE = 19
Scale = Callable[[float], float]


def svg(height: float, title: str, description: str, body: Iterable[str], *, kind: str, width: float = WIDTH) -> str:
    """The picture; `title` and `description` are read aloud in its place."""
    inside = "\n".join(body)
    return (
        f'<svg class="picture {kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label={quoteattr(title)} '
        f'xmlns="http://www.w3.org/2000/svg">\n<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n'
        f"{inside}\n</svg>"
    )


def empty(title: str, reason: str, *, kind: str, width: float = WIDTH) -> str:
    """In place of a picture for which there are no data."""
    body = [text(width / 2, 34, fitted(reason, width), "faint", "middle", hover=reason)]
    return svg(60, title, reason, body, kind=kind, width=width)


def is_narrow(width: float) -> bool:
    """Whether labels go above their bars and lists below their plots."""
    return width < 600


def text(x: float, y: float, words: str, kind: str = "ink", anchor: str = "start", *, hover: str = "") -> str:
    more = f"<title>{escape(hover)}</title>" if hover else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{more}{escape(words)}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, *, hover: str = "") -> str:
    more = f"<title>{escape(hover)}</title>" if hover else ""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}">{more}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def dot(x: float, y: float, radius: float, kind: str, *, hover: str = "") -> str:
    more = f"<title>{escape(hover)}</title>" if hover else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}">{more}</circle>'


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """A straight map from values to places."""
    size = (high - low) or 1.0
    return lambda value: start + (value - low) / size * (end - start)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between `low` and `high`."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough * 0.999)
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def fitted(words: str, width: float, *, character: float = CHARACTER) -> str:
    """The words, shortened in the middle to fit; empty where not even a few letters do."""
    room = int(width / character)
    if len(words) <= room:
        return words
    if room < 4:
        return ""
    head = (room - 1 + 1) // 2
    return f"{words[:head]}…{words[len(words) - (room - 1 - head) :]}"


def legend(entries: Iterable[tuple[str, str]], x: float, y: float, *, width: float = WIDTH) -> list[str]:
    """(class, words) from left to right, in as many lines as they need."""
    body = []
    for kind, words, at, line in _places(entries, x, width):
        below = y + LEGEND_LINE * line
        body += [rectangle(at, below - 9, 11, 11, kind), text(at + 16, below, words, "faint")]
    return body


def legend_height(entries: Iterable[tuple[str, str]], x: float, *, width: float = WIDTH) -> float:
    """What `legend` needs beyond its first line."""
    return LEGEND_LINE * max((line for *_, line in _places(entries, x, width)), default=0)


def _places(entries: Iterable[tuple[str, str]], x: float, width: float) -> Iterator[tuple[str, str, float, int]]:
    """(class, words, where it begins, in which line)."""
    at, line = x, 0
    for kind, words in entries:
        long = 32 + 0.92 * CHARACTER * len(words)
        if at > x and at + long - 16 > width:
            at, line = x, line + 1
        yield kind, words, at, line
        at += long


def show_ms(ms: float) -> str:
    """`1.25 s`, `12.3 ms`, `45 µs`."""
    if abs(ms) >= 999.5:
        return f"{digits(ms / 1000)} s"
    if abs(ms) >= 0.0995:
        return f"{digits(ms)} ms"
    if abs(ms) < 1e-6:  # no clock tells a nanosecond from nothing: what is left of a sum
        return "0 ms"
    return f"{digits(1000 * ms, 2)} µs"


def show_rate(per_second: float, unit: str) -> str:
    """`1.2 TFLOP/s`."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(per_second) >= 0.9995 * size:
            return f"{digits(per_second / size)} {letter}{unit}/s"
    return f"{digits(per_second)} {unit}/s"
