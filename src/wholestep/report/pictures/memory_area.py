"""Memory over one step as stacked areas: a MemoryProfile's JSON in, SVG out.

Kinds of memory lie on each other in the order in which they last: what is always there at the bottom. The outline of eager
PyTorch is stretched phase by phase onto the same bands, since both count allocations and not time. The peak is marked and
names the three largest tensors alive there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import Scale, line, rectangle, text, ticks

LAYERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("weights", "weights and buffers", ("weights", "buffers")),
    ("state", "optimizer state", ("optimizer state",)),
    ("gradients", "gradients", ("gradients",)),
    ("saved", "saved activations", ("saved activations",)),
    ("temporary", "temporaries", ("temporaries",)),
    ("other", "batch and other", ("batch", "workspace", "other")),
)
"""(class, words, categories), from the bottom."""
HEIGHT, TOP, BOTTOM, LEFT, RIGHT = 470, 124, 44, 70, 18
FLOOR = HEIGHT - BOTTOM
TITLE = "Memory over one step"


def memory_area(
    memory: Mapping[str, Any] | None, *, eager: Mapping[str, Any] | None = None, budget: int | None = None,
    capacity: int | None = None, width: float = drawing.WIDTH,
) -> str:  # fmt: skip
    """The picture; without a timeline it says so."""
    timeline: Sequence[Any] = (memory or {}).get("timeline") or ()
    if memory is None or not timeline or not memory["peak_bytes"]:
        return drawing.empty(TITLE, "memory was not measured", kind="memory", width=width)
    last = max(memory["num_instants"] - 1, 1)
    across = drawing.scale(0, last, LEFT, width - RIGHT)
    highest = max([memory["peak_bytes"], (eager or {}).get("peak_bytes") or 0])
    shown = [b for b in (budget, capacity) if b is not None and b <= 1.6 * highest]
    up = drawing.scale(0, 1.04 * max([highest, *shown]), FLOOR, TOP)
    body = [*_bands(memory, across), *_grid(1.04 * max([highest, *shown]), up, width), *_areas(timeline, across, up)]
    if eager is not None and eager.get("timeline"):
        body.append(_outline(eager, memory, across, up))
    body += _limits(budget, capacity, shown, up, width)
    body += _peak(memory, across, up, width)
    entries = [(kind, words) for kind, words, _ in LAYERS] + ([("outline-key", "eager PyTorch")] if eager else [])
    left = 4 if drawing.is_narrow(width) else LEFT
    body += drawing.legend(entries, left, HEIGHT - 8, width=width)
    height = HEIGHT + drawing.legend_height(entries, left, width=width)
    return drawing.svg(height, TITLE, _description(memory, eager), body, kind="memory", width=width)


def layer_bytes(split: Mapping[str, int], categories: Sequence[str]) -> int:
    return sum(split.get(category, 0) for category in categories)


def _description(memory: Mapping[str, Any], eager: Mapping[str, Any] | None) -> str:
    parts = [f"{words} {show_bytes(layer_bytes(memory['at_peak'], c))}" for _, words, c in LAYERS]
    beside = "" if eager is None else f"; eager PyTorch peaks at {show_bytes(eager['peak_bytes'])}"
    return f"peak {show_bytes(memory['peak_bytes'])}: {', '.join(parts)}{beside}"


def _areas(timeline: Sequence[Any], across: Scale, up: Scale) -> list[str]:
    """One polygon per layer, drawn as steps: memory changes at once."""
    base = [0.0] * len(timeline)
    body = []
    for kind, words, categories in LAYERS:
        top = [below + layer_bytes(split, categories) for below, (_, split) in zip(base, timeline)]
        if top != base:
            upper = _steps(timeline, top, across, up)
            lower = list(reversed(_steps(timeline, base, across, up)))
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in upper + lower)
            body.append(f'<polygon class="{kind}" points="{points}"><title>{words}</title></polygon>')
        base = top
    return body


def _steps(timeline: Sequence[Any], values: Sequence[float], across: Scale, up: Scale) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for (instant, _), value in zip(timeline, values):
        if points:
            points.append((across(instant), points[-1][1]))
        points.append((across(instant), up(value)))
    return points


def _outline(eager: Mapping[str, Any], memory: Mapping[str, Any], across: Scale, up: Scale) -> str:
    warp = _warp(eager, memory)
    points: list[tuple[float, float]] = []
    for instant, split in eager["timeline"]:
        x = across(warp(instant))
        if points:
            points.append((x, points[-1][1]))
        points.append((x, up(sum(split.values()))))
    drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    hover = f"eager PyTorch, peak {show_bytes(eager['peak_bytes'])}"
    return f'<polyline class="outline" points="{drawn}"><title>{hover}</title></polyline>'


def _warp(one: Mapping[str, Any], other: Mapping[str, Any]) -> Scale:
    """Instants of `one` -> instants of `other`, phase onto phase where both have the same phases."""
    mine, theirs = one["phases"], other["phases"]
    whole = drawing.scale(0, max(one["num_instants"] - 1, 1), 0, max(other["num_instants"] - 1, 1))
    if not mine or [p["name"] for p in mine] != [p["name"] for p in theirs]:
        return whole

    def warped(instant: float) -> float:
        for a, b in zip(mine, theirs):
            if a["start"] <= instant < a["end"]:
                return drawing.scale(a["start"], a["end"], b["start"], b["end"])(instant)
        return theirs[0]["start"] if instant < mine[0]["start"] else theirs[-1]["end"] - 1

    return warped


def _bands(memory: Mapping[str, Any], across: Scale) -> list[str]:
    body = []
    for number, phase in enumerate(memory["phases"]):
        x, end = across(phase["start"]), across(min(phase["end"], memory["num_instants"] - 1))
        hover = f"{phase['name']}: peak {show_bytes(phase['peak_bytes'])}"
        body.append(rectangle(x, TOP, end - x, FLOOR - TOP, f"band{number % 2}", hover=hover))
        if drawing.fitted(phase["name"], end - x) == phase["name"]:  # half a word says nothing; the hover has it
            body.append(text((x + end) / 2, FLOOR + 16, phase["name"], "faint", "middle", hover=hover))
    return body


def _grid(highest: float, up: Scale, width: float) -> list[str]:
    unit = next((u for u in (2**30, 2**20, 2**10, 1) if highest >= 2 * u), 1)
    body = []
    for value in ticks(0, highest / unit, 5):
        y = up(value * unit)
        body += [
            line(LEFT, y, width - RIGHT, y, "grid"),
            text(LEFT - 8, y + 4, show_bytes(value * unit), "faint", "end"),
        ]
    return body


def _limits(
    budget: int | None, capacity: int | None, shown: Sequence[int], up: Scale, width: float
) -> list[str]:  # fmt: skip
    body = []
    for bytes_, kind, words in ((budget, "budget", "budget"), (capacity, "capacity", "memory of the device")):
        if bytes_ is not None and bytes_ in shown:
            y = up(bytes_)
            body.append(line(LEFT, y, width - RIGHT, y, kind))
            body.append(text(width - RIGHT - 4, y - 5, f"{words} {show_bytes(bytes_)}", "ink", "end"))
    return body


def _peak(memory: Mapping[str, Any], across: Scale, up: Scale, width: float) -> list[str]:
    """A mark, and above the plot what the peak holds; the words lean away from the nearer edge."""
    x, y = across(memory["peak_instant"]), up(memory["peak_bytes"])
    right = x > width / 2
    anchor, at = ("end", x - 10) if right else ("start", x + 10)
    if drawing.is_narrow(width):  # from the edge, whatever the place of the peak
        anchor, at, right = "start", 4.0, False
    body = [line(x, TOP - 18 if drawing.is_narrow(width) else 20, x, y, "leader"), drawing.dot(x, y, 4, "mark")]
    body.append(text(at, 30, f"peak {show_bytes(memory['peak_bytes'])}", "ink strong", anchor))
    for number, held in enumerate(memory["top"][:3]):
        owner = (
            ".".join(p for p in (held["module"], held["operator"]) if p)
            or held["name"]
            or held["why"]
            or "no name is known"
        )
        name = held["name"] if held["category"] in ("weights", "buffers", "optimizer state") else owner
        name = name or owner
        words = f"{show_bytes(held['bytes'])}  {held['category']}: {name}"
        shape = "x".join(map(str, held["shape"] or ()))
        room = at - LEFT if right else width - 4 - at
        hover = f"{words} {shape} {held['why']}"
        body.append(text(at, 52 + 19 * number, drawing.fitted(words, room), "faint", anchor, hover=hover))
    return body
