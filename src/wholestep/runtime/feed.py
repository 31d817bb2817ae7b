"""The feed: every number a step needs that is not a tensor of the user's, in one small device buffer.

Random keys (int64) and optimizer numbers (float64) change at every step and must not be burned into a graph nor cost a
synchronisation. They share one buffer, filled on the host and sent with one asynchronous copy; graph inputs are fixed views
of it, so a CUDA graph can read them. Each slot begins at 16 bytes: Inductor copies inputs that are less aligned.
"""

from __future__ import annotations

import numpy as np
import torch

_SLOT = 2  # 8-byte words per slot of 16 bytes
_RING = 4  # host buffers in flight before the host waits for the device


class Feed:
    """Named slots of 8-byte words; `keys` and `hyper` hand out the views that graphs read."""

    def __init__(self, device: torch.device, num_keys: int, hyper_sizes: dict[str, int]) -> None:
        self.device, self.num_keys = device, num_keys
        self.offsets: dict[str, int] = {}
        words = num_keys * _SLOT
        for name, size in hyper_sizes.items():
            self.offsets[name] = words
            words += (size + _SLOT - 1) // _SLOT * _SLOT
        words = max(words, 1)
        self.sizes = dict(hyper_sizes)
        self.on_cpu = device.type == "cpu"
        pinned = device.type == "cuda"
        count = 1 if self.on_cpu else _RING
        self.hosts = [torch.zeros(words, dtype=torch.int64, pin_memory=pinned) for _ in range(count)]
        self.arrays = [host.numpy() for host in self.hosts]
        self.events: list[torch.cuda.Event | None] = [None] * count
        self.turn = 0
        self.buffer = self.hosts[0] if self.on_cpu else torch.zeros(words, dtype=torch.int64, device=device)

    def key(self, site: int) -> torch.Tensor:
        return self.buffer[site * _SLOT]

    def hyper(self, name: str) -> torch.Tensor:
        start = self.offsets[name]
        view = self.buffer[start : start + self.sizes[name]].view(torch.float64)
        return view[0] if name == "clip_norm" else view

    def fill(self, keys: np.ndarray | None, numbers: dict[str, list[float]]) -> None:
        """Write this step's keys and numbers, and send them; does not wait for the device."""
        slot = self.turn % len(self.hosts)
        event = self.events[slot]
        if event is not None:
            event.synchronize()  # only when the device is a whole ring behind
        array = self.arrays[slot]
        if keys is not None:
            array[: self.num_keys * _SLOT : _SLOT] = keys
        floats = array.view(np.float64)
        for name, values in numbers.items():
            start = self.offsets[name]
            floats[start : start + len(values)] = values
        if self.on_cpu:
            return
        self.buffer.copy_(self.hosts[slot], non_blocking=True)
        if self.device.type == "cuda":
            if event is None:
                event = self.events[slot] = torch.cuda.Event()
            event.record()
        self.turn += 1
