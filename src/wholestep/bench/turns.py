"""Rows made side by side take turns on the device: one measures while others compile.

In: the path of a lock file in the environment, set by the harness when it makes several rows at once. Out: a context in which
no other row is timed. Building and compiling need the CPU, measuring needs the GPU to itself: the steps of a row, the trials by
which Inductor chooses between versions of a kernel, which are timed as well, and the regions that a memory plan runs. Every row
gets its share of the CPU's cores to compile with, so that one is left to launch the kernels of the row that is timed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

VARIABLE = "WHOLESTEP_BENCH_TURN"
WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"


class _Mine(threading.local):
    """Whether this thread has the turn."""

    held = False


_mine = _Mine()


@contextlib.contextmanager
def taking_turns(jobs: int) -> Iterator[None]:
    """Children started inside share one device; with one job there is nobody to wait for.

    Who was started with turns to take, takes part in those: several tables can so be made at once.
    """
    if jobs == 1 or VARIABLE in os.environ:
        yield
        return
    before = os.environ.get(WORKERS)
    with tempfile.NamedTemporaryFile(prefix="wholestep-turn-") as file:
        os.environ[VARIABLE] = file.name
        os.environ[WORKERS] = before or str(max(1, (os.cpu_count() or 1) // jobs - 1))
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            if before is None:
                del os.environ[WORKERS]


def side_by_side(work: Callable[[Any], None], items: Iterable[Any], jobs: int) -> None:
    """`work(item)` for all items, `jobs` at a time; children that it starts take turns."""
    with taking_turns(jobs), ThreadPoolExecutor(jobs) as workers:
        for _ in workers.map(work, items):  # an error is raised here
            pass


@contextlib.contextmanager
def my_turn() -> Iterator[None]:
    """Wait until no other row is measured, and keep others from it meanwhile; a turn within a turn is the same one."""
    path = os.environ.get(VARIABLE)
    if path is None or _mine.held:
        yield
        return
    import fcntl

    with open(path, "ab") as file:  # the system gives the lock back when the process ends, however it ends
        fcntl.flock(file, fcntl.LOCK_EX)
        _mine.held = True
        try:
            yield
        finally:
            _mine.held = False
            fcntl.flock(file, fcntl.LOCK_UN)


def tune_in_turns() -> None:
    """From now on Inductor times the versions of a kernel, and a memory plan its regions, in a turn of this process."""
    if VARIABLE not in os.environ:
        return
    from wholestep.lower.footprint import scratch

    scratch.alone = my_turn
    try:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    except ImportError:  # no Triton here, so nothing is tuned
        return
    inner = CachingAutotuner.benchmark_all_configs

    @functools.wraps(inner)
    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        with my_turn():
            return inner(self, *args, **kwargs)

    CachingAutotuner.benchmark_all_configs = benchmark_all_configs  # type: ignore[method-assign]
