"""Kernels of a GPU and who launched them: a profiler's events in, seconds per call and the busy share out.

A kernel runs later than the call that asked for it, often in another order of time. The driver's launch (`cudaLaunchKernel`
and its like) carries the same correlation number as the kernel, and happens on the host inside the call. Everything
but `recorded` works on plain data, so it is tested without a GPU. Where no launch was seen, the operator around it stands in.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

PREFIX = "wholestep.call|"
_LAUNCHES = ("cuda", "cu", "hip")


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """One thing the profiler saw: a launch or a mark on the host, or a kernel (or copy) on the device. Nanoseconds."""

    name: str
    start: int
    end: int
    on_device: bool
    correlation: int = 0
    """A kernel and its launch have the same number; operators have numbers of another series."""
    linked: int = 0
    """The operator around the launch of a kernel, by its number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel by name, in one call."""

    name: str
    count: int
    seconds: float


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[list[Activity]]:
    """The list is filled when the context ends."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces itself on stderr otherwise
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    found: list[Activity] = []
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        yield found
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    for event in profile.profiler.kineto_results.events():
        start = event.start_ns()
        on_device = "CPU" not in str(event.device_type())
        linked = event.linked_correlation_id()
        found.append(
            Activity(event.name(), start, start + event.duration_ns(), on_device, event.correlation_id(), linked)
        )


def mark(number: int) -> torch.profiler.record_function:
    """Around call `number`."""
    return torch.profiler.record_function(f"{PREFIX}{number}")


def kernels_of(activities: Iterable[Activity]) -> list[Activity]:
    """What ran on the device; the profiler also draws the host's marks there, which are no work."""
    return [a for a in activities if a.on_device and not a.name.startswith((PREFIX, "wholestep.", "ProfilerStep"))]


def by_call(activities: Sequence[Activity]) -> tuple[dict[int, list[Kernel]], list[Kernel]]:
    """(kernels of each marked call, kernels that no marked call launched)."""
    marks = sorted(
        (a.start, a.end, int(a.name.removeprefix(PREFIX))) for a in activities
        if not a.on_device and a.name.startswith(PREFIX)
    )  # fmt: skip
    starts = [start for start, _, _ in marks]
    launched = {
        a.correlation: a.start for a in activities if not a.on_device and a.correlation and a.name.startswith(_LAUNCHES)
    }
    operators = {
        a.correlation: a.start
        for a in activities
        if not a.on_device and a.correlation and not a.name.startswith(_LAUNCHES)
    }
    found: dict[int | None, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for kernel in kernels_of(activities):
        call = None
        when = launched.get(kernel.correlation, operators.get(kernel.linked))
        if when is not None:
            place = bisect.bisect_right(starts, when) - 1
            if place >= 0 and when <= marks[place][1]:
                call = marks[place][2]
        found[call][kernel.name].append(kernel.end - kernel.start)
    listed = {call: _kernels(names) for call, names in found.items()}
    lost = listed.pop(None, [])
    return {call: kernels for call, kernels in listed.items() if call is not None}, lost


def busy_seconds(activities: Iterable[Activity]) -> float:
    """Time during which at least one kernel ran."""
    total, until = 0, 0
    for kernel in sorted(kernels_of(activities), key=lambda a: a.start):
        total += max(0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total / 1e9


def _kernels(names: dict[str, list[int]]) -> list[Kernel]:
    rows = [Kernel(name, len(times), sum(times) / 1e9) for name, times in names.items()]
    return sorted(rows, key=lambda kernel: -kernel.seconds)
