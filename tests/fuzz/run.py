"""Seeds through the stages, in several processes: the verdicts as they come."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import time
from collections.abc import Iterator, Sequence

import torch
from tests.fuzz.check import QUICK, Wrong, examine
from tests.fuzz.draw import draw
from tests.fuzz.program import forget_all
from tests.fuzz.shrink import shrunk

COMPILE_EVERY, INDUCTOR_EVERY = 20, 250
"""One graph in so many goes through `wholestep.compile` whole, and through Inductor."""
PER_PROCESS = 2000
"""Graphs that one process looks at: torch keeps something of every trace."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to look at."""

    seed: int = 0
    count: int = 1000
    minutes: float | None = None
    passes: tuple[str, ...] = ()
    backend: str | None = None
    workers: int = 2
    shrink: float = 60.0
    """Seconds for each that is wrong."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of one seed."""

    seed: int
    lines: int = 0
    refused: str | None = None
    stage: str | None = None
    what: str = ""
    test: str = ""
    seconds: float = 0.0


def results(asked: Asked) -> Iterator[Found]:
    """The verdicts, as they come, from `--workers` processes."""
    jobs = ((seed, asked) for seed in range(asked.seed, asked.seed + asked.count))
    end = None if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    if asked.workers == 1:
        for job in jobs:
            if end is not None and time.monotonic() > end:
                return
            yield look(job)
        return
    with multiprocessing.get_context("spawn").Pool(asked.workers, maxtasksperchild=PER_PROCESS) as pool:
        for found in pool.imap_unordered(look, jobs):
            yield found
            if end is not None and time.monotonic() > end:
                pool.terminate()
                return


def look(job: tuple[int, Asked]) -> Found:
    """One seed."""
    seed, asked = job
    torch.set_num_threads(1)
    _collect()
    began = time.monotonic()
    program = draw(seed)
    try:
        refused = examine(program.case(), stages_for(seed, asked.passes, asked.backend))
    except Wrong as wrong:
        short = shrunk(program, wrong.stage, asked.shrink) if asked.shrink else program
        test = short.as_test(wrong.stage, f"{wrong.stage}_{seed}")
        return Found(seed, len(program.lines), None, wrong.stage, wrong.what, test, time.monotonic() - began)
    return Found(seed, len(program.lines), refused, seconds=time.monotonic() - began)


def _collect() -> None:
    """Before every graph: the memory of the one before it is then at hand, and still in the processor's caches."""
    forget_all()  # what is in use when the rest is frozen is never freed
    gc.disable()
    gc.collect()
    gc.freeze()  # torch's own objects, and what it keeps of every trace, are not looked at again and again


def stages_for(seed: int, passes: Sequence[str] | None, backend: str | None) -> tuple[str, ...]:
    """What a seed goes through: always the same."""
    if passes:
        return tuple(passes)
    stages = QUICK
    if seed % COMPILE_EVERY == 0:
        stages = (*stages, "compile")
    if backend == "inductor" or (backend is None and seed % INDUCTOR_EVERY == 0):
        stages = (*stages, "inductor")
    return stages
