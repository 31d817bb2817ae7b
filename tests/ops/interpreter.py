"""Triton bodies without a GPU: a program that compares them with their references, under Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def assert_equal_when_interpreted(program: str) -> None:
    """The program ends with print("equal"). In a process of its own: Triton decides when it is imported whether it interprets."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr[-2000:]
