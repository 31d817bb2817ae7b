"""Predicted against measured: one bar per quantity, as a share of the measured value, with a band of 5 % around it; SVG out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.graph.bytes import show_bytes
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import line, rectangle, show_ms, text

TITLE = "Predicted against measured"
LEFT, RIGHT, ROW, TOP, BAND = 268, 270, 40, 10, 0.05


def predicted_bars(rows: Sequence[Mapping[str, Any]], *, width: float = drawing.WIDTH) -> str:
    """The picture; without a prediction it says so."""
    drawn = [row for row in rows if row["measured"]]
    if not drawn:
        return drawing.empty(TITLE, "nothing was predicted", kind="predicted", width=width)
    narrow = drawing.is_narrow(width)
    left, right, row_height = (4, 12, 66) if narrow else (LEFT, RIGHT, ROW)
    shares = [row["predicted"] / row["measured"] for row in drawn]
    across = drawing.scale(0, max(1.15, *shares), left, width - right)
    height = TOP + row_height * len(drawn) + 26
    body = [
        rectangle(
            across(1 - BAND), TOP, across(1 + BAND) - across(1 - BAND), height - TOP - 24, "five", hover="within 5 %"
        )
    ]
    for share in (0, 0.25, 0.5, 0.75, 1.0):
        body.append(line(across(share), TOP, across(share), height - 24, "grid"))
        words = "measured" if share == 1 else f"{share:.0%}"
        body.append(text(across(share), height - 8, words, "faint", "start" if share == 0 else "middle"))
    for number, (row, share) in enumerate(zip(drawn, shares)):
        y = TOP + row_height * number
        show = show_bytes if row["unit"] == "bytes" else show_ms
        said = f"{show(row['predicted'])} of {show(row['measured'])} measured ({share - 1 + 0.0:+.1%})".replace(
            "-0.0%", "+0.0%"
        )
        top = y + 38 if narrow else y + 8
        hover = f"{row['name']}: {said}"
        body.append(rectangle(across(0), top, across(share) - across(0), ROW - 18, "guess", hover=hover))
        if narrow:
            body += [text(4, y + 14, drawing.fitted(row["name"], width - 8), "ink"), text(4, y + 31, said, "faint")]
        else:
            body.append(text(LEFT - 10, y + 25, drawing.fitted(row["name"], LEFT - 16), "ink", "end"))
            body.append(text(width - RIGHT + 16, y + 25, said, "faint"))
    said = "; ".join(f"{row['name']}: {share:.1%} of measured" for row, share in zip(drawn, shares))
    return drawing.svg(height, TITLE, said, body, kind="predicted", width=width)
