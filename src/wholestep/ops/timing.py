"""How long calls take: a clock per kind of device, and one way to let calls race each other.

In: calls by name and the rules of the race. Out: seconds by name, and why the others have none. CUDA events time the device,
perf_counter the CPU. Calls take turns, so that a machine which slows down for a while slows all of them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, Protocol

import torch

from wholestep.errors import first_line, one_line


class Clock(Protocol):
    """Takes marks on a timeline and says later how far apart they were."""

    def mark(self) -> Any: ...

    def seconds(self, first: Any, last: Any) -> float: ...


class HostClock:
    """The time of this process."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, first: float, last: float) -> float:
        return last - first


class EventClock:
    """CUDA events: taking a mark does not wait for anything, asking how far apart two are waits for the second."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3


def clock_of(device: torch.device) -> Clock:
    return EventClock() if device.type == "cuda" else HostClock()


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Of a race."""

    warmups: int = 3
    rounds: int = 5
    most_rounds: int = 5
    """Run as long as the first does not win: where it is dropped for good, its loss has to be a lasting one."""
    summary: Callable[[Iterable[float]], float] = median
    tolerated: float = 1.0
    """The first that takes at most so many times what the fastest takes wins."""

    def winner(self, seconds: Mapping[str, float]) -> str:
        best = min(seconds.values())
        return next(name for name, taken in seconds.items() if taken <= self.tolerated * best)


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a call could not be tried, as text: the exception itself would hold the memory of its frames."""

    reason: str
    out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        short = isinstance(error, torch.OutOfMemoryError)
        return cls(first_line(error) if short else one_line(error), short)


def race(
    prepare: Mapping[str, Callable[[], Callable[[], Any]]], clock: Clock, rules: Rules
) -> tuple[dict[str, float], dict[str, Failure]]:
    """Each entry makes a call ready, which is not timed; a call that raises leaves the race."""
    times: dict[str, list[float]] = {name: [] for name in prepare}
    failures: dict[str, Failure] = {}
    for count in range(-rules.warmups, rules.most_rounds):
        for name in list(times):
            try:
                taken = _timed(prepare[name], clock)
            except Exception as error:
                failures[name] = Failure.of(error)
                del times[name]
                continue
            if count >= 0:
                times[name].append(taken)
        seconds = {name: rules.summary(found) for name, found in times.items() if found}
        if not times or (count + 1 >= rules.rounds and rules.winner(seconds) == next(iter(times))):
            break
    return {name: rules.summary(found) for name, found in times.items()}, failures


def _timed(prepare: Callable[[], Callable[[], Any]], clock: Clock) -> float:
    call = prepare()
    first = clock.mark()
    result = call()
    last = clock.mark()
    del result
    return clock.seconds(first, last)
