"""How fast a disk is: measured once, remembered, and told; a card's link needs a card."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from wholestep.cost.devices import find_device
from wholestep.errors import BadOption
from wholestep.tiers import links
from wholestep.tiers.links import measure_folder, measure_link, told_links


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(links, "FILE_BYTES", 16 << 20)
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path / "cache"))


def test_a_folder_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        began = time.perf_counter()
        first = measure_folder(tmp_path)
    except BadOption as error:
        pytest.skip(str(error))
    assert time.perf_counter() - began < 10
    assert first.write > 1e5 and first.read > 1e5
    monkeypatch.setattr(links, "_measure_folder", lambda store: pytest.fail("measured twice"))
    assert measure_folder(tmp_path) == first
    kept = next((tmp_path / "cache" / "links").iterdir())
    kept.write_text("{]")
    with pytest.raises(pytest.fail.Exception, match="measured twice"):
        measure_folder(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".wholestep")]


def test_what_is_told_where_there_is_no_card_or_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = told_links(tmp_path)
    assert "no card here" in lines[0] and str(tmp_path) in lines[1]
    assert "is no folder" in told_links(tmp_path / "nowhere")[1]


def test_the_links_of_known_cards() -> None:
    h200, a100 = find_device("h200"), find_device("a100-40gb")
    assert (h200.link_alone, h200.link_both) == (55e9, 40e9), "measured"
    assert a100.link_both < a100.link_alone < a100.link_bandwidth == 32e9


@pytest.mark.gpu
def test_the_link_of_this_card() -> None:
    began = time.perf_counter()
    found = measure_link(torch.device("cuda"), fresh=True)
    assert time.perf_counter() - began < 10
    assert found.both <= 1.05 * min(found.out, found.back) and found.latency < 1e-3 and found.slowdown < 1.3
