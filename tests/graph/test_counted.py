"""Numbers in sentences and in tables."""

from __future__ import annotations

import pytest

from wholestep.graph.counted import counted, digits
from wholestep.report.pictures.drawing import show_ms, show_rate


def test_one_thing_and_many_things() -> None:
    assert [counted(n, "capture") for n in (0, 1, 1200)] == ["0 captures", "1 capture", "1,200 captures"]
    assert counted(2, "batch", "batches") == "2 batches" and counted(1, "value is", "values are") == "1 value is"


@pytest.mark.parametrize(
    ("value", "text"), [(99.96, "100"), (1234.0, "1230"), (0.5, "0.5"), (12.34, "12.3"), (-2000.0, "-2000")]
)
def test_three_digits_are_never_an_exponent(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0994, "99 µs"), (0.0999, "0.0999 ms"), (0.05, "50 µs"), (999.7, "1 s"), (1234.0, "1.23 s"), (12.34, "12.3 ms")],
)
def test_times_change_their_unit_before_they_round_up_to_it(ms: float, text: str) -> None:
    assert show_ms(ms) == text


def test_rates_too() -> None:
    assert show_rate(999.9e9, "FLOP") == "1 TFLOP/s" and show_rate(12.0, "B") == "12 B/s"
