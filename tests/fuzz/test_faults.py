"""The fuzzer finds what is planted in the passes: a few faults in every run, all of them in the slow one."""

from __future__ import annotations

import pytest
from tests.fuzz.check import PASSES
from tests.fuzz.faults import FAULTS, Fault, found_after

MOST = 400
"""Graphs: 0.04 of what `make fuzz` looks at."""
QUICK = ("fold_constants", "lean_gradients", "order_for_peak", "fuse_loss", "remove_dead")
"""Found within a few graphs."""


def test_every_pass_has_a_fault() -> None:
    assert {fault.stage for fault in FAULTS} == set(PASSES)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.stage in QUICK], ids=lambda fault: fault.stage)
def test_a_planted_fault_is_found(fault: Fault) -> None:
    assert found_after(fault, 60) is not None, fault.says


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.stage)
def test_every_planted_fault_is_found(fault: Fault, capsys: pytest.CaptureFixture[str]) -> None:
    after = found_after(fault, MOST)
    with capsys.disabled():
        print(f"\n{fault.stage:<16} {fault.says}: found after {after} graphs")
    assert after is not None, fault.says
