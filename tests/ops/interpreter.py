"""Triton bodies without a GPU: a program that compares them with their references, under Triton's interpreter."""

from __future__ import annotations

import pytest
from tests.forked import run_in_fork


def assert_equal_when_interpreted(program: str) -> None:
    """The program ends with print("equal"). Elsewhere: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    said = run_in_fork(program, imports="import torch, triton, wholestep.ops", TRITON_INTERPRET="1")
    assert said.strip() == "equal", said
