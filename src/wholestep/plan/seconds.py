"""The time of a step before it runs: operations that write memory in, seconds on a device out.

Library calls take their roofline time over the share of the peak that such calls reach; fused operations take the time to
move what they read and write. The shares were fitted once to profiles of BERT-large, GPT-2-medium and a 1.2B Llama on an
H200 (docs/plan.md: within 4 % of its step times); on other cards they are an assumption, and times are labelled so.

Copies between card and host (`ops/offload.py`) take no time of the computation: each direction is a lane beside it, in which copies
follow one another, and only a wait for one that is not over yet adds seconds. Two busy lanes share the link. Copies slowed down
neither matrix products nor copies on the card by more than 2 % on an H200, which is not counted.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import cost_of
from wholestep.cost.roofline import bound
from wholestep.ops.record import record_of
from wholestep.plan.fusion import Work

SHARE_OF_PEAK = {"matmul": 0.75, "attention": 0.25, "convolution": 0.5}
WIDE_HEAD, WIDE_HEADS_SHARE = 128, 0.45
"""Attention over wide heads reaches more. On an H200, forward and backward together by cuDNN: 0.51 over 4096 causal tokens, 0.50
over 1024, 0.37 where these are causal; with heads of 64 numbers 0.35 over 2048 causal tokens, 0.30 over 512, less with dropout."""
SHARE_OF_BANDWIDTH = 0.8
FUSED_SHARE_OF_BANDWIDTH = 0.42
"""Lower, because operands are counted once per region while several kernels of it may read them."""
LAUNCH_SECONDS = 2.5e-6


FILE_BYTES_PER_SECOND = 2.5e9
"""Of a disk that nobody measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """A step's seconds, and what of them is waiting for copies."""

    seconds: float
    waits: float = 0.0
    moved_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """`out` and `in`, per step."""


class Lanes:
    """Copies beside the computation: one lane each way, and those of a disk."""

    def __init__(self, device: Device) -> None:
        self.rates = (device.link_alone or device.bandwidth, device.link_both or device.bandwidth)
        self.waiting: dict[str, collections.deque[list[Any]]] = {n: collections.deque() for n in ("out", "in", "file")}
        self.waits = 0.0
        self.moved = {"out": 0, "in": 0}

    def begin(self, lane: str, copy: fx.Node, *, file: bool = False) -> None:
        size = copy.meta["val"].nbytes
        self.moved[lane] += size
        self.waiting["file" if file else lane].append([copy, float(size)])

    def run(self, seconds: float) -> None:
        """The computation takes so long; copies go on."""
        while seconds > 0 and (busy := self._busy()):
            step = min(seconds, min(queue[0][1] / rate for queue, rate in busy))
            self._move(busy, step)
            seconds -= step

    def wait(self, copy: fx.Node | None = None) -> float:
        """Seconds until a copy is over, or all of them."""
        waited = 0.0
        while busy := self._busy():
            if copy is not None and not any(entry[0] is copy for queue in self.waiting.values() for entry in queue):
                break
            step = min(queue[0][1] / rate for queue, rate in busy)
            self._move(busy, step)
            waited += step
        self.waits += waited
        return waited

    def _busy(self) -> list[tuple[collections.deque[list[Any]], float]]:
        """Lanes at work, and what each moves in a second now."""
        alone, both = self.rates
        rate = both if self.waiting["out"] and self.waiting["in"] else alone
        rates = {"out": rate, "in": rate, "file": FILE_BYTES_PER_SECOND}
        return [(queue, rates[lane]) for lane, queue in self.waiting.items() if queue]

    def _move(self, busy: list[tuple[collections.deque[list[Any]], float]], seconds: float) -> None:
        for queue, rate in busy:
            queue[0][1] -= rate * seconds
            if queue[0][1] <= 1e-3:  # of a byte
                queue.popleft()


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
            if cost.kind == "attention" and node.all_input_nodes[0].meta["val"].shape[-1] >= WIDE_HEAD:
                share = WIDE_HEADS_SHARE
            self._known[key] = float(bound(cost, self.device).seconds) / share + LAUNCH_SECONDS
        return self._known[key]

    def moving(self, num_bytes: float) -> float:
        """Of a fused operation that reads and writes so many bytes."""
        return num_bytes / (self.device.bandwidth * FUSED_SHARE_OF_BANDWIDTH)

    def step(self, works: Iterable[Work], sizes: Mapping[int, int]) -> Timing:
        """Of a whole step. Fused operations of a layer share what they read: each operand counts once."""
        seconds = 0.0
        lanes = Lanes(self.device)
        for work, took in self.each(works, sizes):
            if record_of(work.node).trip:
                seconds += self._trip(work.node, lanes)
                continue
            lanes.run(took)
            seconds += took
        return Timing(seconds + lanes.wait(), lanes.waits, lanes.moved)

    def each(self, works: Iterable[Work], sizes: Mapping[int, int]) -> Iterator[tuple[Work, float]]:
        """Operations with their seconds; a copy has none."""
        seen: set[tuple[int, int]] = set()
        for work in works:
            if not work.fusable:
                yield work, 0.0 if record_of(work.node).trip else self.library_call(work.node)
                continue
            moved = sum(sizes.get(s, 0) for s in work.makes)
            moved += sum(sizes.get(s, 0) for s in work.reads if (work.layer, s) not in seen)
            seen.update((work.layer, s) for s in (*work.reads, *work.makes))
            yield work, self.moving(moved)

    def _trip(self, node: fx.Node, lanes: Lanes) -> float:
        """A copy begins, or is waited for."""
        part = record_of(node).trip
        if part == "copy_out":
            lanes.begin("out", node, file=node.args[1:] == ("file",))
        elif part == "copy_in":
            lanes.begin("in", node, file=_is_in_file(node.args[0]))
        else:
            return lanes.wait(node.args[1] if part == "out_done" else node.args[0])  # type: ignore[arg-type]
        return 0.0


def _is_in_file(value: Any) -> bool:
    """Whether what is copied in was copied out to a file."""
    return record_of(value).trip == "out_done" and value.args[1].args[1:] == ("file",)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return tuple(_shape(entry) for entry in value) if isinstance(value, list | tuple) else None


def _numbers(node: fx.Node) -> Any:
    return tuple(entry for entry in node.args if isinstance(entry, int | float | bool | str))
