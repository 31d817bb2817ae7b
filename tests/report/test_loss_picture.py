"""The picture of the loss: well-formed, self-contained, with what was asked for in it."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from wholestep.report.loss_picture import HEIGHT, WIDTH, log_ticks, loss_picture
from wholestep.report.pictures.drawing import ticks
from wholestep.report.smooth import smoothed, thinned
from wholestep.report.terminal_picture import chart, sparkline


def rows(count: int, low: float = 1.0, high: float = 5.0) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        made.append({"step": step, "loss": low + (high - low) * math.exp(-5 * step / count) + 0.01 * (-1) ** step})
        if step % max(count // 4, 1) == 0:
            made.append({"step": step, "held_out_loss": made[-1]["loss"] + 0.1})
    return made


def coordinates(svg: str) -> list[tuple[float, float]]:
    found = [pair for points in re.findall(r'points="([^"]*)"', svg) for pair in points.split()]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found)]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 300, 5000])
def test_it_is_well_formed_needs_nothing_else_and_stays_inside(count: int) -> None:
    svg = loss_picture(rows(count), title="gpt <1m> & co", subtitle="a run")
    ElementTree.fromstring(svg)
    assert "gpt &lt;1m&gt; &amp; co" in svg
    assert not re.search(r"href|url\(|<script|<image|@import|https?://(?!www.w3.org/2000/svg)", svg)
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in coordinates(svg))
    assert "prefers-color-scheme: dark" in svg and len(svg) < 100_000


def test_axes_marks_and_legend_are_there() -> None:
    svg = loss_picture(rows(40), title="t")
    assert svg.count('<circle class="held"') == 4 + 1, "each held-out loss, and the legend"
    assert ">step</text>" in svg and ">loss</text>" in svg and ">held out</text>" in svg
    assert ">3</text>" in svg and ">20</text>" in svg, "ticks of both axes"


def test_a_loss_that_falls_far_is_shown_on_a_logarithmic_axis() -> None:
    assert "logarithmic" in loss_picture(rows(200, low=0.01, high=10), title="t")
    assert "logarithmic" not in loss_picture(rows(200), title="t")
    negative = [{"step": i, "loss": 10.0**i - 2} for i in range(4)]
    assert "logarithmic" not in loss_picture(negative, title="t"), "a loss may be negative"


def test_skipped_steps_are_marked_and_left_out_of_the_curve() -> None:
    made = [*rows(20), {"step": 21, "loss": None, "finite": False, "skipped": True}]
    assert "1 skipped" in loss_picture(made, title="t") and 'class="skipped"' in loss_picture(made, title="t")


def test_one_wild_value_does_not_flatten_the_rest() -> None:
    made = rows(1000)
    made[700]["loss"] = 1e6
    y = [y for _, y in coordinates(loss_picture(made, title="t"))]
    assert max(y) - min(y) > HEIGHT / 2


def test_the_mean_follows_a_line_and_no_spike_is_thinned_away() -> None:
    line = [(float(i), 3.0 - i / 100) for i in range(300)]
    assert all(abs(a[1] - b[1]) < 0.06 for a, b in zip(smoothed(line), line))
    line[123] = (123.0, 99.0)
    assert (123.0, 99.0) in thinned(line, 40) and len(thinned(line, 40)) <= 42


def test_ticks_are_round() -> None:
    assert ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(1, 300, 8) == [50, 100, 150, 200, 250, 300]
    assert log_ticks(0.04, 3) == [0.05, 0.1, 0.2, 0.5, 1.0, 2.0]


def test_the_terminal_gets_bars_and_plain_letters_where_there_are_none() -> None:
    points = [(float(i), 10.0 - i) for i in range(10)]
    assert sparkline(points)[0] == "█" and sparkline(points)[-1] == "▁" and len(sparkline(points)) == 10
    assert sparkline([]) == "" and chart([]) == [] and chart(points[:1]) == []
    assert len(sparkline([(float(i), 1.0) for i in range(1000)], 48)) == 48
    lines = chart(points, width=20, height=4)
    assert len(lines) == 6 and lines[0].startswith("10 ┤█") and lines[3].lstrip().startswith("1 ┤█")
    assert all(line.isascii() for line in chart(points, blocks=False)) and sparkline(points, blocks=False).isascii()
