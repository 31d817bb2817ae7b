"""The numbers of a run: from the device to `metrics.jsonl`, without the training loop ever waiting for them.

In: after every step its loss and gradient norm, as tensors. Out: rows of floats, in order, once they are known; and the file
they are kept in, one JSON object per line:

    {"step": 12, "loss": 2.31, "lr": 0.001, "grad_norm": 0.8, "tokens_per_second": 51200.0, "memory_bytes": 812, "seconds": 3.2}
    {"step": 20, "held_out_loss": 2.4, "seconds": 5.0}

A number that is not finite is null in the file, which JSON can hold, and such a row says `"finite": false`; where it is only the
gradients of a step in fp16, whose loss scale then falls, it also says `"by_loss_scale": true`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholestep.report.smooth import losses_of as losses_of
from wholestep.train.run_folder import telling_what_the_disk_refused, write_file

METRICS = "metrics.jsonl"
RATE_SECONDS = 3.0
"""Speed is told over so many of the last seconds: long enough to be steady, short enough to follow a change."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One step, once its numbers have reached the host."""

    step: int
    loss: float
    grad_norm: float | None
    lr: float | None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))


class LossWatch:
    """Takes the tensors of every step and gives their values back when they are there.

    On CUDA the values are copied to pinned memory behind the step, and an event tells when they have arrived: `ready` asks
    it and never waits. On the CPU a step has ended when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.pending: collections.deque[tuple[int, float | None, Tensor, bool, Any]] = collections.deque()
        self.free: list[tuple[Tensor, Any]] = []

    def push(self, step: int, loss: Tensor, grad_norm: Tensor | None, lr: float | None) -> None:
        values = [loss.detach().reshape(()).float()]
        if grad_norm is not None:
            values.append(grad_norm.detach().reshape(()).float().to(loss.device))
        if not self.on_cuda:
            self.pending.append((step, lr, torch.stack(values), grad_norm is not None, None))
            return
        slot, event = self.free.pop() if self.free else (torch.empty(2, pin_memory=True), torch.cuda.Event())
        slot[: len(values)].copy_(torch.stack(values), non_blocking=True)
        event.record()
        self.pending.append((step, lr, slot, grad_norm is not None, event))

    def ready(self, *, wait: bool = False) -> list[Measured]:
        """The steps whose numbers have arrived, in order; `wait` waits for all of them."""
        found = []
        while self.pending:
            step, lr, slot, has_norm, event = self.pending[0]
            if event is not None:
                if wait:
                    event.synchronize()
                elif not event.query():
                    break
                self.free.append((slot, event))
            values = slot.tolist()
            found.append(Measured(step, values[0], values[1] if has_norm else None, lr))
            self.pending.popleft()
        return found


class Clock:
    """Seconds spent training: saving and measuring the held-out loss are left out, earlier parts of the run are counted."""

    def __init__(self, before: float = 0.0) -> None:
        self._sum, self._since = before, time.perf_counter()

    @property
    def seconds(self) -> float:
        return self._sum + time.perf_counter() - self._since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._sum = self.seconds
        try:
            yield
        finally:
            self._since = time.perf_counter()


class Speed:
    """Units per second over the last few seconds."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.seen: collections.deque[tuple[float, int]] = collections.deque()

    def after(self, step: int, seconds: float) -> float | None:
        """None for the first step, which has nothing to be compared with and may have compiled something."""
        self.seen.append((seconds, step))
        while len(self.seen) > 2 and seconds - self.seen[1][0] > RATE_SECONDS:
            self.seen.popleft()
        then, earlier = self.seen[0]
        return self.units * (step - earlier) / (seconds - then) if seconds > then and step > earlier else None


def steady_rate(rows: Sequence[dict[str, Any]], units: int) -> float | None:
    """Units per second over the second half of the rows: the first steps compile, measure and record."""
    steps = [row for row in rows if "loss" in row]
    half = steps[len(steps) // 2 :]
    if len(half) < 2 or half[-1]["seconds"] <= half[0]["seconds"]:
        return None
    return units * (half[-1]["step"] - half[0]["step"]) / (half[-1]["seconds"] - half[0]["seconds"])


class MetricsFile:
    """`metrics.jsonl`, appended to while training and cut back to the checkpoint on resume."""

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = [] if resume_at is None else kept_rows(path, resume_at)
        self._waiting: list[str] = []
        self._flushed = time.monotonic()
        if resume_at is not None:
            write_file(path, "".join(_line(row) for row in self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """Kept in memory for at most a second or so."""
        self.rows.append(row)
        self._waiting.append(_line(row))
        if time.monotonic() - self._flushed > 1.0:
            self.flush()

    def flush(self) -> None:
        """What is known is in the file when this returns; a checkpoint is written only after that."""
        text, self._waiting = "".join(self._waiting), []
        self._flushed = time.monotonic()
        if text:
            with telling_what_the_disk_refused(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of the file; a line cut short by a killed run is left out, and so is anything that is no row."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def kept_rows(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows up to `step`: what came after it will be trained again."""
    return [row for row in read_rows(path) if row["step"] <= step]


class Memory:
    """Bytes the run holds now: reserved on the GPU, or resident in the process. Asked at most a few times a second."""

    SECONDS = 0.25
    """torch takes a fraction of a millisecond to count: not at every step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._asked, self._bytes = -math.inf, 0

    def bytes(self) -> int:
        if time.monotonic() - self._asked > self.SECONDS:
            self._bytes, self._asked = self._measured(), time.monotonic()
        return self._bytes

    def _measured(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        import psutil

        return int(psutil.Process().memory_info().rss)


def number(value: float | None) -> float | None:
    """For JSON, which has neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
