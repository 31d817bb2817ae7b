"""Seconds of every call of a step: a running step in, Calls out, each with what it had to do.

A lowered step is a flat function over operators and compiled regions (`lower/driver.py`). The same code runs here with a
clock (CPU) or a profiler's mark (GPU) around every one of them; which graph nodes a call stands for follows from lowering
the graph's text again, which is deterministic. Eager PyTorch has no such function: there every operator that reaches the
dispatcher is a call. What torch.compile runs is only known by the names its profiler tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import cost_of
from wholestep.cost.roofline import Fp32Units
from wholestep.graph.layers import layer_pattern
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of
from wholestep.graph.views import is_cheap_view
from wholestep.lower.footprint.cuda import wait
from wholestep.lower.in_place import ImperativeGraph, write_state_in_place
from wholestep.lower.inductor import imperative_form
from wholestep.lower.regions import Piece, Region, split_regions
from wholestep.lower.runner import Runner
from wholestep.lower.transfers import BESIDE, Transfers
from wholestep.profile.measure import kernels
from wholestep.profile.measure.copies import TimedStreams, WatchedTransfers, copies_of
from wholestep.profile.measure.kernels import Kernel
from wholestep.profile.measure.work import Work, work_of_cost, work_of_region
from wholestep.runtime.step import Step
from wholestep.runtime.variant import Variant

UNATTRIBUTED = "unattributed"


@dataclasses.dataclass(frozen=True, slots=True)
class TimedCall:
    """One call of a step. `work` is None where what it does is not known."""

    name: str
    """The operator, or the title of a region."""
    kind: str
    """As in `wholestep.cost`; `region` for compiled ones, `unattributed` where it is not known."""
    phase: str
    module: str
    work: Work | None
    key: str
    """Equal for calls that are the same work in equal layers."""
    seconds: float = 0.0
    kernels: tuple[Kernel, ...] = ()


# ---- what the calls of a lowered step are ----


def calls_of_graph(graph: TrainingGraph, backend: str, device: Device, fp32: Fp32Units) -> list[TimedCall]:
    """One TimedCall per statement of the driver, in order, without times."""
    pieces: Sequence[Piece]
    if backend == "inductor":
        imperative = imperative_form(graph)
        pieces = split_regions(imperative)
    else:
        imperative = write_state_in_place(graph)
        pieces = [node for node in imperative.graph.nodes if node.op == "call_function"]
    return [_of_piece(piece, imperative, device, fp32) for piece in pieces]


def _of_piece(piece: Piece, imperative: ImperativeGraph, device: Device, fp32: Fp32Units) -> TimedCall:
    if isinstance(piece, Region):
        work = work_of_region(piece.body, piece.defines, imperative.origin, device, fp32)
        # views of the forward pass are recomputed in backward regions: they are not what the region is for
        known = [node for node in piece.body if node.meta.get("custom") and not is_cheap_view(node)]
        phases = [name for name in ("forward", "backward", "update") if any(phase_of(node) == name for node in known)]
        module = common_path([path for node in known if (path := module_of(node)) is not None])
        title = f"{piece.title} ({len(known)} operators)"
        return TimedCall(title, "region", " and ".join(phases) or "forward", module, work, piece.signature)
    origin = imperative.origin.get(piece, piece)
    cost = cost_of(origin)
    name, module = cost.operator.rsplit("::", 1)[-1], module_of(piece) or ""
    work = work_of_cost(cost, device, fp32)
    return TimedCall(
        name, cost.kind, phase_of(piece), module, work, f"{name}|{phase_of(piece)}|{layer_pattern(module)}"
    )


def common_path(paths: Sequence[str]) -> str:
    """The deepest module that holds all of them."""
    shared = paths[0].split(".") if paths else []
    for path in paths[1:]:
        parts = path.split(".")
        same = next((i for i, (a, b) in enumerate(zip(shared, parts)) if a != b), min(len(shared), len(parts)))
        shared = shared[:same]
    return ".".join(shared)


# ---- a lowered step, timed ----


class _Watched:
    """The code of a Runner over functions that are timed one by one."""

    def __init__(
        self, runner: Any, calls: Sequence[TimedCall], record: list[tuple[TimedCall, float]], device: torch.device
    ) -> None:
        direct: Runner = runner if isinstance(runner, Runner) else runner.runner  # without its CUDA graph
        inner = direct._function
        assert isinstance(inner, types.FunctionType)
        self.calls, self.record, self.on_gpu, self.place = calls, record, device.type == "cuda", 0
        self.device, self.called = device, 0
        self.streams: list[TimedStreams] = []
        names = {name: self._instead(name, value) for name, value in inner.__globals__.items()}
        function = types.FunctionType(inner.__code__, names)

        def run(inputs: list[Any]) -> tuple[Any, ...]:
            self.place = 0
            self.called += 1
            return function(inputs)

        self.runner = Runner(run, direct.num_inputs, direct.describe())
        self.transfers: Transfers | None = direct.describe().get("transfers")

    def _instead(self, name: str, value: Any) -> Any:
        if name.startswith("_streams"):
            self.streams.append(TimedStreams(value, self.device))
            return self.streams[-1]
        is_call = name.startswith(("_op_", "_region")) and callable(value) and value not in BESIDE
        return self._timed(value) if is_call else value

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            call = self.calls[self.place]
            self.place += 1
            number = len(self.record)
            if self.on_gpu:
                self.record.append((call, 0.0))
                with kernels.mark(number):
                    return function(*args, **kwargs)
            began = time.perf_counter_ns()
            result = function(*args, **kwargs)
            self.record.append((call, (time.perf_counter_ns() - began) / 1e9))
            return result

        return timed


@contextlib.contextmanager
def _watched(
    variant: Variant, calls: Sequence[Sequence[TimedCall]], record: list[tuple[TimedCall, float]]
) -> Iterator[list[_Watched]]:
    kept = variant.runner, variant.update_runner
    device = variant.subject.device
    made = [None if r is None else _Watched(r, calls[i], record, device) for i, r in enumerate(kept)]
    variant.runner, variant.update_runner = (None if one is None else one.runner for one in made)
    try:
        yield [one for one in made if one is not None]
    finally:
        variant.runner, variant.update_runner = kept


def backend_of(variant: Variant) -> str:
    return str(variant.runner.describe().get("backend", "interpret"))


def watch_step(
    step: Step, variant: Variant, batches: Sequence[Any], device: Device, fp32: Fp32Units
) -> list[tuple[float, list[TimedCall]]]:
    """(seconds of the whole step, its calls with their seconds) for each batch."""
    backend, place = backend_of(variant), variant.subject.device
    graphs = [variant.capture.graph, *([variant.capture.update] if variant.capture.update is not None else [])]
    calls = [calls_of_graph(graph, backend, device, fp32) for graph in graphs]
    found = []
    for batch in batches:
        record: list[tuple[TimedCall, float]] = []
        with _watched(variant, calls, record):
            wait(place)
            began = time.perf_counter()
            if place.type == "cuda":
                with kernels.recorded(place) as activities:
                    began = time.perf_counter()
                    step(batch)
                    wait(place)
                    taken = time.perf_counter() - began
                found.append((taken, with_kernels([call for call, _ in record], activities)))
            else:
                step(batch)
                taken = time.perf_counter() - began
                found.append((taken, [dataclasses.replace(call, seconds=s) for call, s in record]))
    return found


def watch_copies(
    step: Step, variant: Variant, batches: Sequence[Any], device: Device, fp32: Fp32Units, step_seconds: float
) -> dict[str, Any] | None:
    """What a step moves between card and host, how fast, and how long it waits; None where it moves nothing. Without a profiler:
    events between streams cost little beside copies."""
    runners = [runner for runner in (variant.runner, variant.update_runner) if runner is not None]
    if not any("transfers" in runner.describe() for runner in runners):
        return None
    graphs = [variant.capture.graph, *([variant.capture.update] if variant.capture.update is not None else [])]
    calls = [calls_of_graph(graph, backend_of(variant), device, fp32) for graph in graphs]
    place = variant.subject.device
    with _watched(variant, calls, []) as watched:
        moving = [(one, one.transfers) for one in watched if one.transfers is not None]
        before = [_file_seconds(transfers) for _, transfers in moving]
        for batch in batches:
            step(batch)
        wait(place)
    found = [
        WatchedTransfers(transfers, one.streams, one.called, _file_seconds(transfers) - began)
        for (one, transfers), began in zip(moving, before, strict=True)
    ]
    return copies_of(found, len(batches), step_seconds)


def _file_seconds(transfers: Transfers) -> float:
    return 0.0 if transfers.files is None else transfers.files.waited_seconds


def with_kernels(calls: Sequence[TimedCall], activities: Sequence[kernels.Activity]) -> list[TimedCall]:
    """The calls with the time of the kernels they launched; kernels of no call are a call of their own, unattributed."""
    mine, others = kernels.by_call(activities)
    timed = [
        dataclasses.replace(call, seconds=sum(k.seconds for k in mine.get(i, ())), kernels=tuple(mine.get(i, ())))
        for i, call in enumerate(calls)
    ]
    rest = [unknown(kernel.name, kernel.seconds, (kernel,)) for kernel in others]
    return timed + rest


def unknown(name: str, seconds: float, made_of: tuple[Kernel, ...] = ()) -> TimedCall:
    """A call of which only name and time are known."""
    return TimedCall(name, UNATTRIBUTED, UNATTRIBUTED, "", None, f"{UNATTRIBUTED}|{name}", seconds, made_of)


# ---- what only a profiler knows ----


def watch_names(
    step: Callable[[Any], Any], batches: Sequence[Any], place: torch.device
) -> list[tuple[float, list[TimedCall]]]:
    """Of code that is not ours: kernels by name on a GPU, operators by name and own time on a CPU."""
    found = []
    for batch in batches:
        wait(place)
        if place.type == "cuda":
            with kernels.recorded(place) as activities:
                began = time.perf_counter()
                step(batch)
                wait(place)
                taken = time.perf_counter() - began
            found.append((taken, with_kernels([], activities)))
            continue
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            began = time.perf_counter()
            step(batch)
            taken = time.perf_counter() - began
        rows = profile.key_averages()
        found.append((taken, [unknown(r.key, r.self_cpu_time_total / 1e6) for r in rows if r.self_cpu_time_total > 0]))
    return found
