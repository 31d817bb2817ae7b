"""A variant: one captured and lowered form of the step, for one graph of the loss and one shape of what a call brings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep.capture.front.loss_graph import AUX
from wholestep.capture.front.shared import bytes_of, overlap
from wholestep.capture.reading import Reading
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.capture.tracer import ACCUMULATED_WEIGHT, HOLDS
from wholestep.errors import CaptureRefused, WholestepError
from wholestep.graph.strides import laid_out, memory_order
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph
from wholestep.runtime.binding import Binding, StateMoved
from wholestep.runtime.eager import update_in_torch
from wholestep.runtime.kept import Kept
from wholestep.runtime.random import keys_for, seeded_generator


def without_autocast(device: torch.device) -> Any:
    """A captured graph has its casts; an autocast that the caller entered must not add others."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


Lowering = Callable[[TrainingGraph], Any]


class AssumptionFailed(CaptureRefused):
    """Something about data that the graph takes for granted does not hold: nothing was changed, and eager takes this step."""


def assumption_failed(error: Exception, *captures: Capture) -> Exception:
    """What does not hold may also end the step: an error of a graph that takes something for granted says so; else the error."""
    if isinstance(error, CaptureRefused | StateMoved | WholestepError | MemoryError | torch.OutOfMemoryError):
        return error
    places = dict.fromkeys(place for capture in captures for place in (*capture.facts, *capture.assumed))
    if not places:
        return error
    where = ", ".join([*filter(None, places)][:3])
    return AssumptionFailed(f"{type(error).__name__}: {error}", where=where or None)


