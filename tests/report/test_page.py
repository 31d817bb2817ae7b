"""The page: one file that needs nothing else, escapes what it shows, and works in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.report import browser
from tests.report.profile_data import NASTY, profile

from wholestep.report.module_tree import module_rows
from wholestep.report.page import pictures_of, render_page, show_count, show_percent, write_report

needs_browser = pytest.mark.skipif(browser.PROGRAM is None, reason="no chromium here")


def test_one_file_without_links(tmp_path: Path) -> None:
    twin = write_report(profile(), tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text("utf-8")
    assert twin == tmp_path / "report.json" and json.loads(twin.read_text("utf-8")) == profile()
    assert len(html.encode()) < 2**20
    without_namespace = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)


def test_pictures_come_first_and_in_order() -> None:
    html = render_page(profile())
    places = [
        html.index(f'id="{name}"') for name in (*pictures_of(profile()), "actions", "calls", "modules", "environment")
    ]
    assert places == sorted(places) and html.count("<svg") == 6


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
        assert page.run("document.querySelectorAll('figure svg').length") == 6
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
        assert not page.errors and all(url.startswith(("file:", "data:")) for url in page.fetched)


@needs_browser
def test_labels_do_not_lie_on_each_other(tmp_path: Path) -> None:
    write_report(profile(), tmp_path / "report.html")
    overlapping = """Array.from(document.querySelectorAll('svg')).flatMap(svg => {
      const boxes = Array.from(svg.querySelectorAll('text')).filter(t => !t.classList.contains('on-dot') && t.lastChild.data)
        .map(t => [t.textContent, t.getBoundingClientRect()]);
      return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
        p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 4 && q.top < p.bottom - 4).map(([b]) => [a, b]));
    })"""
    with browser.Browser() as page:
        page.open(tmp_path / "report.html")
        assert page.run(overlapping) == []
