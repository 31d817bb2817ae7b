"""References of a step, eager and in float64, from the state it starts from, and the rule that is made of them.

In: a captured step and its batch. Out: `Truth`. Where a step fails by the rule, eager's own error is measured again, from starts
that differ by a rounding (`measured_again`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wholestep.capture.loss_scale import BACKOFF, LEAST
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.graph.training_graph import TrainingGraph
from wholestep.ops.wide import wide_dtype
from wholestep.runtime.eager import combine
from wholestep.verify.compare import Yardstick, compute_dtype, distance, yardstick
from wholestep.verify.reference import (
    Reference,
    float64_reference,
    nudged,
    reference_gradients,
    written_parameters,
)
from wholestep.verify.report import Report, TensorRow

VALUES: Mapping[str, Callable[[Reference], Mapping[str, torch.Tensor]]] = {
    "loss": lambda r: {"loss": r.loss}, "aux": lambda r: r.aux, "gradient": lambda r: r.gradients, "buffer": lambda r: r.buffers,
}  # fmt: skip
"""Kind of a row -> those values of a reference."""
NUDGES = 4
"""How often eager's error is measured again."""
EMPTY: Mapping[str, torch.Tensor] = {}
OTHER_PATH = 1e-2
"""A float32 loss further than this from float64's, relatively, means that float64 takes another path."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The micro-batches of one step."""

    label: str
    count: int
    """The step number random keys are made of."""
    micro: list[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """The two references of one step and the rule made from them."""

    eager: Reference
    exact: Reference | None
    rule: Yardstick


class References:
    """What steps of one subject are compared with. Live state must be the one the step starts from."""

    def __init__(self, subject: Subject, seed: int, report: Report) -> None:
        self.subject, self.seed, self.report = subject, seed, report

    def truth(self, captured: Capture, graph: TrainingGraph, batch: Batch, *, keep_outputs: bool = False) -> Truth:
        """Eager and float64; `graph` is the one that runs."""
        options = _reference_options(captured) | dict(keep_outputs=keep_outputs)
        eager = self._reference(batch, reference_gradients, options)
        assert isinstance(eager, Reference)
        dtype = compute_dtype(graph)
        exact = self._exact(batch, options, eager, dtype)
        rms = (exact or eager).activation_rms
        rule = yardstick(graph, eager.gradients, None if exact is None else exact.gradients, rms, dtype)
        return Truth(eager, exact, rule)

    def _exact(self, batch: Batch, options: Any, eager: Reference, dtype: torch.dtype) -> Reference | None:
        exact = self._reference(batch, float64_reference, options)
        if isinstance(exact, str):
            self.report.note(f"no float64 reference, eager is its own with a wider rule: {exact}")
            return None
        gap, size = float((eager.loss.double() - exact.loss).abs()), float(exact.loss.abs()) + exact.activation_rms
        if dtype is torch.float32 and gap > OTHER_PATH * size:
            self.report.note(f"float64 takes another path (loss {float(exact.loss):.5g}): eager is its own reference")
            return None
        return exact

    def _reference(
        self, batch: Batch, run: Callable[..., Reference | str], options: Any, start: Mapping[str, torch.Tensor] = EMPTY
    ) -> Reference | str:
        """Over all micro-batches, as accumulation does it: buffers move on, gradients add up. `start` replaces live tensors."""
        parts: list[Reference] = []
        for index, micro in enumerate(batch.micro):
            before = {**start, **parts[-1].buffers, **parts[-1].written} if parts else start
            one = run(self.subject, micro, self.seed, batch.count, index, tensors=before, **options)
            if isinstance(one, str):
                return one
            parts.append(one)
        return parts[0] if self.subject.accumulate == 1 else _accumulated(parts)

    def settle_loss_scale(self, captured: Capture, batch: Batch) -> None:
        """In fp16, halve the scale until eager's gradients are finite: a step that is left out has nothing to compare."""
        scale = self.subject.loss_scale
        if scale is None:
            return
        numbers = scale.on(self.subject.device)
        start = numbers[0].clone()
        options = _reference_options(captured)
        while not _finite(self._reference(batch, reference_gradients, options)):
            if float(numbers[0]) <= LEAST:  # it is not the scale: both sides are compared as they are
                numbers[0] = start
                return
            numbers[0] *= BACKOFF
        if float(numbers[0]) < float(start):
            self.report.note(f"step {batch.label}: gradients overflow above a loss scale of {float(numbers[0]):g}")

    def measured_again(self, captured: Capture, batch: Batch, truth: Truth, rows: list[TensorRow]) -> list[TensorRow]:
        """Rows that fail may be off by twice what eager is off from starts that are moved by a rounding.

        Eager's error in `truth` is one sample: where a gradient is nothing but rounding, as of a bias in front of a normalisation,
        it may be small by luck.
        """
        if truth.exact is None or all(row.ok or row.kind not in VALUES for row in rows):
            return rows
        exact, options = truth.exact, _reference_options(captured)
        starts = (nudged(self.subject.parameters, truth.rule.eps, number) for number in range(NUDGES))
        moved = [self._reference(batch, reference_gradients, options, start) for start in starts]

        def again(row: TensorRow) -> TensorRow:
            of = VALUES.get(row.kind)
            right = None if row.ok or of is None else of(exact).get(row.name)
            if of is None or right is None:
                return row
            values = [of(one).get(row.name) for one in moved if isinstance(one, Reference)]
            errors = [distance(value, right) for value in values if value is not None and value.shape == right.shape]
            widest = max((error for error in errors if math.isfinite(error)), default=0.0)
            return dataclasses.replace(row, tolerance=max(row.tolerance, 2 * widest))

        return [again(row) for row in rows]


def _reference_options(capture: Capture) -> dict[str, Any]:
    written = written_parameters(capture.graph)
    return dict(num_sites=capture.num_sites, constants=capture.constants, written=written)


def _accumulated(parts: list[Reference]) -> Reference:
    """Losses and aux as a Step reports them; gradients summed, and divided by the summed weight if there is one."""
    loss, aux = combine([(part.loss, part.aux) for part in parts])
    gradients = dict(parts[0].gradients)
    for part in parts[1:]:
        gradients = {n: gradients[n] + g for n, g in part.gradients.items()}
    if "weight" in parts[0].aux:
        wide = wide_dtype(loss.dtype)
        total = torch.stack([part.aux["weight"].reshape(()).to(wide) for part in parts]).sum()
        gradients = {n: (g / total).to(g.dtype) for n, g in gradients.items()}
    first, last = parts[0], parts[-1]
    return dataclasses.replace(
        first, loss=loss, aux=aux, gradients=gradients, buffers=last.buffers, written=last.written
    )


def _finite(reference: Reference | str) -> bool:
    return isinstance(reference, str) or all(bool(g.isfinite().all()) for g in reference.gradients.values())
