"""What is shown while training: few lines, one bar, the right words."""

from __future__ import annotations

import io

import pytest

from wholestep.train.display import Bar, Lines, duration, make_display, rate


def rows(steps: int) -> list[dict[str, object]]:
    facts = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 51234.5, "memory_bytes": 2**30, "seconds": 1.0}
    return [{"step": i, "loss": 5.0 - i / steps, **facts} for i in range(1, steps + 1)]


@pytest.mark.parametrize("steps", [1, 3, 10, 19, 1000])
def test_a_run_is_at_most_twenty_lines(steps: int) -> None:
    stream = io.StringIO()
    display = Lines(stream)
    display.compiling("inductor")
    display.started(at=0, steps=steps, unit="tokens")
    for row in rows(steps):
        display.row(row)
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= 21 and lines[-1].startswith(f"step {steps}/{steps}  loss 4.0000"), lines
    assert "51,234 tokens/s" in lines[-1] and "1.0 GiB" in lines[-1]


@pytest.mark.parametrize("columns", ["80", "120"])
def test_the_bar_fits_its_terminal(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "dumb")
    stream = io.StringIO()
    bar = Bar(stream)
    bar.started(at=0, steps=100000, unit="samples")
    for row in rows(100000)[:3]:
        bar.row(row | {"samples_per_second": 1234567.0})
    bar.row({"step": 3, "held_out_loss": 4.5, "seconds": 1})
    bar.close()
    shown = stream.getvalue().splitlines()
    assert shown and all(len(line) <= int(columns) for line in shown)
    assert any("loss 5.0000" in line and "1,234,567 samples/s" in line for line in shown), shown


def test_a_loss_that_is_not_finite_is_said() -> None:
    stream = io.StringIO()
    display = Lines(stream)
    display.started(at=0, steps=1, unit="tokens")
    display.row({"step": 1, "loss": None, "memory_bytes": 0})
    assert "loss not finite" in stream.getvalue()


def test_the_display_suits_the_stream() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert (
        type(make_display(Terminal(), quiet=False)) is Bar and type(make_display(io.StringIO(), quiet=False)) is Lines
    )
    assert make_display(Terminal(), quiet=True).verbose is False


def test_times_and_rates_are_short() -> None:
    assert [duration(s) for s in (0.04, 59.94, 187, 7387)] == ["0.0 s", "59.9 s", "3:07", "2:03:07"]
    assert [rate(v) for v in (0.1234, 12.34, 51234.5)] == ["0.123", "12.3", "51,234"]


def test_the_bar_says_in_one_line_what_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        graph, rung, notes = None, "whole step", ()

    monkeypatch.setenv("TERM", "dumb")
    bar = Bar(stream := io.StringIO())
    bar.compiling("inductor")
    bar.compiled(Compiled(), 61.0)  # type: ignore[arg-type]
    assert stream.getvalue().splitlines() == ["compiled in 1:01: whole step"]
