"""The rules a measurement follows: warm-up, window, interval of the median, tolerance of losses."""

from __future__ import annotations

import random

import pytest

from wholestep.bench.figures import median_interval, percentile, summarised
from wholestep.bench.losses import departure, trouble
from wholestep.bench.protocol import SMOKE, Protocol, settled
from wholestep.bench.tables import smoke_text


def test_times_that_fall_have_not_settled_and_level_ones_have() -> None:
    falling = [100 / (i + 1) for i in range(10)]
    assert not settled(falling)
    assert settled(falling + [10.0] * 10)
    assert not settled([10.0] * 9), "two medians of five need ten times"
    assert settled([10.0, 10.1] * 5) and not settled([10.0] * 5 + [10.5] * 5)


def test_one_slow_step_does_not_prolong_the_warm_up() -> None:
    assert settled([10.0] * 8 + [90.0, 10.0])


def test_warm_up_has_a_least_a_most_and_ignores_the_first_step() -> None:
    rule = Protocol(least_warm_up=12, most_warm_up=30)
    level = [9000.0] + [10.0] * 10
    assert not rule.warm(level, 0), "fewer than twelve"
    assert rule.warm([*level, 10.0], 0)
    assert not Protocol(least_warm_up=10).warm([9000.0] + [10.0] * 9, 0), "nine times are left without the first"
    restless = [9000.0] + [10.0 + 3 * i for i in range(28)]
    assert not rule.warm(restless, 0) and rule.warm([*restless, 99.0], 0)
    assert rule.warm(restless, 1e4), "the time for it is over"


def test_the_window_ends_by_steps_or_by_time_with_a_least() -> None:
    rule = Protocol(steps=20, seconds=5.0, least_steps=7)
    assert not rule.sampled(19, 1) and rule.sampled(20, 1)
    assert not rule.sampled(6, 9) and rule.sampled(7, 9)
    assert Protocol(steps=3).least_steps == 3


def test_compared_losses_are_at_steps_every_system_makes() -> None:
    rule = Protocol(steps=20)
    assert rule.loss_steps() == (0, 4, rule.least_warm_up + rule.least_steps - 1)
    assert SMOKE.loss_steps() == (0, 4, 11)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, high, confidence = median_interval([draw.expovariate(1.0) for _ in range(20)])
        hits += low <= 0.6931 <= high
        assert confidence == pytest.approx(0.9586, abs=1e-4)
    assert 935 <= hits <= 980


@pytest.mark.parametrize(("count", "confidence"), [(1, 0.0), (2, 0.5), (5, 0.9375), (6, 0.96875)])
def test_few_samples_give_lowest_to_highest_and_say_how_sure_that_is(count: int, confidence: float) -> None:
    values = [float(i) for i in range(count)]
    assert median_interval(values) == (0.0, count - 1.0, confidence)


def test_the_interval_is_the_narrowest_that_is_sure_enough() -> None:
    low, high, confidence = median_interval([float(i) for i in range(30)])
    assert (low, high) == (9.0, 20.0) and confidence == pytest.approx(0.9572, abs=1e-4)


def test_percentiles_lie_between_samples() -> None:
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0 and percentile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    made = summarised([3.0, 1.0, 2.0])
    assert made["median"] == 2.0 and made["all"] == [3.0, 1.0, 2.0]


def losses(first: float, later: float, **facts: object) -> dict:
    return {"losses": {"0": first, "4": later}, "curve": [first, later], "precision": "fp32", "device": "cpu", **facts}


def test_losses_may_differ_by_rounding_and_by_no_more() -> None:
    eager = losses(2.0, 1.5)
    assert departure(losses(2.0 * (1 + 5e-5), 1.5 * 1.01), eager) is None
    assert "at step 0" in str(departure(losses(2.0 * (1 + 5e-4), 1.5), eager))
    assert "at step 4" in str(departure(losses(2.0, 1.5 * 1.05), eager))


def test_tolerance_is_larger_for_bf16_tf32_and_dropout() -> None:
    eager = losses(2.0, 1.5)
    assert departure(losses(2.002, 1.5), eager) is not None
    assert departure(losses(2.002, 1.5, device="cuda"), eager) is None
    assert departure(losses(2.01, 1.5, precision="bf16"), eager) is None
    assert departure(losses(2.1, 1.5, dropout=True), eager) is None
    assert departure(losses(2.5, 1.5, dropout=True), eager) is not None


def test_a_loss_near_zero_is_held_to_how_far_it_moved() -> None:
    eager = losses(4.0, 0.001)
    assert departure(losses(4.0, 0.02), eager) is None
    assert departure(losses(4.0, 0.2), eager) is not None


def test_a_loss_that_is_not_finite_is_told() -> None:
    assert "not finite" in str(departure(losses(2.0, 1.0) | {"losses": {"0": 2.0, "4": None}}, losses(2.0, 1.0)))
    assert "step 2" in str(trouble([3.0, 2.0, None, 1.0]))


def test_a_run_must_fall_over_thirds() -> None:
    assert trouble([3.0, 2.5, 2.0, 2.2, 1.0, 1.2]) is None
    assert "does not fall" in str(trouble([2.0] * 6))
    assert "does not fall" in str(trouble([0.69, 0.66, 0.66, 0.69, 0.68, 0.70]))


def test_a_smoke_run_shows_what_it_judges() -> None:
    """Batches that take turns: the last is a harder one, and yet the loss falls."""
    curve = [0.70, 0.68, 0.69, 0.66, 0.67, 0.71, 0.65, 0.66, 0.72]
    row = {"workload": "w", "contender": "eager", "status": "ok", "curve": curve, "losses": {"0": 0.70, "8": 0.72}}
    assert trouble(curve) is None and "0.69 -> 0.6767" in smoke_text([row])
    assert "not finite" in smoke_text([row | {"curve": [0.7, None, 0.6]}])
