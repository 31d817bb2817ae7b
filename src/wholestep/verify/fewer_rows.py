"""The first step compared with eager PyTorch on a few rows of the batch, where eager on all of them is more than memory holds.

In: a variant that has not run yet and a number of rows. The compiled step, whose sizes are fixed, runs on a batch that consists of
those rows over and over; eager PyTorch runs on the rows alone, touching nothing live. Where a loss is a mean over rows that do
not see each other, both have the same loss and gradients, so agreement proves the compiled code. Disagreement proves nothing yet:
eager is asked whether the rows twice over are the same to it, and only if they are, the step is wrong. What the trial wrote is put
back. Steps that draw random numbers cannot be compared like this, as every row draws its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture.batch import flatten, unflatten
from wholestep.capture.undo import Undo
from wholestep.errors import BadBatch, CaptureRefused, FirstStepDiffers, one_line
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.variant import Variant
from wholestep.verify.compare import gradient_rms
from wholestep.verify.first_step import FirstStep, Lean
from wholestep.verify.reference import Reference


class NotComparable(Exception):
    """A few rows say nothing about this step; the text says why."""


def rows_in(variant: Variant, args: Sequence[Any], batch: Any) -> int:
    """How many rows the batch has; NotComparable where there is no such number, or rows cannot stand for all."""
    if variant.subject.accumulate > 1:
        raise NotComparable("with accumulate= gradients add up over several batches")
    if variant.capture.num_sites:
        raise NotComparable("it draws random numbers, which every row has of its own")
    if variant.subject.loss_scale is not None:
        raise NotComparable("with precision='fp16' gradients may overflow")
    try:
        tensors = flatten(batch)[0]
    except BadBatch as refused:
        raise NotComparable("the batch has a structure of its own") from refused
    tensors += [args[i] for i in variant.brought]
    sizes = {tuple(t.shape[:1]) for t in tensors}
    if len(sizes) != 1 or sizes == {()} or any(t.layout is not torch.strided for t in tensors):
        raise NotComparable("the tensors of the batch do not share a first dimension")
    return sizes.pop()[0]


def check_on_rows(
    run: OneStep, variant: Variant, args: Sequence[Any], numbers: Sequence[Any], *, rows: int, lean: Lean
) -> None:
    """Compare on `rows` rows, which divide the batch. Raises FirstStepDiffers, or NotComparable, or torch.OutOfMemoryError."""
    whole = rows_in(variant, args, run.batch)
    check = _OnRows(run, variant, args, numbers, lean)
    undo = Undo(variant.subject.loss_fn, variant.subject.model, run.batch)
    try:
        check.compare(rows, whole)
    finally:
        undo.restore()


class _OnRows(FirstStep):
    """One such comparison; `batch` is that of eager."""

    def compare(self, rows: int, whole: int) -> None:
        self.numbers = self.variant.numbers
        tensors, spec = flatten(self.batch)
        self.batch = unflatten([t[:rows] for t in tensors], spec)
        self.eager = self._eager()
        if not bool(self.eager.loss.isfinite()):
            raise NotComparable("the loss of so few is not finite")
        self.rms = gradient_rms(self.eager.gradients)
        self._keep()
        try:
            difference = self._difference(self._repeated(rows, whole))
        finally:
            self._values_back()
        if difference is None:
            return
        self.batch = unflatten([torch.cat([t[:rows]] * 2) for t in tensors], spec)
        twice = self._eager()
        if self._loss_differs(twice.loss) or self._failing(twice.gradients, self.limits.lowered):
            raise NotComparable("its loss is another one when rows are repeated")
        raise difference

    def _eager(self) -> Reference:
        if self.python_random is not None:
            self.python_random.restore()
        try:
            with self._state_set_aside():
                return self._reference()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the user's code may want more rows: a batch norm does
            raise NotComparable(f"eager fails on so few: {one_line(error)}") from error

    def _repeated(self, rows: int, whole: int) -> list[Any]:
        """The arguments with the rows over and over in place of the batch, in the same memory layout."""
        made = list(self.args)
        for index in self.variant.brought:
            repeated = torch.empty_like(made[index], requires_grad=False)
            repeated.copy_(torch.cat([made[index][:rows].detach()] * (whole // rows)))
            made[index] = repeated
        return made

    def _difference(self, args: Sequence[Any]) -> FirstStepDiffers | None:
        """What is wrong with the compiled step on these arguments."""
        try:
            named, gradients, total = self.variant.micro(args, self.given, self.step.seed, self.step.count, self.micro)
        except CaptureRefused as refused:  # it takes something for granted that holds for the batch, not for these rows
            raise NotComparable(str(refused)) from refused
        try:
            if self.variant.capture.plans:
                self.after((named["loss"], {}), total)
                if not self.saw_gradients:
                    raise NotComparable("the first update says nothing about most gradients")
            elif self._loss_differs(named["loss"]):
                raise self._differs("the compiled step: the loss is another one", None)
            elif failing := self._failing(gradients, self.limits.lowered):
                self._report_gradients(failing, "the compiled step")
        except FirstStepDiffers as found:
            return found
        return None

    def _put_back(self) -> str:
        return "nothing was changed"

    def _check_buffers(self) -> None:
        """Not those: a variance without bias depends on the number of rows."""

    def _values_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self.kept.values():
                tensor.copy_(value)
        self.kept = {}
        self.variant.before.forget()
