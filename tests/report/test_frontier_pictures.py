"""Time against memory, in a terminal and as a file; predicted against measured."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from benchmarks.predicted_scatter import predicted_scatter

from wholestep.report.pictures.frontier_staircase import MOST_LABELS, frontier_staircase
from wholestep.report.terminal_frontier import frontier_plot

KNEES = [(39.2, 218.0, ""), (26.6, 234.0, "recompute <up>: -2.0 GiB"), (18.6, 299.0, "recompute attention")]


def _texts(picture: str) -> list[str]:
    """What is written, without what shows when hovering."""
    written = [node for node in ElementTree.fromstring(picture).iter() if node.tag.endswith("text")]
    return [(node.text or "") + "".join(child.tail or "" for child in node) for node in written]


def test_every_knee_has_its_words_and_the_cards_in_range_a_line() -> None:
    picture = frontier_staircase(
        KNEES, title="llama & co", subtitle="s", budget=26.0, chosen=2, peers=[("Liger", 30.0, 260.0)]
    )
    said = _texts(picture)
    assert "llama & co" in said and "recompute <up>: -2.0 GiB" in said and "everything is kept" in said
    assert "24 GB" in said and "40 GB" in said and "80 GB" not in said
    assert "no plan fits" in " ".join(said) and "budget 26 GiB" in said and "Liger: 30.0 GiB, 260 ms (measured)" in said
    assert picture.count('class="chosen"') == 2 and picture.count('class="peer"') == 2, "a mark and its key each"


def test_the_stair_goes_up_to_the_left_and_stays_in_the_picture() -> None:
    picture = frontier_staircase(KNEES, title="t", subtitle="s")
    path = re.search(r'class="stair" d="M([\d.]+) [\d.]+((?:[VH][\d.]+)+)"', picture)
    assert path is not None
    xs = [float(x) for x in re.findall(r"H([\d.]+)", path[2])]
    ys = [float(y) for y in re.findall(r"V([\d.]+)", path[2])]
    assert xs == sorted(xs, reverse=True) and ys == sorted(ys, reverse=True) and min(xs) > 0 and max(ys) < 470


@pytest.mark.parametrize("count", [1, 2, 40])
def test_one_plan_or_very_many(count: int) -> None:
    knees = [(40.0 - i / 2, 200.0 + i, f"change {i}") for i in range(count)]
    said = _texts(frontier_staircase(knees, title="t", subtitle="s", chosen=count // 2, budget=400.0))
    assert min(count, MOST_LABELS - 1) <= sum(text.startswith("change") for text in said) <= MOST_LABELS
    assert f"change {count // 2}" in said and not any("budget" in text for text in said), "far off: not drawn"


def test_the_terminal_shows_the_knees_the_choice_and_the_budget() -> None:
    points = [(x, y) for x, y, _ in KNEES]
    lines = frontier_plot(points, limit=30.0, chosen=1)
    drawn = "\n".join(lines)
    assert drawn.count("●") == 2 and drawn.count("◆") == 1 and drawn.count("┊") >= 6
    assert lines[0].lstrip().startswith("299 ms") and "18.6 GiB" in lines[-1] and "39.2 GiB" in lines[-1]
    assert lines[0].index("●") < lines[-3].index("●"), "the slowest plan is the leanest, at the left"
    assert "\n".join(frontier_plot(points, limit=30.0, chosen=1, blocks=False)).isascii()
    assert frontier_plot(points[:1], limit=30.0, chosen=0) == []
    assert frontier_plot([(1.0, 5.0), (1.0, 6.0)], limit=30.0, chosen=0), "as large as each other"


def test_misses_are_drawn_and_named() -> None:
    points = [("a", 10.0, 10.5, True), ("b", 20.0, 30.0, False), ("c", 2.0, 2.0, True)]
    picture = predicted_scatter(points, title="t", unit="GiB")
    said = _texts(picture)
    assert "3 steps, 1 wrong answers; error: median 4.8 %, largest 33.3 %" in said
    assert (
        picture.count('class="right"') == 2
        and picture.count('class="miss"') == 2
        and "predicted 20.0, measured 30.0" in said
    )
    assert "nothing was measured yet" in predicted_scatter([], title="t", unit="GiB")
