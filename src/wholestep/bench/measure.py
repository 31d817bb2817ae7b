"""One workload trained by one contender in this process, measured; the row that comes of it.

In: a workload, the name of a contender, sizes, a device, a seed and a Protocol. Out: a row, as plain data. `attempt` is the
same for callers who want a row whatever happens: a failure becomes one with its status and a one-line reason.

Every iteration is timed by itself with the device idle before it: by CUDA events on a GPU, by the clock of the process on a
CPU. The loss is read after the clock has stopped.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from typing import Protocol as Interface

import torch
from torch import nn

from wholestep.bench import machine
from wholestep.bench.contender_names import is_ours
from wholestep.bench.contenders import NotInstalled, Ours, make_maker, plain_step
from wholestep.bench.figures import summarised
from wholestep.bench.memory import MemoryMeter
from wholestep.bench.protocol import Protocol, settled
from wholestep.bench.turns import my_turn
from wholestep.bench.workload import Part, StepCall, Workload
from wholestep.capture.subject import modules_of
from wholestep.errors import is_out_of_memory

SETTLING = 2
"""Iterations between giving memory back and the window, in which the allocator takes again what training needs."""


class Iterates(Interface):
    """What can be timed: a Training, or anything with iterations."""

    def iterate(self, calls: Sequence[StepCall], number: int) -> Any: ...


class Timed:
    """A Training under the clock: iterations in order, their milliseconds and their losses."""

    def __init__(
        self,
        training: Iterates,
        calls: Sequence[StepCall],
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: seconds, by which steps on a CPU are timed."""
        self.training, self.calls, self.on_gpu, self.clock = training, calls, device.type == "cuda", clock
        self.milliseconds: list[float] = []
        self.curve: list[float | None] = []

    def iterate(self) -> float:
        number = len(self.curve)
        if self.on_gpu:
            torch.cuda.synchronize()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            loss = self.training.iterate(self.calls, number)
            end.record()
            torch.cuda.synchronize()
            taken = start.elapsed_time(end)
        else:
            began = self.clock()
            loss = self.training.iterate(self.calls, number)
            taken = 1e3 * (self.clock() - began)
        value = float(loss)
        self.milliseconds.append(taken)
        self.curve.append(value if math.isfinite(value) else None)
        return taken

    def iterate_alone(self) -> float:
        """One iteration by the clock of the process, in seconds."""
        began = time.perf_counter()
        self.iterate()
        return time.perf_counter() - began


def measure(
    workload: Workload, contender: str, *, size: str, device: torch.device, seed: int, protocol: Protocol,
    passes: Sequence[Any] = (), recipe: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The row of a workload and a contender; raises whatever goes wrong."""
    lacking = [package for package in workload.needs if importlib.util.find_spec(package) is None]
    if lacking:
        raise NotInstalled(f"{workload.name} needs {', '.join(lacking)}, not installed")
    make = make_maker(contender, passes, recipe)
    if device.type == "cuda":  # the same for all: tensor cores for what is left in fp32
        torch.set_float32_matmul_precision("high")
    sizes: dict[str, Any] = getattr(workload, size)
    began = time.perf_counter()
    training = workload.training(sizes, device, seed, ours=is_ours(contender))
    built = time.perf_counter() - began
    dropout = has_dropout(training.parts)
    meter = MemoryMeter(device)
    began = time.perf_counter()
    calls = [make(part, training.precision) for part in training.parts]
    timed = Timed(training, [meter.watched(call) for call in calls], device)
    compiled = time.perf_counter() - began
    if contender.startswith("compile"):  # it compiles in its first step; others choose kernels there, by measurement
        compiled += timed.iterate_alone()
    with my_turn():
        began = time.perf_counter()
        if not timed.curve:
            timed.iterate()
        row: dict[str, Any] = {"build_seconds": built, "first_step_seconds": compiled + time.perf_counter() - began}
        row |= warmed_up(timed, protocol)
        window = sampled(timed, protocol, meter)
        row |= {
            "step_ms": summarised(window),
            "memory": meter.read(),
            "machine": machine.facts(on_gpu=device.type == "cuda"),
        }
    row |= {
        "throughput": training.units / row["step_ms"]["median"] * 1e3,
        "unit": workload.unit,
        "precision": training.precision,
    }
    row |= {"dropout": dropout, "curve": timed.curve}
    row["losses"] = {str(step): timed.curve[step] for step in protocol.loss_steps()}
    ours = [call.facts() for call in calls if isinstance(call, Ours)]
    if contender == "eager" and device.type == "cuda":
        del training, calls, timed  # two of them may be more than the card holds
        with my_turn():
            row["again"] = _losses_again(workload, sizes, device, seed, protocol.loss_steps())
    return row | ({"wholestep": ours} if ours else {})


def _losses_again(
    workload: Workload, sizes: dict[str, Any], device: torch.device, seed: int, steps: Sequence[int]
) -> dict[str, float | None]:
    """What eager PyTorch's losses are in another training that rounds otherwise; see bench/losses.py."""
    gc.collect()
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        training = workload.build(sizes, device, seed)
        timed = Timed(training, [plain_step(part, training.precision) for part in training.parts], device)
        for _ in range(max(steps) + 1):
            timed.iterate()
    finally:
        torch.backends.cudnn.deterministic = before
    return {str(step): timed.curve[step] for step in steps}


def attempt(
    workload: Workload, contender: str, *, size: str, device: torch.device, seed: int, **rest: Any
) -> dict[str, Any]:
    """`measure`, with whatever goes wrong as a row of its own."""
    head = {
        "workload": workload.name, "contender": contender, "size": size, "device": device.type, "seed": seed,
        "sizes": getattr(workload, size),
    }  # fmt: skip
    try:
        return head | {"status": "ok"} | measure(workload, contender, size=size, device=device, seed=seed, **rest)
    except Exception as error:  # other people's systems: anything may happen
        return head | failure_of(error)


def failure_of(error: BaseException) -> dict[str, Any]:
    """Status and reason of a row that could not be made."""
    text = str(error)
    if isinstance(error, NotInstalled):
        return {"status": "not installed", "reason": text}
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()][:2]
    said = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    return {"status": "out of memory" if is_out_of_memory(error) else "failed", "reason": said[:300]}


def warmed_up(timed: Timed, protocol: Protocol) -> dict[str, Any]:
    """Iterations until the times have settled, as the Protocol says."""
    began = time.perf_counter()
    while not protocol.warm(timed.milliseconds, time.perf_counter() - began):
        timed.iterate()
    return {"warm_up": {"steps": len(timed.milliseconds), "settled": settled(timed.milliseconds[1:])}}


def sampled(timed: Timed, protocol: Protocol, meter: MemoryMeter) -> list[float]:
    """The milliseconds of the window."""
    meter.before_window()
    if timed.on_gpu:
        for _ in range(SETTLING):
            timed.iterate()
    meter.window_begins()
    window: list[float] = []
    began = time.perf_counter()
    while not protocol.sampled(len(window), time.perf_counter() - began):
        window.append(timed.iterate())
    return window


def has_dropout(parts: Sequence[Part]) -> bool:
    """Does any module drop anything? Modules that hold a rate rather than a Dropout (LSTM, attention) name it so."""
    for module in (module for part in parts for model in modules_of(part.model).values() for module in model.modules()):
        rates = [value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            return True
    return False
