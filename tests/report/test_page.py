"""The page: one file that needs nothing else, escapes what it shows, and works in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.report import browser
from tests.report.profile_data import NASTY, action, profile, row

from wholestep.report.module_tree import module_rows
from wholestep.report.page import cards_of, pictures_of, render_page, show_count, show_gain, show_percent, write_report

CUT_OFF = """Array.from(document.querySelectorAll('svg text')).filter(t => {
  const box = t.getBoundingClientRect(), around = t.ownerSVGElement.getBoundingClientRect();
  return box.width > 0 && (box.left < around.left - 1 || box.right > around.right + 1);
})"""
"""Words that a picture does not show whole."""
needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no chromium here")


def test_one_file_without_links(tmp_path: Path) -> None:
    twin = write_report(profile(), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text("utf-8")
    assert twin == tmp_path / "report.json" and json.loads(twin.read_text("utf-8")) == profile()
    assert len(html.encode()) < 2**20
    without_namespace = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)


def test_what_to_do_comes_first_then_pictures_in_order() -> None:
    html = render_page(profile())
    sections = ("actions", *pictures_of(profile()), "calls", "modules", "environment")
    places = [html.index(f'id="{name}"') for name in sections]
    assert places == sorted(places) and html.count("<svg") == 12, "each picture wide and narrow"
    assert re.findall(r'<a href="#(\w+)">', html) == list(sections), "the navigation leads to every section"


def test_actions_have_lines_to_copy_and_their_gain() -> None:
    html = render_page(profile())
    assert html.count('class="copy"') == 3 and "predicted: -25% of the peak" in html
    assert "at most 2 ms, 20% of the step" in html and "changes the training" in html
    assert show_gain(action(about="equality"), 1.0) == "before anything else"
    assert show_gain(action(predicted=None), 1.0) == "at most 25% of the peak"


def test_a_busy_machine_is_said_and_compiling_stands_beside_the_first_step() -> None:
    assert 'class="busy"' not in render_page(profile())
    assert "the machine was busy" in render_page(profile(busy="the machine was busy: ..."))
    assert ("compiling", "2 s", "then the first step, 900 ms") in cards_of(profile())


def test_one_figure_is_the_peak() -> None:
    html = render_page(profile())
    assert {"8.0 GiB"} == set(re.findall(r"peak ([\d.]+ \wiB)", html)) - {"9.0 GiB"}, "eager's own apart"


def test_names_are_escaped() -> None:
    html = render_page(profile())
    assert NASTY not in html and "a&lt;b&gt;&amp;&#34;c&#39;" in html


def test_a_profile_with_nothing_but_times() -> None:
    bare = profile(
        memory=None, eager_memory=None, verified=None, utilisation=None, predictions=[], actions=[], notes=[], rows=[],
        waterfall=[], modules={}, floor_ms=None, settings={},
    )  # fmt: skip
    html = render_page(bare)
    assert "memory was not measured" in html and "not verified" in html and "Nothing stands out" in html


def test_numbers_for_people() -> None:
    assert (show_count(None), show_count(1234.0), show_count(5.0)) == ("-", "1.23 k", "5")
    assert (show_percent(None), show_percent(0.123), show_percent(0.0123)) == ("-", "12%", "1.2%")


def test_module_tree_folds_layers_and_keeps_all_time() -> None:
    rows = module_rows(profile()["modules"], 10.0)
    assert [(r["path"], r["count"], r["depth"]) for r in rows] == [("", 1, 0), ("blocks", 1, 1), ("blocks.*", 2, 2)]
    assert rows[0]["ms"] == pytest.approx(9.5) and rows[2]["phases"] == {"forward": 6.0, "backward": 3.0}


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_in_a_browser(tmp_path: Path, dark: bool) -> None:
    write_report(profile(), tmp_path / "report.html")
    names = "Array.from(document.querySelectorAll('#table tbody tr')).map(r => r.cells[0].dataset.sort)"
    with browser.Browser() as page:
        page.open(tmp_path / "report.html", dark=dark)
        shown = "Array.from(document.querySelectorAll('figure svg')).filter(s => s.getBoundingClientRect().width > 0)"
        assert page.run(f"{shown}.length") == 6
        before = page.run(names)
        page.click("#table th:nth-child(5) button")
        assert page.run(names) == ["gelu", "mm", "copy", NASTY, "unknown"] != before, "by time, longest first"
        assert page.run("document.querySelector('#table th:nth-child(5)').getAttribute('aria-sort')") == "descending"
        page.click("#table th:nth-child(5) button")
        assert page.run(names) == ["unknown", NASTY, "mm", "copy", "gelu"]
        page.click("#table th:nth-child(13) button")
        assert page.run(names)[-1] == "unknown", "what is not known comes last"
        paper = page.run("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out at the side"
        page.click(".copy")
        assert page.run("getSelection().toString()") == f"wholestep profile {NASTY}"
        page.click("nav a[href='#calls']")
        assert abs(page.run("document.getElementById('calls').getBoundingClientRect().top")) < 80
        assert not page.errors and all(url.startswith(("file:", "data:")) for url in page.fetched)


@needs_browser
@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone(tmp_path: Path, dark: bool) -> None:
    """Nothing sticks out at 400 pixels, and no letter is smaller than ten of them."""
    write_report(profile(busy="the machine was busy"), tmp_path / "report.html")
    letters = """Array.from(document.querySelectorAll('body *')).filter(e => e.getBoundingClientRect().width > 0
      && Array.from(e.childNodes).some(n => n.nodeType === 3 && n.data.trim())).map(e =>
        parseFloat(getComputedStyle(e).fontSize) * (e.ownerSVGElement ? e.ownerSVGElement.getScreenCTM().a : 1))"""
    with browser.Browser() as page:
        page.open(tmp_path / "report.html", width=400, dark=dark)
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run(f"Math.min(...{letters})") >= 9.0
        assert page.run(f"{CUT_OFF}.map(t => t.textContent)") == []
        assert not page.errors


OVERLAPPING = """Array.from(document.querySelectorAll('svg')).flatMap(svg => {
  const boxes = Array.from(svg.querySelectorAll('text')).filter(t => !t.classList.contains('on-dot') && t.lastChild.data)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 4 && q.top < p.bottom - 4).map(([b]) => [a, b]));
})"""
"""Pairs of words of one picture that lie on each other."""


@needs_browser
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("faster", [1.0, 3.0], ids=["", "faster than memory"])
def test_labels_do_not_lie_on_each_other(tmp_path: Path, width: int, faster: float) -> None:
    facts = profile()
    bandwidth = facts["device"]["bandwidth"]
    facts["rows"] = [*facts["rows"], row(name="adamw", flops=bandwidth / 1e3, bytes=faster * bandwidth / 1e3, ms=1.0)]
    write_report(facts, tmp_path / "report.html")
    with browser.Browser() as page:
        page.open(tmp_path / "report.html", width=width)
        assert page.run(OVERLAPPING) == []
        assert ("reached, from caches" in page.run("document.body.innerHTML")) is (faster > 1)
