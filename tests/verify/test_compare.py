"""The rule of equality, on numbers small enough to check by hand."""

from __future__ import annotations

import math

import torch

from wholestep.verify.compare import Yardstick, gradient_rms, same_bits

RULE = Yardstick(eps=2.0**-23, gradient_rms=0.0, activation_rms=0.0, relative_error=0.0, operations=1)


def test_twice_eagers_error_is_the_limit() -> None:
    exact = torch.zeros(100, dtype=torch.float64)
    eager = torch.full((100,), 0.1)
    assert RULE.compare(torch.full((100,), 0.1999), eager, exact).ok
    assert not RULE.compare(torch.full((100,), 0.2001), eager, exact).ok
    found = RULE.compare(torch.full((100,), 0.3), eager, exact)
    assert math.isclose(found.error, 3.0, rel_tol=1e-6) and math.isclose(found.tolerance, 2.0, rel_tol=1e-6)


def test_four_roundings_are_free_even_where_eager_is_exact() -> None:
    exact, eager = torch.ones(100, dtype=torch.float64), torch.ones(100)
    assert RULE.compare(eager * (1 + 3 * 2.0**-23), eager, exact).ok
    assert not RULE.compare(eager * (1 + 6 * 2.0**-23), eager, exact).ok


def test_the_floor_is_for_gradients_that_are_truly_zero() -> None:
    floored = Yardstick(2.0**-23, gradient_rms=1.0, activation_rms=0.0, relative_error=0.0, operations=1)
    exact, eager, ours = torch.zeros(100, dtype=torch.float64), torch.zeros(100), torch.full((100,), 3 * 2.0**-23)
    assert floored.compare(ours, eager, exact, gradient=True).ok
    assert not floored.compare(ours, eager, exact).ok
    assert not floored.compare(ours * 2, eager, exact, gradient=True).ok


def test_what_is_not_finite_must_be_so_on_both_sides() -> None:
    nan = torch.tensor([1.0, math.nan])
    exact = nan.double()
    assert RULE.compare(nan, nan, exact).ok and RULE.compare(nan, nan, exact).bitwise
    assert not RULE.compare(torch.tensor([1.0, 2.0]), nan, exact).ok
    assert not RULE.compare(nan, torch.tensor([1.0, 2.0]), exact).ok
    assert not RULE.compare(torch.tensor([1.5, math.nan]), nan, exact).ok


def test_missing_values_and_whole_numbers() -> None:
    counts = torch.tensor([1, 2, 3])
    assert not RULE.compare(None, counts, counts).ok
    assert not RULE.compare(counts[:2], counts, counts).ok
    assert RULE.compare(counts.clone(), counts, counts).ok
    assert not RULE.compare(counts + 1, counts, counts).ok


def test_few_elements_lean_on_the_error_of_all_gradients() -> None:
    leaning = Yardstick(2.0**-23, gradient_rms=0.0, activation_rms=0.0, relative_error=1e-3, operations=1)
    exact, eager = torch.ones(1, dtype=torch.float64), torch.ones(1)
    assert leaning.compare(eager * 1.001, eager, exact).ok
    assert not leaning.compare(eager * 1.003, eager, exact).ok
    assert not leaning.compare(torch.full((100,), 1.001), torch.ones(100), torch.ones(100).double()).ok


def test_without_float64_roundings_walk() -> None:
    walking = Yardstick(2.0**-23, gradient_rms=0.0, activation_rms=0.0, relative_error=0.0, operations=100)
    eager = torch.ones(10)
    assert walking.compare(eager * (1 + 30 * 2.0**-23), eager, None).ok
    assert not walking.compare(eager * 1.001, eager, None).ok


def test_bits_and_sizes() -> None:
    assert not same_bits(torch.ones(2), torch.ones(2).double())
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0 + 2.0**-23]))
    assert gradient_rms({"a": torch.full((3,), 2.0), "b": torch.full((5,), 2.0)}) == 2.0
