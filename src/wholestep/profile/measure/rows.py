"""Calls of a few steps -> the rows of the table: equal work together, with what was reached and what was lost.

Times are medians over the steps per call, summed over the calls of a row. Lost is measured minus least time: what a perfect
kernel on this device would give back. Nothing is lost where a call took no longer than its least time: a cache is faster than
the memory that the least time assumes, and a peak that was measured while the machine was busy is too low.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

from wholestep.graph.layers import layer_pattern
from wholestep.profile.measure.calls import UNATTRIBUTED, TimedCall
from wholestep.profile.measure.work import sum_of

BEYOND_CLOCK = 1.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EqualCalls:
    """Calls that do the same in equal layers. Milliseconds are per step."""

    name: str
    kind: str
    phase: str
    module: str
    """With `*` for the number of a layer."""
    calls: int
    ms: float
    share: float
    """Of the step."""
    flops: float | None
    bytes: float | None
    floor_ms: float | None
    lost_ms: float | None
    bound: str
    tflops_per_second: float | None
    gb_per_second: float | None
    kernels: tuple[tuple[str, int, float], ...] = ()
    """(name, launches, ms) on a GPU, longest first."""


def median_calls(steps: Sequence[Sequence[TimedCall]]) -> list[TimedCall]:
    """One list of calls with the median time of each; where steps made other calls, the first step's times stand."""
    first = list(steps[0])
    if any([c.key for c in calls] != [c.key for c in first] for calls in steps[1:]):
        return first
    return [
        dataclasses.replace(call, seconds=statistics.median(calls[i].seconds for calls in steps))
        for i, call in enumerate(first)
    ]


def fitted(
    calls: Sequence[TimedCall], watched_seconds: float | None, step_seconds: float
) -> tuple[list[TimedCall], float]:
    """The calls of watched steps, told as part of the sampled step; (calls, the factor their times were multiplied by).

    Watched steps run at another moment and with a clock around every call. Scaling by whole steps keeps what share of a step
    each call is, so that a busy machine does not turn up as time between calls. Without `watched_seconds`, and wherever the
    calls would be longer than the step, they are fitted into it.
    """
    factor = step_seconds / watched_seconds if watched_seconds else 1.0
    total = sum(call.seconds for call in calls)
    if factor * total > step_seconds:
        factor = step_seconds / total
    return [dataclasses.replace(call, seconds=factor * call.seconds) for call in calls], factor


def beats_the_peak(calls: Sequence[TimedCall]) -> bool:
    """Whether arithmetic was faster than the device's peak, beyond what a clock may be off: then the peak is too low."""
    known = [call for call in calls if call.work is not None and call.work.limit == "compute"]
    groups: dict[str, list[TimedCall]] = defaultdict(list)
    for call in known:
        groups[call.key].append(call)
    return any(
        sum(c.seconds for c in group) * BEYOND_CLOCK < sum(c.work.compute_seconds for c in group if c.work is not None)
        for group in groups.values()
    )


def below_the_roof(calls: Sequence[TimedCall]) -> list[TimedCall]:
    """The calls, none with a least time above the time it took."""
    return [
        call if call.work is None or call.work.floor_seconds <= call.seconds
        else dataclasses.replace(call, work=dataclasses.replace(
            call.work, floor_seconds=call.seconds, compute_seconds=min(call.work.compute_seconds, call.seconds)
        ))
        for call in calls
    ]  # fmt: skip


def rows_of(calls: Sequence[TimedCall], step_seconds: float) -> list[EqualCalls]:
    """Rows, most to be won first; what is not attributed comes last."""
    groups: dict[str, list[TimedCall]] = defaultdict(list)
    for call in calls:
        groups[call.key].append(call)
    rows = [_row(group, step_seconds) for group in groups.values()]
    shown = [row for row in rows if row.ms > 0 or row.flops]
    return sorted(shown, key=lambda row: (row.lost_ms is None, -(row.lost_ms or 0.0), -row.ms))


