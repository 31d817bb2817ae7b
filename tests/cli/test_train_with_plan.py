"""A plan made by `wholestep plan` with the real planner goes through `wholestep train` and gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.calls import Call

TINY = [
    "gpt-1m", "--set", "layers=2", "--set", "width=32", "--set", "heads=2", "--batch", "3", "--seq", "17", "--precision", "fp32",
]  # fmt: skip


def _losses(call: Call, out: str, *more: str) -> list[float]:
    run = ["--set", "tokenizer=bytes", "--steps", "3", "--backend", "interpret", "--out", out, "--quiet"]
    done = call("train", *TINY, *run, *more)
    assert done.code == 0, done.err
    rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_the_leanest_plan_trains_as_no_plan_does(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["plan", *TINY, "--set", "tokenizer=bytes", "--device", "24GiB", "--no-check-batch"]
    points = json.loads(call(*asked, "--json").out)["frontier"]
    sizes = [point["card_bytes"] for point in points]
    assert len(set(sizes)) > 1 and sizes == sorted(sizes, reverse=True)
    assert call(*asked, "--memory", str(sizes[-1]), "--out", "p.toml").code == 0
    assert "recompute" in call("explain", "p.toml").out
    assert _losses(call, "with", "--plan", "p.toml") == _losses(call, "without")
