"""Host memory that comes and goes: buffers of a size are used again, up to a limit."""

from __future__ import annotations

import threading
from collections import defaultdict

import torch

from wholestep.tiers.arena import host_memory

ROUNDING = 64 << 10
"""Of buffers: a training loop asks for the same sizes again and again, so there is little to be gained by splitting them."""


class Pool:
    """Buffers of the host, pinned or not."""

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.limit, self.pinned = limit_bytes, pinned
        self.taken = 0
        """Bytes in use."""
        self.held = 0
        """Bytes allocated, used or not."""
        self.free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.lock = threading.Lock()  # buffers come back from whichever thread drops the last value

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of at least so many bytes; None when the pool is full."""
        size = -(-max(num_bytes, 1) // ROUNDING) * ROUNDING
        with self.lock:
            if self.taken + size > self.limit:
                return None
            if not self.free[size] and self.held + size > self.limit:
                self._give_up(size)
            self.taken += size
            if self.free[size]:
                return self.free[size].pop()
            self.held += size
        return host_memory(size, pinned=self.pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self.lock:
            self.taken -= buffer.numel()
            self.free[buffer.numel()].append(buffer)

    def _give_up(self, wanted: int) -> None:
        """Buffers of other sizes that nobody uses make room."""
        for buffers in self.free.values():
            while buffers and self.held + wanted > self.limit:
                self.held -= buffers.pop().numel()
