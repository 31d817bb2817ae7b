"""Throughput against peak memory, drawn."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from wholestep.report.pictures.search_scatter import Mark, leading, search_scatter

MARKS = [
    Mark("batch 8", 4.0, 100.0, True), Mark("batch 16", 6.0, 160.0, True), Mark("batch 16 & <lean>", 5.0, 90.0, True),
    Mark("batch 32", 11.0, 180.0, False),
]  # fmt: skip


def test_one_file_that_needs_nothing_else() -> None:
    drawn = search_scatter(MARKS, title="a & b", subtitle="said", unit="tokens", limit=12.0)
    root = ElementTree.fromstring(drawn)
    kinds = [element.get("class") for element in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert kinds.count("best") == 2 and kinds.count("measured") == 4 and kinds.count("predicted") == 2
    assert "href" not in drawn and "batch 16 &amp; &lt;lean&gt;" in drawn and "12 GiB there are" in drawn
    assert "160 tokens/s, 6 GiB" in drawn


def test_the_line_joins_what_is_worth_having() -> None:
    assert [mark.name for mark in leading(MARKS)] == ["batch 8", "batch 16", "batch 32"]


def test_one_point_and_none() -> None:
    ElementTree.fromstring(search_scatter(MARKS[:1], title="t", subtitle="s", unit="samples"))
    assert "no point fits" in search_scatter([], title="t", subtitle="s", unit="samples")
