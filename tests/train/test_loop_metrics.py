"""Rows, rates and clocks of a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from wholestep.train.metrics import Clock, LossWatch, MetricsFile, Speed, read_rows, steady_rate


def test_values_come_out_as_they_went_in() -> None:
    watch = LossWatch(torch.device("cpu"))
    watch.push(1, torch.tensor([2.5]), torch.tensor(0.5, dtype=torch.float64), 0.1)
    watch.push(2, torch.tensor(float("inf")), None, None)
    first, second = watch.ready()
    assert (first.step, first.loss, first.grad_norm, first.lr, first.finite) == (1, 2.5, 0.5, 0.1, True)
    assert second.grad_norm is None and not second.finite and watch.ready() == []


def test_the_clock_leaves_pauses_out() -> None:
    began = time.monotonic()
    clock = Clock(before=100.0)
    with clock.paused():
        time.sleep(0.2)
    counted = clock.seconds - 100.0
    assert 0.0 <= counted <= time.monotonic() - began - 0.19


def test_speed_forgets_what_was_long_ago() -> None:
    speed = Speed(units=10)
    assert speed.after(1, 60.0) is None, "the first step has nothing to be compared with"
    assert speed.after(2, 61.0) == 10.0
    for step in range(3, 40):
        rate = speed.after(step, 61.0 + (step - 2) * 0.1)
    assert rate == pytest.approx(100.0)


def test_the_steady_rate_is_of_the_second_half() -> None:
    rows = [{"step": i, "loss": 1.0, "seconds": 50.0 + i if i < 5 else 50.0 + 5 + (i - 5) * 0.5} for i in range(1, 11)]
    assert steady_rate([*rows, {"step": 10, "held_out_loss": 1.0, "seconds": 60.0}], units=8) == pytest.approx(16.0)
    assert steady_rate(rows[:1], 8) is None and steady_rate([], 8) is None


def test_a_file_is_cut_back_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\nnot a row\n[3]\n{"step": 2, "loss": 0.5}\n{"step": 3, "lo')
    assert [row["step"] for row in read_rows(path)] == [1, 2]
    file = MetricsFile(path, resume_at=1)
    file.add({"step": 2, "loss": 0.25})
    file.flush()
    assert [row["loss"] for row in read_rows(path)] == [1.0, 0.25] and list(tmp_path.iterdir()) == [path]
    assert read_rows(tmp_path / "none.jsonl") == []
