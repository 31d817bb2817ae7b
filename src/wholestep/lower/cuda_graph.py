"""A whole step as one CUDA graph, and the policy that keeps it only when it measures faster.

In goes a Runner and one set of live inputs; out comes something called like a Runner. Batch tensors are copied into static buffers
at each call; those that were the same memory in every call so far (`places.py`), and every other input (parameters, optimizer
state, the feed of keys and numbers), are read and written where they live. Recording executes nothing, so the step that records
also replays once, and the state moves on by exactly one step.

`CudaGraphRunner` records or refuses with a reason. `AutoCudaGraph` runs directly first, then records, compares and
decides; measured with events, so the host waits for the device once, at the decision. `CudaGraphsByShape` does so for a
step with symbolic sizes: one recording for each size that keeps coming back, all in one pool of memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from wholestep.errors import one_line
from wholestep.lower.driver import cutting
from wholestep.lower.places import Places, copy_in
from wholestep.lower.runner import Runner
from wholestep.ops.timing import Clock, EventClock
from wholestep.ops.tuner import ASKED_FOR, FASTEST, MEASURED, REFUSED, Choice

DIRECT_CALLS = 3
"""Direct calls before recording: the first loads kernels and tunes, so the median of three is a settled one."""
MOST_DIRECT_CALLS = 192
"""Direct calls before recording once more, when sizes alternate within a memory budget that has no room for two recordings."""
REPLAYS_TIMED = 4
MEETINGS = 2
"""How often a size is met, in a step with symbolic ones, before it is recorded: recording costs about one direct call."""
MOST_RECORDINGS = 64
"""Sizes recorded per step; each keeps its launch list (a few MiB), the memory it computes in is shared."""


class NotRecordable(Exception):
    """The step cannot become a CUDA graph; the text says why."""


def why_not(runner: Runner, inputs: Sequence[Any]) -> str | None:
    """The reason that can be known before trying, or None. State that waits in pinned memory is only copied, which is recorded."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if not tensors or len(tensors) != len(inputs):
        return "an input is not a tensor"
    copied = set(runner.describe().get("host_inputs", ()))
    tensors = [t for i, t in enumerate(tensors) if not (i in copied and t.device.type == "cpu" and t.is_pinned())]
    devices = {str(tensor.device) for tensor in tensors}
    on_host = sum(tensor.device.type != "cuda" for tensor in tensors)
    if on_host:
        return f"{on_host} of {len(tensors)} inputs are not on a CUDA device"
    if len(devices) > 1:
        return f"the inputs are on several devices: {', '.join(sorted(devices))}"
    return None


class CudaGraphRunner:
    """One recorded step. Making it records (without executing); each call copies the batch in and replays."""

    def __init__(
        self,
        runner: Runner,
        inputs: Sequence[torch.Tensor],
        batch: Sequence[int],
        sinks: dict[int, torch.Tensor] | None = None,
        pool: Any = None,
        written: Sequence[int] = (),
        in_place: Sequence[int] = (),
    ) -> None:
        """`sinks`: outputs (by position) that are left in tensors of the caller's instead of being handed out as copies.
        `written`: those of the batch that the step writes to. `in_place`: those that are read where they lie, at every call."""
        reason = why_not(runner, inputs)
        if reason is not None:
            raise NotRecordable(reason)
        self.device = inputs[0].device
        self.batch, self.written = tuple(index for index in batch if index not in in_place), tuple(written)
        self.static = list(inputs)
        for index in in_place:
            self.static[index] = inputs[index].detach()  # keeps its memory, whatever becomes of the tensor
        self.sinks = sinks or {}
        for index in self.batch:
            # preserve_format keeps dense strides; the compiled code was made for the strides of the example batch
            self.static[index] = torch.empty_like(inputs[index], memory_format=torch.preserve_format)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        """In the order of the step: the device works at the first while the host hands over the rest."""
        with torch.cuda.device(self.device):
            self.outputs = self._record(runner, pool)

    def _record(self, runner: Runner, pool: Any) -> list[Any]:
        if pool is None:  # or direct runs' memory and the graph's would lie there side by side
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        try:
            with _recording(self.graphs, pool):
                outputs = list(runner(self.static))
                if self.sinks:
                    torch._foreach_copy_(list(self.sinks.values()), [outputs[i] for i in self.sinks])
                    for i, sink in self.sinks.items():
                        outputs[i] = sink
        except torch.OutOfMemoryError as error:
            self.graphs = []
            raise NotRecordable("its memory, which cannot be defragmented, is more than there is") from error
        except Exception as error:
            self.graphs = []
            raise NotRecordable(one_line(error)) from error
        if pool is None:  # memory cached for direct runs is of no use to the graph's own pool
            give_back()
        return outputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        if not self.graphs:
            raise RuntimeError("this CUDA graph was released")
        copy_in([self.static[index] for index in self.batch], [inputs[index] for index in self.batch])
        for graph in self.graphs:
            graph.replay()
        for index in self.written:
            inputs[index].copy_(self.static[index])
        # The next replay overwrites the recorded outputs; the caller may keep what it gets.
        return [
            value.clone() if isinstance(value, torch.Tensor) and i not in self.sinks else value
            for i, value in enumerate(self.outputs)
        ]

    def release(self) -> None:
        """Give the graph and its memory back."""
        self.graphs = []
        self.outputs = []
        self.static = []
        give_back()


