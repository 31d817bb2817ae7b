"""The rung below a whole step: the loss through torch.compile, with graph breaks; backward and update are torch's own.

Taken where the loss cannot be one graph, and kept only if it measures faster than eager. Dynamo's settings are the careful
ones of the front end; what Dynamo does not guard is watched, and where that changes the step goes on in eager PyTorch.
"""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture.front import dynamo as private
from wholestep.capture.front.absent_names import guard_names
from wholestep.capture.front.checkpoints import writes_twice
from wholestep.capture.front.unguardable import refuse_unguardable
from wholestep.capture.front.unguarded import Unguarded
from wholestep.capture.ladder import COMPILED, EAGER
from wholestep.capture.subject import Subject
from wholestep.capture.undo import Undo
from wholestep.capture.written_views import may_lose_writes
from wholestep.errors import CaptureRefused, WholestepError
from wholestep.graph.notes import Note
from wholestep.lower.compile_region import decompositions
from wholestep.lower.inductor import recursion_limit_kept
from wholestep.runtime.eager import Result, backward, eager_step, updated
from wholestep.runtime.kept import Kept

WARM_UP, TIMED = 3, 3
"""Steps before the clock is looked at, and steps of each kind that are timed."""

EAGER_NUMBERS = {"fallback_random": True}
"""Random operators draw what eager draws: the two take turns, and a loss may seed them itself."""


def _loss(loss_fn: Any, model: Any, batch: Any) -> Any:
    return loss_fn(model, batch)


class CompiledLoss:
    """`loss_fn(model, batch)` through torch.compile; notices what Dynamo does not."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.loggers = private.IgnoredLoggers()
        self.read: list[Any] = []
        self.codes: list[types.CodeType] = []
        self.unguarded: Unguarded | None = None
        self.refused: str | None = None
        # a frame that cannot be compiled runs in eager, as does one that is compiled again and again
        lenient: dict[str, Any] = {"suppress_errors": True, "fail_on_recompile_limit_hit": False, "recompile_limit": 8}
        self.settings = private.QuickSettings(self.loggers, **lenient)
        function = private.copied(_loss, private.fresh_name())
        self.function = torch.compile(function, backend=self._backend, options={"guard_filter_fn": self._keep})

    def _keep(self, entries: Sequence[Any]) -> list[bool]:
        values = [(entry.name, entry.value) for entry in entries if entry.has_value]
        refuse_unguardable(self.subject, values, ())  # raised here, this frame runs in eager
        self.read += values
        self.unguarded = None
        return [True] * len(entries)

    def _backend(self, graph: Any, example: list[Any], **_: Any) -> Callable[..., Any]:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        if private.saved_tensors_are_hooked():
            raise RuntimeError(
                "hooks of saved tensors see what the compiled backward keeps, which is not what eager keeps"
            )
        if writes_twice(graph):
            raise RuntimeError("eager writes statistics in an activation checkpoint twice for a batch")
        if may_lose_writes(graph):
            raise RuntimeError("torch does not know the exact way back of writes through views that repeat")
        context = private.TracingContext.try_get()
        if context is not None:
            self.codes += context.traced_code
            guard_names(context.guards_context.dynamo_guards, context.traced_code)
        with config.patch(EAGER_NUMBERS):
            table = decompositions()
        return compile_fx(graph, example, decompositions=table, config_patches=EAGER_NUMBERS)

    def changed(self) -> str | None:
        """What torch.compile would not notice."""
        if self.refused is not None:
            return self.refused
        changed = None if self.unguarded is None else self.unguarded.changed()
        return None if changed is None else f"{changed} changed, which torch.compile would not notice"

    def __call__(self, model: Any, batch: Any) -> Any:
        with self.settings:
            result = self.function(self.subject.loss_fn, model, batch)
        if self.unguarded is None:
            try:
                self.unguarded = Unguarded(self.subject, self.read, self.codes)
            except CaptureRefused as refused:  # seen only now; what was computed is what Dynamo makes of it once
                self.refused = str(refused)
        return result


class LowerRung:
    """Runs steps that no captured graph holds for: through torch.compile or eager, whichever measured faster."""

    def __init__(self, subject: Subject, note: Callable[[Note], None], *, compiled: bool) -> None:
        self.subject, self.note = subject, note
        self.loss = CompiledLoss(subject) if compiled else None
        self.seconds: dict[str, list[float]] = {COMPILED: [], EAGER: []}
        self.steps = 0
        self.decided = not compiled

    @property
    def name(self) -> str:
        return EAGER if self.loss is None else COMPILED

    def step(self, micro: Sequence[Any], done: Sequence[Result] = ()) -> tuple[Result, torch.Tensor | None]:
        if self.decided or done:
            return self._run(self.name, micro, done)
        with recursion_limit_kept():
            return self._in_turns(micro, done)

    def _in_turns(self, micro: Sequence[Any], done: Sequence[Result]) -> tuple[Result, torch.Tensor | None]:
        """While torch.compile and eager take turns."""
        kind = COMPILED
        if self.steps >= WARM_UP:
            kind = EAGER if (self.steps - WARM_UP) % 2 == 0 else COMPILED
        self.steps += 1
        if self.steps <= WARM_UP:
            return self._run(kind, micro, done)
        began = self._now()
        result = self._run(kind, micro, done)
        self.seconds[kind].append(self._now() - began)
        if all(len(times) >= TIMED for times in self.seconds.values()):
            self._decide()
        return result

    def _now(self) -> float:
        if self.subject.device.type == "cuda":
            torch.cuda.synchronize(self.subject.device)
        return time.perf_counter()

    def _decide(self) -> None:
        compiled, eager = (statistics.median(self.seconds[kind]) * 1e3 for kind in (COMPILED, EAGER))
        self.decided = True
        if eager < compiled:
            self.loss = None
        winner = "torch.compile" if self.loss is not None else "eager"
        times = f"torch.compile {compiled:.2f} ms, eager {eager:.2f} ms"
        self.note(Note("rung", f"steps that are not captured run by {winner}: {times}"))

    def _run(self, kind: str, micro: Sequence[Any], done: Sequence[Result]) -> tuple[Result, torch.Tensor | None]:
        changed = None if self.loss is None else self.loss.changed()
        if changed is not None:
            self.loss, self.decided = None, True
            self.note(Note("rung", f"{changed}: the step runs in eager PyTorch"))
        loss = None if kind == EAGER else self.loss
        if loss is None or self.steps > WARM_UP or done:
            return eager_step(self.subject, micro, loss, done)
        return self._tried(loss, micro)

    def _tried(self, loss: CompiledLoss, micro: Sequence[Any]) -> tuple[Result, torch.Tensor | None]:
        """A step through torch.compile that has yet to show that it can be: eager takes it where it fails, from where it began."""
        undo, buffers = Undo(self.subject.loss_fn, self.subject.model, micro), Kept()
        buffers.keep([tensor for tensor in self.subject.buffers.values() if not tensor.is_inference()])
        try:
            results = backward(self.subject, micro, loss)
        except (WholestepError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            failed = error
        else:
            return updated(self.subject, results)
        undo.restore()
        buffers.put_back()
        result = eager_step(self.subject, micro)  # what it raises is the user's own
        self.loss, self.decided = None, True
        told = f"{type(failed).__name__}: {' '.join(str(failed).split())[:200]}"
        self.note(Note("rung", f"torch.compile fails where eager PyTorch does not ({told}): the step runs in eager"))
        return result
