"""Host memory that comes and goes: buffers of a size are used again, up to a limit."""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from wholestep.tiers.arena import host_memory

ROUNDING = 64 << 10
"""Of buffers: a training loop asks for the same sizes again and again, so there is little to be gained by splitting them."""


class Pool:
    """Buffers of the host, pinned or not."""

    def __init__(self, limit_bytes: int, *, pinned: bool) -> None:
        self.limit, self.pinned = limit_bytes, pinned
        self.held = 0
        """Bytes allocated, used or not."""
        self.free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.lock = threading.Lock()
        self._taken = 0
        self._returned: deque[torch.Tensor] = deque()

    @property
    def taken(self) -> int:
        """Bytes in use."""
        with self.lock:
            self._settle()
            return self._taken

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A buffer of at least so many bytes; None when the pool is full."""
        size = -(-max(num_bytes, 1) // ROUNDING) * ROUNDING
        with self.lock:
            self._settle()
            if self._taken + size > self.limit:
                return None
            if not self.free[size] and self.held + size > self.limit:
                self._give_up(size)
            self._taken += size
            if self.free[size]:
                return self.free[size].pop()
            self.held += size
        return host_memory(size, pinned=self.pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Without the lock: it is called when the last value is dropped, which a garbage collection does in any thread, in the
        middle of `take` too."""
        self._returned.append(buffer)

    def _settle(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._taken -= buffer.numel()
            self.free[buffer.numel()].append(buffer)

    def _give_up(self, wanted: int) -> None:
        """Buffers of other sizes that nobody uses make room."""
        for buffers in self.free.values():
            while buffers and self.held + wanted > self.limit:
                self.held -= buffers.pop().numel()
