"""Rows made side by side take turns on the device: one measures while others compile.

In: the path of a lock file in the environment, set by the harness when it makes several rows at once. Out: a context in which
no other row is timed. Building and compiling need the CPU, measuring needs the GPU to itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

VARIABLE = "WHOLESTEP_BENCH_TURN"


@contextlib.contextmanager
def taking_turns(jobs: int) -> Iterator[None]:
    """Children started inside share one device; with one job there is nobody to wait for."""
    if jobs == 1:
        yield
        return
    with tempfile.NamedTemporaryFile(prefix="wholestep-turn-") as file:
        os.environ[VARIABLE] = file.name
        try:
            yield
        finally:
            del os.environ[VARIABLE]


@contextlib.contextmanager
def my_turn() -> Iterator[None]:
    """Wait until no other row is measured, and keep others from it meanwhile."""
    path = os.environ.get(VARIABLE)
    if path is None:
        yield
        return
    import fcntl

    with open(path, "ab") as file:  # the system gives the lock back when the process ends, however it ends
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