def give_back() -> None:
    """What nobody holds any more goes back to the card. Not while an exception is handled: its frames hold tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace of 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def _recording(graphs: list[torch.cuda.CUDAGraph], pool: Any) -> Iterator[None]:
    """As torch.cuda.graph does it, without collecting garbage and emptying the cache for every size of a batch.

    A launch returns when the last of a thousand kernels has been handed over (1.5 ms), and the device begins no sooner. So the
    step is recorded in several graphs, cut where the driver allows it; they share one pool, in the order in which they replay.
    """
    torch.cuda.synchronize()
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):

        def begin() -> None:
            shared = graphs[0].pool() if graphs else pool
            graphs.append(torch.cuda.CUDAGraph())
            # thread_local: a data loader's pinning thread may call the driver meanwhile, which is harmless to us
            graphs[-1].capture_begin(*(() if shared is None else (shared,)), capture_error_mode="thread_local")

        def cut() -> None:
            graphs[-1].capture_end()
            begin()

        begin()
        cutting.append(cut)
        try:
            yield
        finally:
            cutting.remove(cut)
            graphs[-1].capture_end()
    torch.cuda.current_stream().wait_stream(side)


def _lends(results: Sequence[Any], sinks: dict[int, torch.Tensor]) -> bool:
    return any(results[i] is sink for i, sink in sinks.items())


WHAT, REPLAYED, DIRECT = "cuda graph", "replayed", "direct"
"""What is chosen, and between what."""


def refused(reason: str) -> Choice:
    """Direct, because there can be no recording."""
    return Choice(WHAT, "the step", DIRECT, REFUSED, ruled_out={REPLAYED: reason})


def facts_with(facts: dict[str, Any], choice: Choice | None, more: str = "") -> dict[str, Any]:
    """The facts of a runner, plus what runs and why."""
    mode, reason = ("measuring", "not decided yet") if choice is None else (choice.name, str(choice) + more)
    chosen = {} if choice is None else {WHAT: choice}
    return {**facts, "cuda_graph": {"mode": mode, "reason": reason}, "choices": {**facts.get("choices", {}), **chosen}}


class AutoCudaGraph:
    """Called like the Runner it wraps; decides by measurement whether steps are replayed or run directly."""

    def __init__(
        self,
        runner: Runner,
        batch: Sequence[int],
        *,
        always: bool = False,
        timer: Clock | None = None,
        record: Callable[..., CudaGraphRunner] = CudaGraphRunner,
        calls: tuple[int, int] = (DIRECT_CALLS, REPLAYS_TIMED),
        lent: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        """`lent`: outputs that the caller reads before its next call, so they need not be copied out of a recording.
        `written`: those of the batch that the step writes to."""
        self.runner, self.batch, self.always = runner, tuple(batch), always
        self.written = tuple(written)
        self.lent = tuple(lent)
        self.places = Places([index for index in self.batch if index not in self.written])
        self._timer: Clock = timer or EventClock()
        self._record = record
        self._calls = calls
        self._sinks: dict[int, torch.Tensor] = {}
        self.lends = False
        """Whether the lent outputs of the last call are overwritten by the next."""
        self._start_over()

    def _start_over(self) -> None:
        self._recorded: CudaGraphRunner | None = None
        self._direct: list[tuple[Any, Any]] = []
        self._replays: list[tuple[Any, Any]] = []
        self.choice: Choice | None = None
        """Between replayed and direct steps, once known."""

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        results = self._called(inputs)
        self.lends = _lends(results, self._sinks)
        return results

    def _called(self, inputs: list[torch.Tensor]) -> list[Any]:
        if self._recorded is not None and self.places.moved(inputs):
            self._recorded.release()
            self._recorded, self.places = None, Places(())  # once more, all with buffers
            return self._try_recording(inputs)
        if self.choice is not None:
            return self._recorded(inputs) if self._recorded is not None else self.runner(inputs)
        if len(self._direct) < self._calls[0]:
            return self._first_calls(inputs)
        if self._recorded is None:
            return self._try_recording(inputs)
        results = self._timed(self._recorded, inputs, self._replays)
        if len(self._replays) == self._calls[1]:
            self._decide()
        return results

    def _first_calls(self, inputs: list[torch.Tensor]) -> list[Any]:
        if not self._direct:
            reason = why_not(self.runner, inputs)
            if reason is not None:
                self.choice = refused(reason)
                return self.runner(inputs)
        self.places.met(inputs)
        results = self._timed(self.runner, inputs, self._direct)
        if self.lent and not self._sinks:
            self._sinks = {i: torch.empty_like(results[i]) for i in self.lent if isinstance(results[i], torch.Tensor)}
        return results

    def _try_recording(self, inputs: list[torch.Tensor]) -> list[Any]:
        self.places.met(inputs)
        told: dict[str, Any] = {"sinks": self._sinks} if self.lent else {}
        if self.places.found:
            told["in_place"] = tuple(self.places.found)
        try:
            self._recorded = self._record(self.runner, inputs, self.batch, written=self.written, **told)
        except NotRecordable as refusal:
            self.choice = refused(f"not recordable: {refusal}")
        if self._recorded is not None:
            return self._recorded(inputs)  # its first replay uploads the graph: not timed
        give_back()
        return self.runner(inputs)

    def _timed(self, call: Callable[..., list[Any]], inputs: list[torch.Tensor], times: list) -> list[Any]:
        first = self._timer.mark()
        results = call(inputs)
        times.append((first, self._timer.mark()))
        return results

    def _decide(self) -> None:
        direct = statistics.median(self._timer.seconds(*pair) for pair in self._direct)
        replayed = statistics.median(self._timer.seconds(*pair) for pair in self._replays)
        self._direct, self._replays = [], []
        seconds = {DIRECT: direct, REPLAYED: replayed}
        faster = FASTEST.winner(seconds)
        asked = self.always and faster == DIRECT
        self.choice = Choice(WHAT, "the step", REPLAYED if asked else faster, ASKED_FOR if asked else MEASURED, seconds)
        if self.choice.name == REPLAYED:
            return
        assert self._recorded is not None
        self._recorded.release()
        self._recorded = None

    def invalidate(self) -> None:
        """A state tensor moved: recorded addresses are void, so the graph is dropped and everything starts over."""
        if self._recorded is not None:
            self._recorded.release()
        self._start_over()

    @property
    def holds_memory(self) -> bool:
        return self._recorded is not None

    def make_room(self) -> None:
        """Another size needs the memory of the recording: it is recorded again later, after more direct calls every time."""
        if self._recorded is None:
            return
        direct, replays = self._calls
        self._calls = min(4 * direct, MOST_DIRECT_CALLS), replays
        self.invalidate()

    def describe(self) -> dict[str, Any]:
        """The runner's facts, plus what runs and why."""
        return facts_with(self.runner.describe(), self.choice)

    def release(self) -> None:
        if self._recorded is not None:
            self._recorded.release()
            self._recorded = None
        self.runner.release()


