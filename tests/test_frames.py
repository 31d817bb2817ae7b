"""Frames in one piece: no depth at which calls are slow."""

from __future__ import annotations

import resource
import sys

import pytest

from wholestep.frames import in_one_piece

CALLS, DEPTHS = 200, 400


def faults_at(depth: int) -> int:
    """Page faults of calls made at a depth of the Python stack."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        one_call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def one_call() -> None:
    a, b, c, d, e, f, g, h = range(8)
    del a, b, c, d, e, f, g, h


def worst() -> int:
    return max(faults_at(depth) for depth in range(DEPTHS))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames are objects of their own before Python 3.11")
def test_calls_at_any_depth_ask_the_system_for_no_memory() -> None:
    assert in_one_piece(worst)() < CALLS / 2


def test_a_function_stays_what_it_is() -> None:
    @in_one_piece
    def named(a: int, *more: int, key: int = 3) -> tuple[int, ...]:
        """Told."""
        return (a, *more, key)

    assert named(1, 2, key=4) == (1, 2, 4)
    assert (named.__name__, named.__doc__) == ("named", "Told.")
    with pytest.raises(TypeError):
        named()