class Variant:
    """Runs one capture: binds the live tensors, feeds keys and numbers, calls the lowered graph(s)."""

    def __init__(
        self,
        subject: Subject,
        capture: Capture,
        reading: Reading | None,
        lower: Lowering,
        provisional: bool = False,
        gradients: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.subject, self.capture = subject, capture
        self.provisional = provisional
        """Interpreted for now, because its shape is rare."""
        places = () if reading is None else reading.places
        self.brought = [i for i, place in enumerate(places) if place is not None and place.role is Role.BATCH]
        self.given = [i for i, place in enumerate(places) if place is not None and place.role is Role.CONSTANT]
        """Arguments behind the CONSTANT inputs that a call brings."""
        num_numbers = 0 if reading is None else len(reading.graph.host.integer)
        self.binding = Binding(subject, capture, num_numbers, gradients)
        self.runner = lower(capture.graph)
        self.update_runner = lower(capture.update) if capture.update is not None else None
        kinds = [o for o in capture.graph.outputs if o.kind is not OutputKind.UPDATE]
        self.kinds = [o.kind for o in kinds]
        self.names = [o.name for o in kinds]
        written = [o.target for o in capture.graph.outputs if o.target is not None]
        beside = (Role.BUFFER, Role.CONSTANT, Role.BATCH)
        # on a GPU nothing that a batch holds can end a step that has begun, but for an assertion that ends the process, and
        # assumptions about data
        may_end = subject.device.type == "cpu" or bool(capture.assumed or capture.facts)
        self.written = [i for i in written if capture.graph.inputs[i].role in beside] if may_end else []
        """Inputs that the graph writes beside parameters and their state."""
        examples = [] if reading is None else [reading.args[i] for i in self.brought]
        self.orders = [memory_order(t) if t.layout == torch.strided else None for t in examples]
        """How the dimensions of what a call brings lie in memory in compiled code; None: sparse."""
        batch = zip(self.brought, capture.graph.indices(Role.BATCH))
        self.written_back = [(i, place) for i, place in batch if place in written]
        """(argument, input) of what a call brings and the graph writes to."""
        self.mutated = [i for i in written if capture.graph.inputs[i].role in (Role.BUFFER, Role.CONSTANT)]
        self.mutated_memory: set[int] = set()
        """Where what the graph writes beside parameters and batches lies."""
        self.before = Kept()
        self.uses = 0
        self.checked = False
        """Whether its first run is behind it, compared with eager PyTorch or not."""

    @property
    def recordings(self) -> list[Any]:
        """Its runners that hold the memory of a CUDA graph."""
        return [runner for runner in (self.runner, self.update_runner) if getattr(runner, "holds_memory", False)]

    # ---- one step: begin, per micro-batch `bind` and `micro`, then `finish` ----

    def begin(self, args: Sequence[Any]) -> None:
        """At its first micro-batch of a step."""
        self.uses += 1
        self.before.forget()
        self.bind(args)

    def bind(self, args: Sequence[Any]) -> None:
        """Bind what moved; look at the optimizer."""
        moved = self.binding.refresh([args[i] for i in self.given])
        if moved:
            self.mutated_memory.clear()
            for runner in (self.runner, self.update_runner):
                if runner is not None and hasattr(runner, "invalidate"):
                    runner.invalidate()
        self.numbers = self.binding.numbers()

    def micro(
        self, args: Sequence[Any], numbers: Sequence[float], seed: int, step: int, micro: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor | None]:
        """The graph on one micro-batch: its outputs by name, gradients that were not used up, the norm of all of them.

        Names are ours, and all of the user's aux is under one of them: its keys may be anything, `loss` too.
        """
        self.feed(seed, step, micro, numbers)
        inputs = self.inputs(args)
        if self.mutated or self.written_back:
            self._refuse_shared(args, inputs)
        if self.written and not self.before.holds:
            self.before.keep([inputs[i] for i in self.written])
        with seeded_generator(self.subject.device, seed, step, micro), without_autocast(self.subject.device):
            values = self.runner(inputs)
        for i, place in self.written_back:
            if inputs[place] is not args[i]:  # it lay otherwise in memory: the copy was written to
                args[i].detach().copy_(inputs[place])
        named: dict[str, Any] = {}
        aux: list[Any] = []
        gradients: dict[str, torch.Tensor] = {}
        norm = None
        for kind, name, value in zip(self.kinds, self.names, values, strict=False):
            if kind is OutputKind.NORM:
                norm = value
            elif kind is OutputKind.GRADIENT:
                gradients[name] = value
            elif kind is OutputKind.AUX:
                aux.append(value)
            else:
                named[name] = value
        named[AUX] = dict(zip(self.capture.aux_names, aux, strict=True))
        if HOLDS in named:
            self.check_assumed(named[HOLDS])
        return named, gradients, norm

    def _refuse_shared(self, args: Sequence[Any], inputs: Sequence[Any]) -> None:
        """What is written may not lie in the memory of anything else that a call brings: there both would change."""
        if not self.mutated_memory:
            self.mutated_memory = {inputs[i].untyped_storage().data_ptr() for i in self.mutated}
        dense = [i for i in self.brought if args[i].layout is torch.strided]
        shared = any(args[i].untyped_storage().data_ptr() in self.mutated_memory for i in dense)
        if self.written_back:
            held = {
                i: bytes_of(t) for i, t in enumerate(args) if isinstance(t, torch.Tensor) and t.layout is torch.strided
            }
            pairs = ((held[i], other) for i, _ in self.written_back for k, other in held.items() if k != i)
            shared = shared or any(overlap(*pair) for pair in pairs)
        if shared:
            raise CaptureRefused("a tensor that the loss writes to shares memory with another one that it reads")

    def check_assumed(self, holds: torch.Tensor) -> None:
        """Raise AssumptionFailed where one of the step's assumptions about data does not hold; waits for the device."""
        if not bool(holds.all()):
            where = self.capture.assumed[holds.tolist().index(False)]
            raise AssumptionFailed(
                "a condition on data, which is taken for granted, does not hold", where=where or None
            )

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        return self.binding.inputs(self.capture.graph, self._laid_out([args[i] for i in self.brought]))

    def _laid_out(self, brought: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a call brings, as compiled code expects it in memory: copies where it lies otherwise."""
        if not self.orders:  # traced without guards: as it is brought
            return brought
        return [t if order is None else laid_out(t, order) for t, order in zip(brought, self.orders, strict=True)]

    def feed(self, seed: int, step: int, micro: int, numbers: Sequence[float] = ()) -> None:
        count = self.capture.num_sites
        keys = keys_for(seed, step, micro, count).numpy() if count else None
        given = {f"number{i}": [float(number)] for i, number in enumerate(numbers)}
        self.binding.feed.fill(keys, self.numbers | given)

    def update(self) -> torch.Tensor | None:
        """The update of an accumulating step; the norm of the gradients, where it was computed."""
        assert self.update_runner is not None and self.capture.update is not None
        with without_autocast(self.subject.device):
            values = self.update_runner(self.binding.inputs(self.capture.update, ()))
        return values[0] if values else None

    def hand_over(self, gradients: dict[str, torch.Tensor]) -> None:
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

    def finish(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Count a captured update; or clip and step an optimizer whose update was not captured."""
        optimizer, subject = self.subject.optimizer, self.subject
        if optimizer is None:
            return norm
        if self.capture.plans:
            self.binding.after_update()
            optimizer._opt_called = True  # what torch's schedulers look at before they warn about their order
            return norm
        return update_in_torch(subject)
