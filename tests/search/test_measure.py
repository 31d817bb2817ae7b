"""Measuring a point: what a row holds, and what becomes of one that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.search.test_space import write

from wholestep.bench.process import Answer
from wholestep.bench.protocol import Protocol
from wholestep.search import measure
from wholestep.search.measure import answered, measure_in_child
from wholestep.search.space import Point, read_space

QUICK = Protocol(steps=3, least_warm_up=2, most_warm_up=2)
TINY = 'batch = 2\nseq = 8\nbackend = "interpret"\nset = { layers = 1, width = 8, heads = 2, tokenizer = "bytes" }\n'


class Asked:
    """In place of the child: what it would be asked."""

    def __init__(self) -> None:
        self.request = ""

    def __call__(self, request: str, limit: float, **more: Any) -> Any:
        self.request = request
        return Answer([], "failed", "not started")


def request_of(point: Point, monkeypatch: pytest.MonkeyPatch, clock: str = "wall") -> str:
    asked = Asked()
    with monkeypatch.context() as patch:
        patch.setattr(measure, "ask_child", asked)
        assert measure_in_child(point, 1.0, clock=clock, protocol=QUICK) == {
            "status": "failed",
            "reason": "not started",
        }
    return asked.request


def test_a_row_holds_seconds_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = read_space(write(tmp_path, TINY, '{ recompute = "blocks.*" }')).points[0]
    row = answered(request_of(point, monkeypatch, "cpu"))
    assert row["status"] == "ok", row
    assert row["steps"] == 3 and row["rung"] == "whole step" and row["seconds"] > 0 and row["peak_bytes"] > 10_000
    assert json.loads(json.dumps(row)) == row


def test_what_raises_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = read_space(write(tmp_path, TINY, '{ recompute = "bloks.*" }')).points[0]
    row = answered(request_of(point, monkeypatch))
    assert row["status"] == "failed" and "bloks" in row["reason"]
