"""Every training of the battery is that of eager PyTorch: captured as a whole, or with a reason told, never wrong in silence."""

from __future__ import annotations

import pytest
from tests.trust.battery import CASES, LOUD
from tests.trust.case import Case
from tests.trust.run import judge

FEWEST, SHARE_WHOLE = 200, 0.8
ON_INDUCTOR = ("counter_with_a_threshold", "layer_thawed_with_adamw", "channels_last_later", "expanded_tensors")
"""A branch, other parameters, other strides: what compiled code was made for. Guards are the same on both backends."""
every_case = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
every_case_in_time = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] if case.slow else []) for name, case in CASES.items()],
)


def require_right(case: Case, **options: str) -> None:
    found = judge(case, cache=True, **options)
    told = f"{case.name} is {found.verdict}: {found.detail}"
    if case.name in LOUD:
        assert found.verdict in ("loud", "refused"), told
        assert LOUD[case.name].lower() in found.detail.lower()
    else:
        assert found.verdict == "whole", told


@every_case_in_time
def test_trained_as_in_eager(case: Case) -> None:
    require_right(case)


def test_some_are_trained_as_in_eager_compiled() -> None:
    """In one test, since the first compile of a process takes longer than all the others together."""
    for name in ON_INDUCTOR:
        require_right(CASES[name], backend="inductor")


def test_what_a_failing_first_step_did_stays_done() -> None:
    require_right(CASES["error_at_the_first_step_of_a_graph"], check="first")


@pytest.mark.slow
@every_case
def test_every_training_compiled(case: Case) -> None:
    require_right(case, backend="inductor")


@pytest.mark.slow
@every_case
def test_the_first_check_leaves_nothing_behind(case: Case) -> None:
    require_right(case, check="first")


@pytest.mark.slow
@every_case
def test_the_battery_itself(case: Case) -> None:
    """Eager against eager: whatever differs there is no fault of Wholestep."""
    found = judge(case, alone=True)
    assert found.verdict == "whole", f"{found.verdict}: {found.detail}"


def test_most_are_whole() -> None:
    """A case outside LOUD must be whole, so the table says how many are."""
    assert sum(not case.slow for case in CASES.values()) >= FEWEST
    assert len(LOUD) <= (1 - SHARE_WHOLE) * len(CASES)


def test_no_loud_case_is_unknown() -> None:
    assert not LOUD.keys() - CASES.keys()