def _row(group: list[TimedCall], step_seconds: float) -> EqualCalls:
    first, seconds = group[0], sum(call.seconds for call in group)
    known = all(call.work is not None for call in group)
    work = sum_of(call.work for call in group if call.work is not None) if known else None
    rate = seconds if work is not None and seconds > 0 else None
    return EqualCalls(
        name=first.name, kind=first.kind, phase=first.phase, module=_module(group), calls=len(group), ms=1e3 * seconds,
        share=seconds / step_seconds if step_seconds else 0.0, flops=None if work is None else work.flops,
        bytes=None if work is None else work.bytes, floor_ms=None if work is None else 1e3 * work.floor_seconds,
        lost_ms=None if work is None else 1e3 * (seconds - work.floor_seconds),
        bound=UNATTRIBUTED if work is None else work.limit,
        tflops_per_second=None if work is None or rate is None else work.flops / rate / 1e12,
        gb_per_second=None if work is None or rate is None else work.bytes / rate / 1e9, kernels=_kernels(group),
    )  # fmt: skip


def _module(group: list[TimedCall]) -> str:
    paths = sorted({layer_pattern(call.module) for call in group})
    return paths[0] if len(paths) == 1 else ", ".join(paths[:2]) + (", ..." if len(paths) > 2 else "")


def _kernels(group: list[TimedCall]) -> tuple[tuple[str, int, float], ...]:
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for kernel in (kernel for call in group for kernel in call.kernels):
        found[kernel.name][0] += kernel.count
        found[kernel.name][1] += 1e3 * kernel.seconds
    rows = [(name, int(count), ms) for name, (count, ms) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row[2]))[:8]


# ---- the same time, cut in other ways ----


def by_phase(calls: Sequence[TimedCall], step_seconds: float) -> dict[str, float]:
    """Milliseconds of each phase; `between calls` is what no call took."""
    found: dict[str, float] = defaultdict(float)
    for call in calls:
        found[call.phase] += 1e3 * call.seconds
    rest = 1e3 * step_seconds - sum(found.values())
    return dict(found) | {"between calls": max(rest, 0.0)}


def by_module(calls: Sequence[TimedCall]) -> dict[str, dict[str, float]]:
    """Module path -> phase -> milliseconds; a module's own, without its children's. "" is what no module made."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call in calls:
        found[call.module][call.phase] += 1e3 * call.seconds
    return {path: dict(split) for path, split in sorted(found.items())}


def waterfall(calls: Sequence[TimedCall], step_seconds: float, *, classes: int = 6) -> list[tuple[str, float]]:
    """(what, milliseconds), from the least time to the measured step; the entries add up to it."""
    known = [call for call in calls if call.work is not None]
    total = sum_of(call.work for call in known if call.work is not None)
    lost: dict[str, float] = defaultdict(float)
    for call in known:
        assert call.work is not None
        name = call.kind if call.kind != "region" else f"region {call.name.partition(' (')[0]}"
        lost[name] += call.seconds - call.work.floor_seconds
    ranked = sorted(lost.items(), key=lambda item: -abs(item[1]))
    rest = sum(seconds for _, seconds in ranked[classes:])
    waiting = total.floor_seconds - total.compute_seconds
    entries = [("arithmetic at the peak", total.compute_seconds), ("memory at full bandwidth", waiting)]
    entries += [(f"lost in {name}", seconds) for name, seconds in ranked[:classes]]
    entries += [("lost elsewhere", rest)] if rest else []
    foreign = sum(call.seconds for call in calls if call.work is None)
    entries += [(UNATTRIBUTED, foreign)] if foreign else []
    spent = sum(call.seconds for call in calls)
    entries.append(("between calls (host)", step_seconds - spent))
    return [(name, 1e3 * seconds) for name, seconds in entries]
