"""A variant: one captured and lowered form of the step, for one structure of batch and one state of the Python world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.capture.tracer import ACCUMULATED_WEIGHT
from wholestep.graph.training_graph import OutputKind, TrainingGraph
from wholestep.runtime.binding import Binding
from wholestep.runtime.eager import Result, combine, skips_update
from wholestep.runtime.random import keys_for, seeded_generator

Lowering = Callable[[TrainingGraph], Any]


class Variant:
    """Runs one capture: binds the live tensors, feeds keys and numbers, calls the lowered graph(s)."""

    def __init__(self, subject: Subject, capture: Capture, lower: Lowering, provisional: bool = False) -> None:
        self.subject, self.capture = subject, capture
        self.provisional = provisional
        """Interpreted for now, because its shape is rare."""
        self.binding = Binding(subject, capture)
        self.runner = lower(capture.graph)
        self.update_runner = lower(capture.update) if capture.update is not None else None
        kinds = [o for o in capture.graph.outputs if o.kind is not OutputKind.UPDATE]
        self.kinds = [o.kind for o in kinds]
        self.names = [o.name for o in kinds]
        self.uses = 0

    @property
    def recordings(self) -> list[Any]:
        """Its runners that hold the memory of a CUDA graph."""
        return [runner for runner in (self.runner, self.update_runner) if getattr(runner, "holds_memory", False)]

    def run(self, batches: Sequence[Sequence[torch.Tensor]], seed: int, step: int) -> tuple[Result, torch.Tensor | None]:
        """One optimizer step over the micro-batches given as flat tensors."""
        moved = self.binding.refresh()
        if moved:
            for runner in (self.runner, self.update_runner):
                if runner is not None and hasattr(runner, "invalidate"):
                    runner.invalidate()
        self.uses += 1
        numbers = self.binding.numbers()
        if self.subject.optimizer is not None and not self.capture.plans:
            self.subject.optimizer.zero_grad(set_to_none=True)
        results, norm = [], None
        if len(batches) > 1:
            for gradient in self.binding.gradients.values():
                gradient.zero_()
        for micro, batch in enumerate(batches):
            self._feed(seed, step, micro, numbers)
            with seeded_generator(self.subject.device, seed, step, micro):
                values = self.runner(self.binding.inputs(self.capture.graph, batch))
            result, norm = self._interpret(values)
            results.append(result)
        if self.update_runner is not None:
            values = self.update_runner(self.binding.inputs(self.capture.update, ()))  # type: ignore[arg-type]
            norm = values[0] if values else None
        elif self.subject.accumulate > 1:
            self._hand_over(self.binding.gradients)
        return combine(results), self._finish(norm)

    def _feed(self, seed: int, step: int, micro: int, numbers: dict[str, list[float]]) -> None:
        count = self.capture.num_sites
        keys = keys_for(seed, step, micro, count).numpy() if count else None
        self.binding.feed.fill(keys, numbers)

    def _interpret(self, values: list[Any]) -> tuple[Result, torch.Tensor | None]:
        loss, aux, norm, gradients = None, {}, None, {}
        for kind, name, value in zip(self.kinds, self.names, values, strict=False):
            if kind is OutputKind.LOSS:
                loss = value
            elif kind is OutputKind.AUX:
                aux[name] = value
            elif kind is OutputKind.NORM:
                norm = value
            else:
                gradients[name] = value
        if gradients:
            self._hand_over(gradients)
        assert loss is not None
        return (loss, aux), norm

    def _hand_over(self, gradients: dict[str, torch.Tensor]) -> None:
        """Fill p.grad as backward() would: set it, or add to what is there.

        A graph may return one tensor as the gradient of two parameters, or an expanded one; p.grad is written in place (by
        clipping, by the next backward), so each gets memory of its own in its parameter's layout.
        """
        weight = gradients.get(ACCUMULATED_WEIGHT)
        taken: set[int] = set()
        # the accumulator itself, or the output of a recording: written again at the next call
        lent = (self.subject.accumulate > 1 and weight is None) or getattr(self.runner, "lends", False)
        added: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        copied: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for name, gradient in gradients.items():
            parameter = self.subject.parameters.get(name)
            if parameter is None:
                continue
            if weight is not None:
                gradient = (gradient / weight).to(gradient.dtype)
            if parameter.grad is not None:
                added[0].append(parameter.grad)
                added[1].append(gradient)
                continue
            storage = gradient.untyped_storage().data_ptr()
            if lent or storage in taken or gradient.stride() != parameter.stride():
                parameter.grad = torch.empty_like(parameter, requires_grad=False)
                copied[0].append(parameter.grad)
                copied[1].append(gradient)
            else:
                taken.add(storage)
                parameter.grad = gradient
        if added[0]:
            torch._foreach_add_(*added)
        if copied[0]:
            torch._foreach_copy_(*copied)

    def _finish(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Count a captured update; or clip and step an optimizer whose update was not captured."""
        optimizer, subject = self.subject.optimizer, self.subject
        if optimizer is None:
            return norm
        if self.capture.plans:
            self.binding.after_update()
            optimizer._opt_called = True  # what torch's schedulers look at before they warn about their order
            return norm
        if subject.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(list(subject.trained.values()), subject.clip_norm)
        if not skips_update(subject):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm
