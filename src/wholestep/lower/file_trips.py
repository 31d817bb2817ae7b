"""Values on their way to files and back: threads write and read what a few slabs of host memory hold.

In: a FileStore and tensors. A trip is one value: `send` copies it to a slab and begins to write, `sent` lets go of it, `fetch`
takes memory for it and begins to read, `fetched` has it. A slab that is not free yet is waited for, so a slow disk costs time,
never memory. An error of the disk is raised by the next call that waits: before a value is used, and before the step updates
anything with it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from wholestep.errors import WholestepError
from wholestep.ops.offload import laid_like
from wholestep.tiers.arena import host_memory, viewed
from wholestep.tiers.files import FileStore, padded

SLABS = 4
"""Values in flight: two of them leave, or come, while two are written, or read."""
LOOK_SECONDS = 0.5
"""How often whoever waits for a slab asks whether the disk hangs."""


class FileTrips:
    """The slabs and threads that all values of a step share."""

    def __init__(self, store: FileStore, device: torch.device) -> None:
        self.store, self.device = store, device
        self.slab_bytes = 0
        self.free: queue.SimpleQueue[torch.Tensor] | None = None
        self.lock = threading.Lock()
        self.writers = ThreadPoolExecutor(SLABS, thread_name_prefix="wholestep-out")
        self.readers = ThreadPoolExecutor(
            SLABS, thread_name_prefix="wholestep-in"
        )  # readers wait for writers, so apart
        self.streams: dict[str, Any] = {}
        self.moved_bytes = {"out": 0, "in": 0}
        """Per step."""
        self.waited_seconds = 0.0
        """In which the step waited for the disk, since it was made."""

    def trip(self, like: torch.Tensor) -> FileTrip:
        self.slab_bytes = max(self.slab_bytes, padded(like.nbytes))
        self.moved_bytes = {way: count + like.nbytes for way, count in self.moved_bytes.items()}
        return FileTrip(self, self.store.reserve(like.nbytes), like)

    def slab(self) -> torch.Tensor:
        """One that nobody uses."""
        with self.lock:
            if self.free is None:
                self.free = queue.SimpleQueue()
                for _ in range(SLABS):
                    self.free.put(host_memory(self.slab_bytes, pinned=self.device.type == "cuda"))
        while True:
            self.store.refuse_hung()  # whose slabs do not come back
            with contextlib.suppress(queue.Empty):
                return self.free.get(timeout=LOOK_SECONDS)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The step waits for the disk while it is open."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - began

    def give_back(self, slab: torch.Tensor) -> None:
        """It is free again, unless a request that hangs may still read or write it."""
        assert self.free is not None
        if not self.store.hung:
            self.free.put(slab)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: str) -> Any:
        """Copy beside the computation, after what the main stream was given so far; what to wait for."""
        if self.device.type != "cuda":
            target.copy_(source)
            return None
        side = self.streams.setdefault(stream, torch.cuda.Stream(self.device))
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            target.copy_(source, non_blocking=True)
            return side.record_event()


class FileTrip:
    """One value, at every step."""

    def __init__(self, trips: FileTrips, slot: tuple[int, int], like: torch.Tensor) -> None:
        self.trips, self.slot, self.num_bytes = trips, slot, like.nbytes
        self.shape, self.stride, self.dtype = like.shape, like.stride(), like.dtype  # as the trace says, whatever comes
        self.kept: torch.Tensor | None = None
        """A value that cannot be written, see `kept_beside`."""
        self.copied: Any = None
        self.written: Future[None] | None = None
        self.read: Future[Any] | None = None

    def send(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype:
            self.kept, self.copied, self.written = kept_beside(x, self.dtype), None, None
            return x.new_empty(0)
        if self.written is not None:  # of a step that failed, perhaps: two writes to one slot would have no order
            wait([self.written])
        with self.trips.waiting():
            slab = self.trips.slab()
        held = viewed(slab, 0, self.shape, self.stride, self.dtype)
        self.copied = self.trips.copy(held, x, "out")
        self.written = self.trips.writers.submit(self._write, slab, self.copied)
        return x.new_empty(0)  # what lies in a file has no tensor; `fetch` knows the sizes

    def sent(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if self.copied is not None:
            self.copied.wait(torch.cuda.current_stream(self.trips.device))
        if self.written is not None and self.written.done():
            self.written.result()
        return h

    def fetch(self, h: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.kept is not None:
            y, self.kept, self.read = self.kept, None, None
            return y
        y = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        made = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self.read = self.trips.readers.submit(self._read, y, made)
        return y

    def fetched(self, y: torch.Tensor) -> torch.Tensor:
        if self.read is None:
            return y
        with self.trips.waiting():
            arrived = self.read.result()
        if arrived is not None:
            arrived.wait(torch.cuda.current_stream(self.trips.device))
        return y

    def _write(self, slab: torch.Tensor, copied: Any) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            bytes_ = slab[: padded(self.num_bytes)]
            self.trips.store.wait(self.trips.store.write(self.slot, bytes_), self.slot)
        finally:
            self.trips.give_back(slab)

    def _read(self, y: torch.Tensor, made: Any) -> Any:
        assert self.written is not None
        self.written.result()
        slab = self.trips.slab()
        try:
            bytes_ = slab[: padded(self.num_bytes)]
            self.trips.store.wait(self.trips.store.read(self.slot, bytes_), self.slot)
            self.trips.store.check(self.slot, bytes_)
            held = viewed(slab, 0, y.shape, y.stride(), y.dtype)
            if made is None:
                y.copy_(held)
                return None
            side = self.trips.streams.setdefault("in", torch.cuda.Stream(self.trips.device))
            side.wait_event(made)
            with torch.cuda.stream(side):
                y.copy_(held, non_blocking=True)
                arrived = side.record_event()
            arrived.synchronize()  # the slab is read until then
            return arrived
        finally:
            self.trips.give_back(slab)


def kept_beside(x: torch.Tensor, traced: torch.dtype) -> torch.Tensor:
    """A copy of a value of another type than its trace says, for which no place was planned: torch's trace of LayerNorm's
    statistics in bf16 is wrong about CPUs. Written as the traced type it would come back rounded."""
    if x.device.type != "cpu":
        what = f"a value that moves is {x.dtype} and was traced as {traced}"
        raise WholestepError(what, hint="keep it: leave it out of the plan")
    return laid_like(x, x.device).copy_(x)
