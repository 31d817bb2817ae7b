"""The memory at the peak by module, as an icicle: the tree of `lower.footprint.blocks.icicle` in, SVG out.

A box is as wide as the bytes of its module with everything inside it; equal layers are one box with their number. The colour
is that of the kind of memory that is largest inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import rectangle, text
from wholestep.report.pictures.memory_area import LAYERS

TITLE = "Memory at the peak, by module"
LEFT, RIGHT, ROW, DEEPEST = 4, 4, 36, 6
NARROWEST = 1.5
"""Pixels: what is narrower is left out, and its place stays empty."""


def module_icicle(tree: Mapping[str, Any] | None, *, width: float = drawing.WIDTH) -> str:
    """The picture; without bytes it says so."""
    if not tree or not tree["bytes"]:
        return drawing.empty(TITLE, "memory was not measured", kind="icicle", width=width)
    body: list[str] = []
    root = dict(tree) | {"name": "the whole step", "names": ["the whole step"]}
    depth = _draw(root, LEFT, width - LEFT - RIGHT, 0, 1, body)
    height = float((depth + 1) * ROW + 8)
    largest = sorted(tree["children"], key=lambda child: -child["bytes"])[:3]
    said = ", ".join(f"{label(child)} {show_bytes(child['bytes'])}" for child in largest)
    entries = [(kind, words) for kind, words, _ in LAYERS]
    body += drawing.legend(entries, LEFT, height + 18, width=width)
    height += 28 + drawing.legend_height(entries, LEFT, width=width)
    return drawing.svg(height, TITLE, f"{show_bytes(tree['bytes'])}; largest: {said}", body, kind="icicle", width=width)


def label(place: Mapping[str, Any]) -> str:
    """`blocks`, or `0-23 x24` for equal layers."""
    if place["count"] == 1:
        return str(place["name"])
    names = place["names"]
    run = [int(name) for name in names if str(name).isdigit()]
    if run == list(range(run[0], run[0] + len(names))) if run else False:
        return f"{names[0]}-{names[-1]} ×{place['count']}"
    return f"{names[0]}, ... ×{place['count']}"


def totals(place: Mapping[str, Any], times: int = 1) -> Counter[str]:
    """Bytes by category of a place and all inside it; children of a folded place stand for all of its copies."""
    times *= place["count"]
    found: Counter[str] = Counter({name: times * count for name, count in place["own"].items()})
    for child in place["children"]:
        found.update(totals(child, times))
    return found


def _draw(place: Mapping[str, Any], x: float, width: float, depth: int, times: int, body: list[str]) -> int:
    """Boxes of a place and what is inside it; the depth that was reached."""
    split = totals(place)
    hover = f"{label(place)}: {show_bytes(place['bytes'] * times)}; " + ", ".join(
        f"{name} {show_bytes(count * times)}" for name, count in split.most_common() if count
    )
    body.append(rectangle(x, depth * ROW, width - 1, ROW - 2, f"box {_kind(split)}", hover=hover))
    size = show_bytes(place["bytes"] * times)
    body += _words(label(place), size, x, depth, width, hover)
    deepest = depth
    if not place["bytes"] or depth + 1 >= DEEPEST:
        return deepest
    scale = width / place["bytes"] * place["count"]
    own = sum(place["own"].values())
    at = x
    for child in sorted(place["children"], key=lambda child: -child["bytes"]):
        wide = child["bytes"] * scale
        if wide >= NARROWEST:
            deepest = max(deepest, _draw(child, at, wide, depth + 1, times * place["count"], body))
        at += wide
    if own and place["children"] and own * scale >= NARROWEST:
        mine = Counter(place["own"])
        text_ = "no module" if depth == 0 else "its own"
        whole = own * times * place["count"]
        copies = times * place["count"]
        hover = f"{text_}: {show_bytes(whole)}; " + ", ".join(
            f"{n} {show_bytes(c * copies)}" for n, c in mine.most_common()
        )
        body.append(rectangle(at, (depth + 1) * ROW, own * scale - 1, ROW - 2, f"box own {_kind(mine)}", hover=hover))
        body += _words(text_, show_bytes(whole), at, depth + 1, own * scale, hover)
        deepest = max(deepest, depth + 1)
    return deepest


def _words(name: str, size: str, x: float, depth: int, width: float, hover: str) -> list[str]:
    """Name and size where both fit, the name alone where it does, else nothing: the hover text has all."""
    for words in (f"{name}  {size}", name):
        if 7.2 * len(words) <= width - 10:
            return [text(x + 5, depth * ROW + 22, words, "on-box", hover=hover)]
    return []


def _kind(split: Mapping[str, int]) -> str:
    sizes = {kind: sum(split.get(name, 0) for name in categories) for kind, _, categories in LAYERS}
    return max(sizes, key=lambda kind: sizes[kind])
