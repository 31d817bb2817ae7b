"""Trainings made by rule are those of eager PyTorch: whole, or with a reason told; never another model in silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.trust.product import CHANGES, HOLDERS, PLACES, USES, Combination, combinations
from tests.trust.run import judge

FEW, MANY, PARTS = 25, 3000, 30
SHARE_WHOLE = 0.6
RIGHT = ("whole", "loud", "refused")
FOUND = (
    "attribute / key / loss / numbers of numpy",
    "annotation / text by str / finally / alternating",
    "metaclass property / divmod / map / by the loss, negated",
    "optimizer's attribute / smooth / equal layers / by the loss, capped",
    "dictionary / smooth / loss / below nothing",
    "missing key caught / caught / function's backward / there and back",
    "partial / of numpy / checkpoint / large",
)
"""What was wrong once."""


def require_right(chosen: list[Combination], **options: str | bool) -> int:
    """How many are whole."""
    outcomes = [judge(one.case(), **options) for one in chosen]
    wrong = [f"{found.case.name}: {found.verdict}: {found.detail}" for found in outcomes if found.verdict not in RIGHT]
    assert not wrong, "\n".join(wrong)
    return sum(found.verdict == "whole" for found in outcomes)


def test_a_sample_is_trained_as_in_eager() -> None:
    chosen = list(combinations(FEW, seed=0))
    assert require_right(chosen) >= SHARE_WHOLE * FEW


@pytest.mark.parametrize("name", FOUND)
def test_what_was_wrong_once(name: str) -> None:
    require_right([Combination(*name.split(" / "))])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_many_are_trained_as_in_eager(part: int) -> None:
    require_right(list(combinations(MANY // PARTS, seed=1000 + part)))


@pytest.mark.slow
@pytest.mark.parametrize("table", [HOLDERS, USES, PLACES, CHANGES], ids=["holders", "uses", "places", "changes"])
def test_every_part_once(table: dict) -> None:
    for seed, part in enumerate(table):
        require_right(list(combinations(1, seed, [part])))


@pytest.mark.slow
def test_a_value_of_another_process_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One folder for programs that differ in what they read."""
    monkeypatch.setitem(os.environ, "WHOLESTEP_CACHE_DIR", str(tmp_path))
    for seed in range(20):
        one = next(combinations(1, seed))
        again = [Combination(one.holder, one.use, one.place, change) for change in ("once", "ramp", "second", "to one")]
        require_right([other for other in (one, *again) if other.possible], cache=True)


@pytest.mark.slow
def test_a_sample_compiled() -> None:
    require_right(list(combinations(20, seed=7)), backend="inductor")


@pytest.mark.slow
def test_a_sample_checked() -> None:
    require_right(list(combinations(60, seed=8)), check="first")
