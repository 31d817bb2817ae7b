"""One optimizer step at work: its micro-batches through the captured graphs, then the update.

The front end calls `_graph_called` in place of Dynamo's graph. At the first run of a variant the user's own code may run
first, as the check against eager PyTorch; then it has done what Python does beside the graph, and Dynamo's replay of that
is left out: each effect happens once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from wholestep import compat
from wholestep.capture.front import LossGraph
from wholestep.capture.front.loss_graph import AUX, LOSS
from wholestep.capture.preflight import autocast_for
from wholestep.capture.tracer import ACCUMULATED_WEIGHT
from wholestep.capture.undo import PythonRandom, RandomStates
from wholestep.errors import CaptureRefused, WholestepError, one_line
from wholestep.runtime.binding import StateMoved
from wholestep.runtime.compiled import LowerRung
from wholestep.runtime.eager import Result, clear_gradients, combine, update_in_torch
from wholestep.runtime.kept import Kept, Places
from wholestep.runtime.variant import AssumptionFailed, Variant, assumption_failed

if TYPE_CHECKING:
    from wholestep.runtime.step import Step


class EagerDid(Exception):
    """The user's own code ran, with all its effects: what it returned is the result."""

    def __init__(self, result: Result) -> None:
        self.result = result


class OneStep:
    """One call of a Step."""

    def __init__(self, step: Step, micro: Sequence[Any]) -> None:
        self.step, self.subject, self.micro = step, step.subject, micro
        self.results: list[Result] = []
        """Of the micro-batches that have run."""
        self.variants: list[Variant] = []
        self.norm: torch.Tensor | None = None
        self.python_random: PythonRandom | None = None
        self.afterwards: list[tuple[Any, Result]] = []
        """Checks that wait for the update of an accumulating step."""
        self.places: Places | None = None
        step.buffers.forget()

    def whole(self, *, known_only: bool = False) -> tuple[Result, torch.Tensor | None]:
        """All micro-batches through captured graphs, then the update."""
        step = self.step
        if step.unchecked or not step.front.entries:  # the check runs the user's code again, on the same draws
            self.python_random = PythonRandom()
        if step.options.guards == "off":
            return self._without_guards()
        for batch in self.micro:
            self.batch = batch
            try:
                outcome = step.front(batch, self._graph_called, known_only=known_only)
            except EagerDid as did:
                outcome = did.result
            self.results.append(outcome)
        return combine(self.results), self._finished()

    def _finished(self) -> torch.Tensor | None:
        self.norm = self._finish()
        for afterwards, result in self.afterwards:
            afterwards(self, result)
        self._leave_out(self.norm)
        return self.norm

    def _keep_buffers(self, *, copies: bool = True) -> None:
        """Before the first micro-batch of a step that may fail in a later one, or whose update may be left out.

        `copies`: where nothing in the graph that writes them decides that.
        """
        skips = self.subject.nonfinite == "skip"
        if self.places is None and (skips or self.subject.accumulate > 1):
            self.places = Places(self.subject.root)
            if skips and copies:
                self.step.buffers.keep(self.places.tensors)

    def _leave_out(self, norm: torch.Tensor | None) -> None:
        if norm is not None and self.subject.nonfinite == "skip":
            if self.step.buffers.holds:
                self.step.buffers.put_back_unless(norm.isfinite())
            # decided on the host, which waits for a GPU: what took their place may be a view of something that is trained
            if self.places is not None and self.places.replaced() and not bool(norm.isfinite()):
                self.places.put_back()
        self.step.buffers.forget()

    def capture_only(self) -> None:
        """Make the variant for the first micro-batch."""
        batch = self.micro[0]
        if self.step.options.guards == "off":
            self.step.unguarded_variant(batch)
        else:
            self.step.front.look(batch, lambda graph, args: self.step.variant_of(graph, args, batch))

    def _graph_called(self, graph: LossGraph, args: tuple) -> tuple:
        try:
            numbers, returned = graph.host(args)
        except (ArithmeticError, ValueError) as error:  # 1 / n, where n is 0 now: the user's code may catch that
            raise AssumptionFailed(f"arithmetic on Python numbers raises {one_line(error)}") from None
        variant = self.step.variant_of(graph, args, self.batch)
        try:
            named = self._one(variant, args, numbers)
        except EagerDid as did:
            loss, aux = did.result
            raise EagerDid((loss.reshape(graph.loss_shape), aux | graph.live_aux(args))) from None
        return graph.results(named, returned, args)

    def _without_guards(self) -> tuple[Result, torch.Tensor | None]:
        for batch in self.micro:
            self.batch = batch
            variant, tensors = self.step.unguarded_variant(batch)
            variant.brought = list(range(len(tensors)))
            try:
                named = self._one(variant, tensors, ())
                self.results.append((named[LOSS], named[AUX]))
            except EagerDid as did:
                self.results.append(did.result)
        return combine(self.results), self._finished()

    def _one(self, variant: Variant, args: Sequence[Any], numbers: Sequence[Any]) -> dict[str, Any]:
        """One micro-batch through a variant, compared with eager where the variant is new."""
        step, index = self.step, len(self.results)
        if variant in self.variants:
            variant.bind(args)  # the micro-batch before may have replaced a buffer
        else:
            step.make_room(variant)
            variant.begin(args)
            self._clear_gradients(variant)
            self._keep_buffers(copies=self.subject.accumulate > 1 or not variant.capture.plans)
            self.variants.append(variant)
        if not variant.checked:
            with compat.no_collection():
                return self._first(variant, args, numbers)
        try:
            named, gradients, self.norm = variant.micro(args, numbers, step.seed, step.count, index)
        except Exception as error:
            raise self._in_users_words(error) from None
        if gradients:
            variant.hand_over(gradients)
        return named

    def _in_users_words(self, error: Exception) -> Exception:
        """What the user's own code says about a batch that compiled code failed on; the same error where it says nothing.

        An index that is out of range is told by eager with its type, its words and its line; compiled code names a kernel.
        Buffers are then as eager leaves them: a BatchNorm in front of the failing line has counted.
        """
        for variant in reversed(self.variants):  # what the first wrote is put back last
            variant.before.put_back()
        if self.places is not None:
            self.places.put_back()
        unasked = (WholestepError, CaptureRefused, StateMoved, MemoryError, torch.OutOfMemoryError)
        error = assumption_failed(error, *(variant.capture for variant in self.variants))
        if isinstance(error, unasked) or self.subject.device.type != "cpu":
            return error
        randomness, buffers, places = RandomStates(), Kept(), Places(self.subject.root)
        buffers.keep(places.tensors)
        if self.python_random is not None:
            self.python_random.restore()
        try:
            with torch.enable_grad(), autocast_for(self.subject):
                self.subject.loss_fn(self.subject.model, self.batch)
        except Exception as told:
            if self.subject.accumulate > 1:  # the micro-batches before it were taken back
                buffers.put_back()
                places.put_back()
            return told
        finally:
            randomness.restore()
        buffers.put_back()
        places.put_back()
        return error

    def _first(self, variant: Variant, args: Sequence[Any], numbers: Sequence[Any]) -> dict[str, Any]:
        """The first run of a variant."""
        step, index = self.step, len(self.results)
        check = step.check
        afterwards = None if check is None else check(self, variant, args, numbers)
        try:
            named, gradients, norm = variant.micro(args, numbers, step.seed, step.count, index)
        except Exception as error:
            if afterwards is None:
                raise self._in_users_words(error) from None
            variant.before.put_back()
            raise
        self.norm = norm
        if gradients:
            variant.hand_over(gradients)
        variant.checked = True
        if afterwards is not None:
            result = named[LOSS], named[AUX]
            if self.subject.accumulate == 1:
                afterwards(self, result)
            else:
                self.afterwards.append((afterwards, result))
            raise EagerDid(result)
        return named

    def _clear_gradients(self, variant: Variant) -> None:
        """Before the first micro-batch, as a loop does: what a backward by hand has left would be met by the next one."""
        if self.variants or self.results:
            return
        if self.subject.optimizer is not None:
            clear_gradients(self.subject.optimizer)
        for gradient in variant.binding.gradients.values():
            gradient.zero_()

    def _finish(self) -> torch.Tensor | None:
        """The update, or what is left of it to torch."""
        variant = self.variants[-1]
        self.step.unchecked = any(not v.checked for v in self.variants)
        if self.subject.accumulate == 1:
            return variant.finish(self.norm)
        used = {v.capture.used for v in self.variants}
        if variant.update_runner is not None and len(used) == 1:
            return variant.finish(variant.update())
        self._hand_over_accumulated(set().union(*used))
        return None if self.subject.optimizer is None else update_in_torch(self.subject)

    def _hand_over_accumulated(self, names: set[str]) -> None:
        variant = self.variants[-1]
        gradients = {n: g for n, g in variant.binding.gradients.items() if n in names or n == ACCUMULATED_WEIGHT}
        variant.hand_over(gradients)
        if self.subject.loss_scale is not None:
            left = [self.subject.parameters[n].grad for n in names]
            torch._foreach_div_(left, self.subject.loss_scale.on(self.subject.device)[0])

    # ---- on a lower rung ----

    def in_torch(self, rung: LowerRung) -> tuple[Result, torch.Tensor | None]:
        """What has not run yet by torch itself; gradients of what has are in p.grad then."""
        if self.results:
            variant = self.variants[-1]
            names = set().union(*(v.capture.used for v in self.variants))
            for name in names:  # sums of weighted losses, as eager's backward leaves them
                self.subject.parameters[name].grad = variant.binding.gradients[name].clone()
        self._keep_buffers()
        result, norm = rung.step(self.micro[len(self.results) :], self.results)
        self._leave_out(norm)
        return result, norm
