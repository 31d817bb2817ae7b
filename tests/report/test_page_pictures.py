"""Every picture: well-formed with awkward names, honest with no data, and drawn in proportion."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from tests.report.profile_data import GIB, NASTY, memory, profile, row

from wholestep.report.page import pictures_of
from wholestep.report.pictures import drawing
from wholestep.report.pictures.drawing import fitted, show_ms
from wholestep.report.pictures.memory_area import memory_area
from wholestep.report.pictures.module_icicle import label, module_icicle, totals
from wholestep.report.pictures.predicted_bars import predicted_bars
from wholestep.report.pictures.roofline_chart import _apart, roofline_chart
from wholestep.report.pictures.verify_strip import verify_strip
from wholestep.report.pictures.waterfall import waterfall

DEVICE = profile()["device"]
SPACE = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ElementTree.Element:
    tree = ElementTree.fromstring(svg)
    assert tree.find(f"{SPACE}title") is not None and tree.find(f"{SPACE}desc") is not None
    assert not re.search(r"nan|inf\b", svg), "no place of a shape is undefined"
    return tree


def shapes(tree: ElementTree.Element, tag: str, kind: str) -> list[ElementTree.Element]:
    return [shape for shape in tree.iter(f"{SPACE}{tag}") if kind in (shape.get("class") or "").split()]


def words(tree: ElementTree.Element) -> str:
    """What is written, without what appears on hovering."""
    return " | ".join(
        (text.text or "") + "".join(inner.tail or "" for inner in text) for text in tree.iter(f"{SPACE}text")
    )


def test_nothing_to_draw_is_said() -> None:
    empty = [
        memory_area(None), memory_area(memory(timeline=[])), module_icicle(None), module_icicle(memory()["icicle"] | {"bytes": 0}),
        waterfall([], 10.0), roofline_chart([], DEVICE), roofline_chart([row(flops=0.0)], DEVICE), verify_strip(None),
        verify_strip([]), predicted_bars([]), predicted_bars([{"name": "x", "predicted": 1, "measured": 0, "unit": "ms"}]),
    ]  # fmt: skip
    for svg in empty:
        tree = parsed(svg)
        assert len(list(tree.iter(f"{SPACE}text"))) == 1 and not list(tree.iter(f"{SPACE}rect"))


def test_awkward_names_are_escaped_everywhere() -> None:
    strip = [{"kind": NASTY, "name": NASTY, "badness": 0.5, "bitwise": False, "ok": True}]
    guess = [{"name": NASTY, "predicted": 1.0, "measured": 2.0, "unit": "ms"}]
    for svg in (
        memory_area(memory()), module_icicle(memory()["icicle"]), waterfall([(NASTY, 3.0)], 3.0), verify_strip(strip),
        roofline_chart([row(name=NASTY, module=NASTY)], DEVICE), predicted_bars(guess),
    ):  # fmt: skip
        tree = parsed(svg)
        assert NASTY in "".join(tree.itertext())


def test_memory_layers_reach_the_peak_and_lines_are_drawn_only_within_scale() -> None:
    tree = parsed(memory_area(memory(), eager=memory(peak_bytes=9 * GIB), budget=6 * GIB, capacity=9 * GIB))
    mark = shapes(tree, "circle", "mark")[0]
    tops = [
        float(pair.split(",")[1])
        for polygon in tree.iter(f"{SPACE}polygon")
        for pair in (polygon.get("points") or "").split()
    ]
    assert min(tops) == pytest.approx(float(mark.get("cy") or 0), abs=0.11), "the stack is as high as the peak"
    assert shapes(tree, "path", "budget") and shapes(tree, "path", "capacity") and shapes(tree, "polyline", "outline")
    assert "peak 8.0 GiB" in words(tree) and words(tree).count("saved activations: ") == 3
    far = parsed(memory_area(memory(), capacity=900 * GIB))
    assert not shapes(far, "path", "capacity"), "a line far above would flatten the picture"


def test_one_instant_and_no_phases() -> None:
    parsed(memory_area(memory(num_instants=1, peak_instant=0, timeline=[[0, {"weights": 8 * GIB}]], phases=[], top=[])))


def test_icicle_widths_are_bytes_and_equal_layers_fold() -> None:
    tree = parsed(module_icicle(memory()["icicle"]))
    boxes = [
        (box.find(f"{SPACE}title").text or "", float(box.get("width") or 0) + 1) for box in shapes(tree, "rect", "box")
    ]  # type: ignore[union-attr]
    width = {text.split(":")[0]: size for text, size in boxes}
    assert width["0-1 ×2"] == pytest.approx(width["the whole step"] / 2, abs=0.3)
    assert any(text.startswith("0-1 ×2: 4.0 GiB") for text, _ in boxes)
    assert sum(totals(memory()["icicle"]).values()) == 8 * GIB, "nothing is lost by folding"
    assert label({"name": "3", "names": ["3", "5"], "count": 2}) == "3, ... ×2"


def test_icicle_of_one_module() -> None:
    one: dict[str, Any] = {"name": "", "names": [""], "count": 1, "bytes": 10, "own": {"weights": 10}, "children": []}
    assert len(shapes(parsed(module_icicle(one)), "rect", "box")) == 1


def test_waterfall_bars_join_and_end_at_the_measured_step() -> None:
    entries = [tuple(entry) for entry in profile()["waterfall"]]
    tree = parsed(waterfall(entries, 10.0))
    bars = [(float(b.get("x") or 0), float(b.get("width") or 0)) for b in tree.iter(f"{SPACE}rect")]
    assert bars[0][0] + bars[0][1] == pytest.approx(bars[1][0], abs=0.11)
    assert bars[3][0] == pytest.approx(bars[2][0] + bars[2][1], abs=0.11), "each begins where the one before ends"
    assert bars[-1][1] == pytest.approx(bars[-2][0] + bars[-2][1] - bars[-1][0], abs=0.3)


def test_roofline_names_ten_and_numbers_do_not_cover_each_other() -> None:
    tree = parsed(roofline_chart([row(name=f"op{i}", ms=1.0 + 1e-3 * i) for i in range(14)], DEVICE))
    assert len(shapes(tree, "text", "on-dot")) == 20, "ten points and their ten names"
    places = _apart([(100.0, 100.0)] * 6)
    pairs = [(a, b) for i, a in enumerate(places) for b in places[i + 1 :]]
    assert all(((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5 >= 16.9 for a, b in pairs)
    assert all(y >= 99.9 for _, y in places), "none is lifted towards the roof"
    assert "without FLOPs, not drawn: 2 rows" in words(
        parsed(roofline_chart([row(), row(flops=0.0), row(flops=0.0)], DEVICE))
    )


def test_no_point_lies_above_the_roof() -> None:
    """Faster than memory, from a cache, or than a peak that was measured on a busy machine: a roof of its own, named."""
    peak, bandwidth = DEVICE["peaks"]["fp32"], DEVICE["bandwidth"]
    fast = [row(flops=1e9, bytes=1e9, ms=0.1), row(flops=3 * peak / 1e3, bytes=1e3, ms=1.0), row()]
    for width in (drawing.WIDTH, drawing.NARROW):
        tree = parsed(roofline_chart(fast, DEVICE, width=width))
        roofs = [path.get("d") or "" for path in shapes(tree, "path", "roof")]
        places = [[float(n) for n in re.findall(r"[-\d.]+", d)] for d in roofs]
        for circle in [c for c in tree.iter(f"{SPACE}circle") if c.get("r") == "8.0"][: len(fast) * 2 : 2]:
            x, y = float(circle.get("cx") or 0), float(circle.get("cy") or 0)
            above = [r for r in places if _height(r, x) is not None and _height(r, x) <= y + 0.5]  # type: ignore[operator]
            assert above, f"the point at {x}, {y} is under no roof"
        assert "reached, from caches" in words(tree) and f"{3 * peak / 1e12:.3g} TFLOP/s reached" in words(tree)
    near = words(parsed(roofline_chart([row(flops=1.02 * peak / 1e3, bytes=1e3, ms=1.0)], DEVICE)))
    assert "10 TFLOP/s fp32, 10.2 TFLOP/s reached" in near, "one roof with one label"
    assert "reached" not in words(parsed(roofline_chart([row()], DEVICE))) and bandwidth == DEVICE["bandwidth"]


def _height(ends: list[float], x: float) -> float | None:
    """Of a straight line at x; None beside it."""
    x1, y1, x2, y2 = ends
    return None if not x1 - 0.1 <= x <= x2 + 0.1 else y1 + (y2 - y1) * (x - x1) / ((x2 - x1) or 1.0)


def test_narrow_pictures_keep_their_words_inside() -> None:
    facts = profile()
    for svg in pictures_of(facts, drawing.NARROW).values():
        tree = parsed(svg)
        assert (tree.get("viewBox") or "").startswith(f"0 0 {drawing.NARROW} ")
        for shape in tree.iter(f"{SPACE}rect"):
            assert float(shape.get("x") or 0) + float(shape.get("width") or 0) <= drawing.NARROW


def test_strip_shows_what_fails() -> None:
    rows = [
        *profile()["verified"]["rows"],
        {"kind": "loss", "name": "loss", "badness": None, "bitwise": False, "ok": False},
    ]
    rows.append({"kind": "loss", "name": "other", "badness": 0.0, "bitwise": True, "ok": True})
    tree = parsed(verify_strip(rows))
    assert len(shapes(tree, "circle", "bad")) == 2 and len(shapes(tree, "circle", "good")) == 8


def test_predictions_beyond_the_measured_value_stay_inside() -> None:
    tree = parsed(predicted_bars([{"name": "peak", "predicted": 300, "measured": 100, "unit": "bytes"}]))
    bar = shapes(tree, "rect", "guess")[0]
    assert float(bar.get("x") or 0) + float(bar.get("width") or 0) <= 1000 and "+200.0%" in words(tree)


def test_words_are_shortened_in_the_middle() -> None:
    assert (
        fitted("abcdefghij", 66) == "abcdefghij"
        and fitted("abcdefghijk", 40) == "abc…jk"
        and fitted("abcdef", 10) == ""
    )
    assert [show_ms(v) for v in (0, -1.4e-14, 0.01, 2.5, 4321)] == ["0 ms", "0 ms", "10 µs", "2.5 ms", "4.32 s"]
