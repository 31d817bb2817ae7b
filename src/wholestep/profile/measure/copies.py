"""Copies between card and host in one step: a step that moves values in; bytes, rates, waits and what holds them out.

The generated function of a step speaks to one object about streams (`lower/streams.py`). Here it speaks to `TimedStreams`, which
hands everything on and lays a pair of timed events around every copy, and around every wait of the main stream for one. Files are
copied by threads, which count the seconds that a step waited for them. On a CPU copies are made at once: their time is that of the
host's memory, and nothing waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from wholestep.errors import WholestepError
from wholestep.lower.streams import Streams
from wholestep.lower.transfers import IN, OUT, Transfers
from wholestep.tiers.links import measure_link

WAITS = "waits"


class TimedStreams:
    """Streams of a step, timed."""

    def __init__(self, inner: Streams, device: torch.device) -> None:
        self.inner, self.on_gpu = inner, device.type == "cuda"
        self.spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
        """Stream, or `WAITS` of the main stream -> (begin, end): timed events, or seconds."""

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with self.inner.on(stream):
            begin = self._now()
            yield
            self.spans[stream].append((begin, self._now()))

    def wait(self, stream: str, event: str) -> None:
        if stream:
            self.inner.wait(stream, event)
            return
        begin = self._now()
        self.inner.wait(stream, event)
        self.spans[WAITS].append((begin, self._now()))

    def leave(self, stream: str, event: str) -> None:
        self.inner.leave(stream, event)

    def join(self) -> None:
        """The end of a step waits for all copies: that is a wait too."""
        begin = self._now()
        self.inner.join()
        self.spans[WAITS].append((begin, self._now()))

    def abandon(self) -> None:
        self.inner.abandon()

    def seconds(self, name: str) -> float:
        """Sum over all spans of a name; the device has been waited for."""
        if self.on_gpu:
            return sum(begin.elapsed_time(end) for begin, end in self.spans[name]) / 1e3
        return 0.0 if name == WAITS else sum(end - begin for begin, end in self.spans[name])

    def _now(self) -> Any:
        """A timed event of the current stream, or the host's clock."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedTransfers:
    """The transfers of one lowered function, and its streams in the steps that were watched."""

    transfers: Transfers
    streams: Sequence[TimedStreams]
    calls: int
    """An accumulating step calls the function for every micro-batch."""
    file_seconds: float
    """In which these steps waited for files."""


def copies_of(watched: Sequence[WatchedTransfers], steps: int, step_seconds: float) -> dict[str, Any] | None:
    """What a step moves, by the mean of those that were watched; None where it moves nothing."""
    if not watched:
        return None
    device = watched[0].transfers.device
    moved, over_link, taken = ({OUT: 0.0, IN: 0.0} for _ in range(3))
    waits = 0.0
    for one in watched:
        calls, files = one.calls / steps, one.transfers.files
        for way in (OUT, IN):
            moved[way] += calls * one.transfers.moved_bytes[way]
            over_link[way] += calls * (one.transfers.moved_bytes[way] - (files.moved_bytes[way] if files else 0))
            taken[way] += sum(timed.seconds(way) for timed in one.streams) / steps
        waits += (sum(timed.seconds(WAITS) for timed in one.streams) + one.file_seconds) / steps
    all_of = [one.transfers for one in watched]
    return {
        "moved_bytes": {way: round(count) for way, count in moved.items()},
        "copy_ms": {way: 1e3 * seconds for way, seconds in taken.items()},
        "rates": {way: over_link[way] / taken[way] if over_link[way] and taken[way] else None for way in (OUT, IN)},
        "link": _link(device),
        "wait_ms": 1e3 * waits,
        "wait_share": waits / step_seconds,
        "arena_bytes": sum(one.arena.bytes for one in all_of),
        "arena_used_bytes": sum(one.used_bytes for one in all_of),
        "state_bytes": sum(one.state_bytes for one in all_of),
        "file_bytes": sum(one.files.store.bytes for one in all_of if one.files is not None),
        "stand_in": device.type != "cuda",
    }


def _link(device: torch.device) -> dict[str, float] | None:
    """What `wholestep doctor` measures; None without a card."""
    if device.type != "cuda":
        return None
    try:
        found = measure_link(device)
    except (WholestepError, RuntimeError):  # no memory for it beside the step
        return None
    return {OUT: found.out, IN: found.back, "both": found.both}
