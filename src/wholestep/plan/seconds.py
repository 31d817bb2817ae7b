"""The time of a step before it runs: operations that write memory in, seconds on a device out.

Library calls take their roofline time over the share of the peak that such calls reach; fused operations take the time to
move what they read and write. The shares were fitted once to profiles of BERT-large, GPT-2-medium and a 1.2B Llama on an
H200 (docs/plan.md: within 4 % of its step times); on other cards they are an assumption, and times are labelled so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import cost_of
from wholestep.cost.roofline import bound
from wholestep.plan.fusion import Work

SHARE_OF_PEAK = {"matmul": 0.75, "attention": 0.25, "convolution": 0.5}
SHARE_OF_BANDWIDTH = 0.8
FUSED_SHARE_OF_BANDWIDTH = 0.42
"""Lower, because operands are counted once per region while several kernels of it may read them."""
LAUNCH_SECONDS = 2.5e-6


class Clock:
    """Seconds of operations on one device; equal calls are looked up once."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._known: dict[Any, float] = {}

    def library_call(self, node: fx.Node) -> float:
        """Of an operator called as it is."""
        key = (str(node.target), *(_shape(entry.meta.get("val")) for entry in node.all_input_nodes), _numbers(node))
        if key not in self._known:
            cost = cost_of(node)
            share = SHARE_OF_PEAK.get(cost.kind, SHARE_OF_BANDWIDTH)
            self._known[key] = float(bound(cost, self.device).seconds) / share + LAUNCH_SECONDS
        return self._known[key]

    def moving(self, num_bytes: float) -> float:
        """Of a fused operation that reads and writes so many bytes."""
        return num_bytes / (self.device.bandwidth * FUSED_SHARE_OF_BANDWIDTH)

    def step(self, works: Iterable[Work], sizes: Mapping[int, int]) -> float:
        """Of a whole step. Fused operations of a region share what they read: each operand counts once."""
        seconds = 0.0
        seen: set[tuple[int, int]] = set()
        for work in works:
            if not work.fusable:
                seconds += self.library_call(work.node)
                continue
            moved = sum(sizes.get(s, 0) for s in work.makes)
            moved += sum(sizes.get(s, 0) for s in work.reads if (work.region, s) not in seen)
            seen.update((work.region, s) for s in (*work.reads, *work.makes))
            seconds += self.moving(moved)
        return seconds


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return tuple(_shape(entry) for entry in value) if isinstance(value, list | tuple) else None


def _numbers(node: fx.Node) -> Any:
    return tuple(entry for entry in node.args if isinstance(entry, int | float | bool | str))
