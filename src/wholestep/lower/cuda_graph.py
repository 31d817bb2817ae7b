"""A whole step as one CUDA graph, and the policy that keeps it only when it measures faster.

In goes a Runner and one set of live inputs; out comes something called like a Runner. Batch tensors are copied into
static buffers at each call, every other input (parameters, optimizer state, the feed of keys and numbers) is read and
written where it lives. Recording executes nothing, so the step that records also replays once, and the state moves on
by exactly one step.

`CudaGraphRunner` records or refuses with a reason. `AutoCudaGraph` runs directly first, then records, compares and
decides; measured with events, so the host waits for the device once, at the decision.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from wholestep.lower.runner import Runner

DIRECT_CALLS = 3
"""Direct calls before recording: the first loads kernels and tunes, so the median of three is a settled one."""
REPLAYS_TIMED = 4


class NotRecordable(Exception):
    """The step cannot become a CUDA graph; the text says why."""


def why_not(runner: Runner, inputs: Sequence[Any]) -> str | None:
    """The reason that can be known before trying, or None."""
    if runner.describe().get("symbolic"):
        return "shapes are symbolic, a CUDA graph has one shape"
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not tensors or len(tensors) != len(inputs):
        return "an input is not a tensor"
    devices = {str(tensor.device) for tensor in tensors}
    on_host = sum(tensor.device.type != "cuda" for tensor in tensors)
    if on_host:
        return f"{on_host} of {len(tensors)} inputs are not on a CUDA device"
    if len(devices) > 1:
        return f"the inputs are on several devices: {', '.join(sorted(devices))}"
    return None


class CudaGraphRunner:
    """One recorded step. Making it records (without executing); each call copies the batch in and replays."""

    def __init__(self, runner: Runner, inputs: Sequence[torch.Tensor], batch: Sequence[int]) -> None:
        reason = why_not(runner, inputs)
        if reason is not None:
            raise NotRecordable(reason)
        self.device = inputs[0].device
        self.batch = tuple(batch)
        self.static = list(inputs)
        for index in self.batch:
            # preserve_format keeps dense strides; the compiled code was made for the strides of the example batch
            self.static[index] = torch.empty_like(inputs[index], memory_format=torch.preserve_format)
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            self.outputs = self._record(runner)

    def _record(self, runner: Runner) -> list[Any]:
        try:
            # thread_local: a data loader's pinning thread may call the driver meanwhile, which is harmless to us
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                outputs = runner(self.static)
        except Exception as error:
            self.graph = None
            lines = str(error).strip().splitlines()
            raise NotRecordable(f"{type(error).__name__}: {lines[0] if lines else ''}") from error
        # Memory cached for direct runs is of no use to the graph's own pool.
        gc.collect()
        torch.cuda.empty_cache()
        return outputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if self.graph is None:
            raise RuntimeError("this CUDA graph was released")
        for index in self.batch:
            given, static = inputs[index], self.static[index]
            if given.shape != static.shape or given.dtype != static.dtype:
                raise ValueError(
                    f"the CUDA graph was recorded for a batch of {tuple(static.shape)} {static.dtype}, "
                    f"not {tuple(given.shape)} {given.dtype}"
                )
            static.copy_(given, non_blocking=True)
        self.graph.replay()
        # The next replay overwrites the recorded outputs; the caller may keep what it gets.
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in self.outputs]

    def release(self) -> None:
        """Give the graph and its memory back."""
        self.graph = None
        self.outputs = []
        self.static = []
        gc.collect()
        torch.cuda.empty_cache()


class Timer(Protocol):
    """Takes marks on the device's timeline and says later how far apart they were."""

    def mark(self) -> Any: ...

    def seconds(self, first: Any, last: Any) -> float: ...


class EventTimer:
    """CUDA events: taking a mark does not wait for anything."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3


class AutoCudaGraph:
    """Called like the Runner it wraps; decides by measurement whether steps are replayed or run directly."""

    def __init__(
        self,
        runner: Runner,
        batch: Sequence[int],
        *,
        always: bool = False,
        timer: Timer | None = None,
        record: Callable[[Runner, Sequence[torch.Tensor], Sequence[int]], CudaGraphRunner] = CudaGraphRunner,
    ) -> None:
        self.runner, self.batch, self.always = runner, tuple(batch), always
        self._timer: Timer = timer or EventTimer()
        self._record = record
        self._start_over()

    def _start_over(self) -> None:
        self._recorded: CudaGraphRunner | None = None
        self._direct: list[tuple[Any, Any]] = []
        self._replays: list[tuple[Any, Any]] = []
        self.decided: str | None = None
        """`cuda graph` or `direct`, once known."""
        self.reason = "not decided yet"
        self._seconds: dict[str, float] = {}

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        if self.decided is not None:
            return self._recorded(inputs) if self._recorded is not None else self.runner(inputs)
        if len(self._direct) < DIRECT_CALLS:
            return self._first_calls(inputs)
        if self._recorded is None:
            return self._try_recording(inputs)
        results = self._timed(self._recorded, inputs, self._replays)
        if len(self._replays) == REPLAYS_TIMED:
            self._decide()
        return results

    def _first_calls(self, inputs: list[torch.Tensor]) -> list[Any]:
        if not self._direct:
            reason = why_not(self.runner, inputs)
            if reason is not None:
                self.decided, self.reason = "direct", reason
                return self.runner(inputs)
        return self._timed(self.runner, inputs, self._direct)

    def _try_recording(self, inputs: list[torch.Tensor]) -> list[Any]:
        try:
            self._recorded = self._record(self.runner, inputs, self.batch)
        except NotRecordable as refusal:
            self.decided, self.reason = "direct", f"not recordable: {refusal}"
            return self.runner(inputs)
        return self._recorded(inputs)  # its first replay uploads the graph: not timed

    def _timed(self, call: Callable[..., list[Any]], inputs: list[torch.Tensor], times: list) -> list[Any]:
        first = self._timer.mark()
        results = call(inputs)
        times.append((first, self._timer.mark()))
        return results

    def _decide(self) -> None:
        direct = statistics.median(self._timer.seconds(*pair) for pair in self._direct)
        replayed = statistics.median(self._timer.seconds(*pair) for pair in self._replays)
        self._seconds = {"direct": direct, "cuda graph": replayed}
        self._direct, self._replays = [], []
        compared = f"{replayed * 1e3:.2f} ms replayed, {direct * 1e3:.2f} ms direct"
        if replayed < direct or self.always:
            self.decided, self.reason = "cuda graph", f"{'faster' if replayed < direct else 'asked for'}: {compared}"
            return
        self.decided, self.reason = "direct", f"a CUDA graph is not faster: {compared}"
        assert self._recorded is not None
        self._recorded.release()
        self._recorded = None

    def invalidate(self) -> None:
        """A state tensor moved: recorded addresses are void, so the graph is dropped and everything starts over."""
        if self._recorded is not None:
            self._recorded.release()
        self._start_over()

    def describe(self) -> dict[str, Any]:
        """The runner's facts, plus what runs and why."""
        facts = {"mode": self.decided or "measuring", "reason": self.reason, "seconds": dict(self._seconds)}
        return {**self.runner.describe(), "cuda_graph": facts}

    def release(self) -> None:
        if self._recorded is not None:
            self._recorded.release()
            self._recorded = None
        self.runner.release()
