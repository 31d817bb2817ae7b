"""The shortcut from a signature to compiled code: what it cannot trust is a miss."""

from __future__ import annotations

import json

import pytest
import torch

from wholestep.lower import region_cache


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(region_cache, "_path", lambda signature: tmp_path / "a" / f"{signature}.json")
    return tmp_path / "a"


class Stored:
    _fx_graph_cache_key = "fkey"


def test_remembers_and_reads(folder):
    region_cache.remember("sig", Stored(), on_cpu=False)
    assert region_cache._read("sig") == {"format": region_cache.FORMAT, "key": "fkey", "vector_isa": None}
    assert [path.name for path in folder.iterdir()] == ["sig.json"]


def test_uncached_code_is_not_remembered(folder):
    region_cache.remember("sig", object(), on_cpu=False)
    assert not folder.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"format": -1, "key": "k"})])
def test_a_damaged_or_foreign_entry_is_a_miss(folder, text):
    folder.mkdir()
    (folder / "sig.json").write_text(text)
    assert region_cache._read("sig") is None
    assert region_cache.load("sig", []) is None


def test_an_entry_whose_code_is_gone_is_a_miss(folder):
    region_cache.remember("sig", Stored(), on_cpu=False)
    assert region_cache.load("sig", []) is None


def test_the_environment_covers_settings_and_threads():
    from torch._inductor import config

    before = region_cache.environment()
    assert region_cache.environment() == before
    with config.patch({"fallback_random": not config.fallback_random}):
        assert region_cache.environment() != before
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert region_cache.environment() != before
    finally:
        torch.set_float32_matmul_precision(precision)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert region_cache.environment() != before
    finally:
        torch.set_num_threads(threads)