class CudaGraphsByShape:
    """Called like the Runner it wraps, whose sizes are symbolic: measures one size, then records those that come back."""

    def __init__(
        self,
        runner: Runner,
        batch: Sequence[int],
        *,
        always: bool = False,
        timer: Clock | None = None,
        record: Callable[..., CudaGraphRunner] = CudaGraphRunner,
        lent: Sequence[int] = (),
        written: Sequence[int] = (),
    ) -> None:
        self.runner, self.batch, self.always, self.lent = runner, tuple(batch), always, tuple(lent)
        self.written = tuple(written)
        self._timer, self._record = timer, record
        self._sinks: dict[int, torch.Tensor] = {}
        self._pool: Any = None
        self.lends = False
        self._start_over()

    def _start_over(self) -> None:
        self._measuring: dict[Any, AutoCudaGraph] = {}
        self._recorded: dict[Any, CudaGraphRunner] = {}
        self._met: Counter[Any] = Counter()
        self.choice: Choice | None = None

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        results = self._called(inputs)
        self.lends = _lends(results, self._sinks)
        return results

    def _called(self, inputs: list[torch.Tensor]) -> list[Any]:
        sizes = tuple(inputs[index].shape for index in self.batch)
        recorded = self._recorded.get(sizes)
        if recorded is not None:
            return recorded(inputs)
        if self.choice is None:
            return self._measured(sizes, inputs)
        if self.choice.name == DIRECT:
            return self.runner(inputs)
        self._met[sizes] += 1
        if self._met[sizes] <= MEETINGS or len(self._recorded) >= MOST_RECORDINGS:
            return self.runner(inputs)
        try:
            self._recorded[sizes] = self._in_pool(self.runner, inputs, self.batch, self._sinks, self.written)
        except NotRecordable as refusal:
            self._settle(refused(f"not recordable: {refusal}"))
        if sizes in self._recorded:
            return self._recorded[sizes](inputs)
        give_back()
        return self.runner(inputs)

    def _measured(self, sizes: Any, inputs: list[torch.Tensor]) -> list[Any]:
        auto = self._measuring.get(sizes)
        if auto is None:
            auto = self._measuring[sizes] = AutoCudaGraph(
                self.runner, self.batch, always=self.always, timer=self._timer, record=self._in_pool, calls=(MEETINGS, 2),
                lent=self.lent, written=self.written,
            )  # fmt: skip
            auto._sinks, auto.places = self._sinks, Places(())  # recordings of other sizes take its memory
        results = auto(inputs)
        self._sinks = self._sinks or auto._sinks
        if auto.choice is not None:
            if auto._recorded is not None:
                self._recorded[sizes] = auto._recorded
            self._settle(auto.choice)
        return results

    def _settle(self, choice: Choice) -> None:
        """One size has been measured: the others follow it."""
        self.choice = choice
        for sizes, auto in self._measuring.items():
            if auto._recorded is not None and sizes not in self._recorded:
                auto._recorded.release()
        if choice.name == DIRECT:
            for recorded in self._recorded.values():
                recorded.release()
            self._recorded = {}
        self._measuring = {}

    def _in_pool(
        self, runner: Runner, inputs: Any, batch: Any, sinks: Any = None, written: Sequence[int] = ()
    ) -> CudaGraphRunner:
        if self._pool is None and torch.cuda.is_available():
            self._pool = torch.cuda.graph_pool_handle()
        return self._record(runner, inputs, batch, sinks, self._pool, written=written)

    def invalidate(self) -> None:
        """A state tensor moved: recorded addresses are void."""
        self._release_all()
        self._start_over()

    def _release_all(self) -> None:
        recordings = [auto._recorded for auto in self._measuring.values()] + list(self._recorded.values())
        for recorded in {id(r): r for r in recordings if r is not None}.values():
            recorded.release()

    def describe(self) -> dict[str, Any]:
        """The runner's facts, plus what runs and why."""
        more = f"; {len(self._recorded)} sizes recorded" if len(self._recorded) > 1 else ""
        return facts_with(self.runner.describe(), self.choice, more)

    def release(self) -> None:
        self._release_all()
        self._recorded, self._measuring = {}, {}
        self.runner.release()
