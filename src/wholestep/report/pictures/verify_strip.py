"""How far every value of a step lies from eager PyTorch: one dot per tensor, error over what is allowed, SVG out.

Kinds of values are rows; the axis is logarithmic and ends where the rule is broken. Values that are equal bit for bit have a
column of their own at the left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import dot, line, rectangle, text

TITLE = "Verified against eager PyTorch"
LEFT, RIGHT, ROW, TOP, EQUAL = 116, 30, 44, 8, 190
LOWEST, HIGHEST = -4.0, 1.0
"""Powers of ten of error over tolerance; what lies outside is drawn at the edge."""


def verify_strip(rows: Sequence[Mapping[str, Any]] | None, *, width: float = drawing.WIDTH) -> str:
    """The picture; without rows it says so."""
    if not rows:
        return drawing.empty(TITLE, "the step was not verified", kind="strip", width=width)
    left, equal = (72, 92) if drawing.is_narrow(width) else (LEFT, EQUAL)
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["kind"]].append(row)
    height = TOP + ROW * len(kinds) + 44
    floor = height - 44
    across = drawing.scale(LOWEST, HIGHEST, left + equal, width - RIGHT)
    body = [rectangle(across(0), TOP, across(HIGHEST) - across(0), floor - TOP, "broken")]
    for power in range(int(LOWEST), int(HIGHEST) + 1):
        body.append(line(across(power), TOP, across(power), floor, "grid" if power else "limit"))
        words = "allowed" if power == 0 else "" if drawing.is_narrow(width) and power % 2 else f"{10.0**power:g}"
        body += [text(across(power), floor + 16, words, "faint", "middle")] if words else []
    words = "equal bits" if drawing.is_narrow(width) else "bit for bit equal"
    body.append(text(left + equal / 2 - 10, floor + 16, words, "faint", "middle"))
    body.append(
        text((across(LOWEST) + across(HIGHEST)) / 2, height - 8, "error over what the rule allows", "ink", "middle")
    )
    for number, (kind, listed) in enumerate(kinds.items()):
        body += _row(kind, listed, TOP + ROW * number, across, left, width)
    failed = [row["name"] for row in rows if not row["ok"]]
    said = (
        f"{len(rows)} values, {sum(row['bitwise'] for row in rows)} equal bit for bit, {len(failed)} outside the rule"
    )
    return drawing.svg(
        height, TITLE, said + (f": {', '.join(failed[:5])}" if failed else ""), body, kind="strip", width=width
    )


def _row(
    kind: str, rows: Sequence[Mapping[str, Any]], y: float, across: drawing.Scale, left: float, width: float
) -> list[str]:  # fmt: skip
    body = [line(left, y + ROW, width - RIGHT, y + ROW, "grid"), text(left - 8, y + 26, kind, "ink", "end")]
    equal = [row for row in rows if row["bitwise"] or row["badness"] == 0]
    if equal:
        body.append(dot(left + 8, y + 22, 5, "good", hover=f"{len(equal)} {kind} values"))
        body.append(text(left + 17, y + 26, f"{len(equal)} of {len(rows)}", "faint"))
    others = sorted((row for row in rows if not (row["bitwise"] or row["badness"] == 0)), key=lambda row: row["name"])
    for number, row in enumerate(others):
        badness = row["badness"]
        power = HIGHEST if badness is None else min(max(math.log10(badness), LOWEST), HIGHEST)
        offset = (number * 0.618034) % 1.0  # spread evenly over the height, the same in every report
        said = "no finite error" if badness is None else f"{badness:.3g} of what is allowed"
        place = y + 8 + offset * (ROW - 16)
        body.append(dot(across(power), place, 4, "good" if row["ok"] else "bad", hover=f"{row['name']}: {said}"))
    return body
