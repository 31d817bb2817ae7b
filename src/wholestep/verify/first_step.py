"""The comparison of a variant's first live step with eager PyTorch, before and after that step (check.py calls it).

Before the step the user's own code runs, for real and on the live model, with the random keys of the step; what Python does
beside the computation is done by it and not replayed. Its loss and gradients are compared with those of the captured
graph, interpreted without its updates (so state stays as it is). With accumulation the compiled micro-step itself
runs on the first micro-batch, and what it wrote is put back. After the step, the compiled code: the gradient that
reached the optimizer is seen in a tensor that shows it (Adam's exp_avg, SGD's momentum, the parameter itself for plain
SGD; each optimizer's record says which), and buffers are compared directly. On a difference the state is put back and
FirstStepDiffers names the module. Costs one eager forward and backward, one interpreted one, and a copy of the state.
Within a memory budget (`Lean`) what eager keeps, its gradients and the copies of the state wait on the host, and the
interpreted run is left out where it does not fit: the compiled step is compared all the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.tracer import ACCUMULATED_WEIGHT, HOLDS
from wholestep.errors import FirstStepDiffers, WholestepWarning
from wholestep.graph.bytes import show_bytes
from wholestep.graph.copies import without_updates
from wholestep.graph.notes import Note, check_note
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph
from wholestep.lower import lower_interpret
from wholestep.runtime.eager import Result
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.random import seeded_generator
from wholestep.runtime.variant import Variant, assumption_failed
from wholestep.verify.blame import module_of_tensor, nearest_to_loss
from wholestep.verify.compare import distance, gradient_rms, norm
from wholestep.verify.host import copied_to_host, zeros_set_aside
from wholestep.verify.limits import LIMITS, precision_of
from wholestep.verify.reference import Reference, live_reference, reference_gradients, written_parameters
from wholestep.verify.updates import look, place_of, places_read, rules_of


@dataclasses.dataclass(frozen=True, slots=True)
class Lean:
    """A check in little of the device's memory."""

    room: int | None
    """Bytes of saved tensors that may stay on the device; None keeps all there, and gradients too."""
    interpret: bool
    """Whether there is memory to run the captured graph operator by operator."""


def give_back(device: torch.device) -> None:
    """Eager's step may have taken twice what this one will ever need; the card need not stay full of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class FirstStep:
    """One check at work."""

    def __init__(
        self, run: OneStep, variant: Variant, args: Sequence[Any], numbers: Sequence[Any], lean: Lean | None = None
    ) -> None:
        self.lean, self.room, self.python_random = lean, None if lean is None else lean.room, run.python_random
        self.step, self.batch, self.micro = run.step, run.batch, len(run.results)
        self.variant, self.args, self.given = variant, args, numbers
        self.subject, self.binding, self.graph = variant.subject, variant.binding, variant.capture.graph
        self.accumulates = self.subject.accumulate > 1
        self.limits = LIMITS[precision_of(self.graph, self.subject.device)]
        self.kept: dict[Input, tuple[torch.Tensor, torch.Tensor]] = {}
        """Input -> (live tensor, its value before the step)."""
        self.complete = True
        self.undecided = False
        """Whether something differed that memory did not suffice to judge."""
        self.saw_gradients = False
        """Whether most gradients were compared: in the captured graph, or by what the step made of them."""
        self.empty_grads: list[str] = []
        self.in_users_code = False

    # ---- before the live step ----

    def before(self) -> None:
        self.numbers = self.variant.numbers
        scale = self.subject.loss_scale
        self.loss_scale = 1.0 if scale is None else float(scale.numbers[0])
        targets = [entry.target for entry in self.graph.outputs if entry.target is not None]
        live = self.variant.inputs(self.args)
        touched = [live[t] for t in targets if self.graph.inputs[t].role in (Role.CONSTANT, Role.BATCH)]
        self.in_users_code = True
        with self._state_set_aside():
            self.eager = live_reference(
                self.subject, self.batch, self.step.seed, self.step.count, self.micro,
                num_sites=self.variant.capture.num_sites, touched=touched, written=written_parameters(self.graph), room=self.room,
            )  # fmt: skip
        self.in_users_code = False
        self.binding.templates.clear()  # the user's code may have given tensors other memory
        self.rms = gradient_rms(self.eager.gradients)
        sites = self.variant.capture.num_sites
        if self.eager.draws != sites:
            raise self._differs(f"eager draws {self.eager.draws} random numbers, the captured step {sites}", None)
        if self.lean is None or self.lean.interpret:
            self._compare_graph()
        if self.accumulates:
            self._check_micro_step()
        self._keep()

    def _state_set_aside(self) -> contextlib.AbstractContextManager[None]:
        """Within a budget the state of a first step, which eager does not need, makes room for it."""
        if self.lean is None:
            return contextlib.nullcontext()
        states = dict(self._states())
        return zeros_set_aside(
            states[n][key] for plan, names in self.binding.members.items() for n in names for key in plan.state_keys
        )

    def _compare_graph(self) -> None:
        """The captured graph, interpreted without its updates."""
        bare = without_updates(self.graph)
        watched = list(bare.gradients.items())
        values = self._run(lower_interpret(bare, watch=[node for _, node in watched]))
        kinds = [entry.kind for entry in bare.outputs]
        loss = values[kinds.index(OutputKind.LOSS)]
        for entry, value in zip(bare.outputs, values):
            if entry == Output(OutputKind.KEPT, HOLDS):
                self.variant.check_assumed(value)
        gradients = dict(zip([name for name, _ in watched], values[len(kinds) :], strict=True))
        if self.subject.loss_scale is not None:
            gradients = self._unscaled(gradients)
        failing = self._failing(gradients, self.limits.graph)
        if failing:
            failing = self._judged(failing, lambda rounding: self._failing(gradients, self.limits.graph, rounding))
        if failing or self._loss_differs(loss):
            self._report_graph(bare, loss, failing)
        self.saw_gradients = True

    def _unscaled(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the update sees them. An overflow is the loss scale's business: it is halved, and nothing is to be compared."""
        if not all(
            bool(g.isfinite().all()) for g in itertools.chain(self.eager.gradients.values(), gradients.values())
        ):
            raise NotImplementedError(f"gradients overflow at the loss scale {self.loss_scale:g}")
        return {n: g.float() / self.loss_scale for n, g in gradients.items()}  # in fp16 they would vanish

    def _reference(self, **options: Any) -> Reference:
        capture = self.variant.capture
        return reference_gradients(
            self.subject, self.batch, self.step.seed, self.step.count, self.micro,
            num_sites=capture.num_sites, constants=capture.constants, written=written_parameters(self.graph), room=self.room,
            **options,
        )  # fmt: skip

    def _run(self, runner: Any) -> list[Any]:
        """The first micro-batch through `runner`, with the keys of this step."""
        self.variant.feed(self.step.seed, self.step.count, self.micro, self.given)
        with seeded_generator(self.subject.device, self.step.seed, self.step.count, self.micro):
            try:
                return runner(self.variant.inputs(self.args))
            except Exception as error:
                raise assumption_failed(error, self.variant.capture) from None

    def _loss_differs(self, loss: torch.Tensor) -> bool:
        ours, eager = float(loss), float(self.eager.loss)
        if not (math.isfinite(ours) and math.isfinite(eager)):
            return math.isfinite(ours) != math.isfinite(eager)
        return abs(ours - eager) > self.limits.loss * (abs(eager) + self.eager.activation_rms)

    def _failing(
        self,
        gradients: Mapping[str, torch.Tensor],
        relative: float,
        rounding: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, tuple[float, float]]:
        """Parameter -> (error, allowed), for every gradient that is further from eager's than allowed."""
        failing = {}
        for name in [*self.eager.gradients, *(n for n in gradients if n not in self.eager.gradients)]:
            ours, eager = gradients.get(name), self.eager.gradients.get(name)
            if ours is None or eager is None or ours.shape != eager.shape:
                failing[name] = (math.inf, 0.0)
                continue
            finite = ours.isfinite()
            allowed = (
                relative * norm(eager)
                + self.limits.floor * self.rms * math.sqrt(eager.numel())
                + rounding.get(name, 0.0)
            )
            error = distance(ours, eager, finite) if torch.equal(finite, eager.isfinite()) else math.inf
            if not error <= allowed:
                failing[name] = (error, allowed)
        return failing

    def _check_micro_step(self) -> None:
        """The compiled micro-step on the first micro-batch: its gradients are all there to be compared."""
        live = self.variant.inputs(self.args)
        targets = [entry.target for entry in self.graph.outputs if entry.target is not None]
        before = [(live[t], self._copied(live[t])) for t in targets]
        for target in targets:  # and no other: micro-batches before this one may have trained other parameters
            if self.graph.inputs[target].role is Role.GRADIENT:
                live[target].zero_()
        self._run(self.variant.runner)
        gradients = {n: self.binding.gradients[n] / self.loss_scale for n in self.graph.gradients}
        failing = self._failing(gradients, self.limits.lowered)
        for tensor, value in before:
            tensor.copy_(value)
        if failing:
            self._report_gradients(failing, "the compiled micro-step")
        self.saw_gradients = True

    # ---- keeping and putting back ----

    def _keep(self) -> None:
        """Copy what the step will write; where the card has no room for that, only what the check after it reads."""
        found: dict[Input, torch.Tensor] = {}
        for graph in (self.graph, self.variant.capture.update):
            if graph is None:
                continue
            live = self.variant.inputs(self.args) if graph is self.graph else self.binding.inputs(graph, ())
            for entry in graph.outputs:
                if entry.target is not None and graph.inputs[entry.target].role is not Role.GRADIENT:
                    found[graph.inputs[entry.target]] = live[entry.target]
        if self.subject.device.type == "cuda" and self.lean is None:
            wanted = sum(t.numel() * t.element_size() for t in found.values())
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if torch.cuda.mem_get_info()[0] + unused < 1.2 * wanted:
                self.complete = False
                read = self._read_by_check()
                found = {e: t for e, t in found.items() if e.role is Role.BUFFER or e in read}
        self.kept = {entry: (tensor, self._copied(tensor)) for entry, tensor in found.items()}
        self.counters = {
            n: state["step"].clone() for n, state in self._states() if isinstance(state.get("step"), torch.Tensor)
        }
        self.first = {plan for plan, steps in self.binding.steps.items() if steps == 0}
        self.empty_grads = [n for n, p in self.subject.trained.items() if p.grad is None]

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone() if self.lean is None else copied_to_host(tensor)

    def _read_by_check(self) -> set[Input]:
        members = [(plan, name) for plan, names in self.binding.members.items() for name in names]
        return {entry for plan, name in members for entry in places_read(plan, self.numbers[plan.hyper_name], name)}

    def _states(self) -> list[tuple[str, dict]]:
        """Parameter -> its table in the optimizer's state, for all the step updates."""
        optimizer, parameters = self.subject.optimizer, self.subject.parameters
        members = [n for names in self.binding.members.values() for n in names]
        return [] if optimizer is None else [(n, optimizer.state.get(parameters[n], {})) for n in members]

    def _put_back(self) -> str:
        with torch.no_grad():
            for tensor, value in self.kept.values():
                tensor.copy_(value)
            for name, state in self._states():
                if name in self.counters:
                    state["step"].copy_(self.counters[name])
        for plan, names in self.binding.members.items():
            if plan in self.first and self.subject.optimizer is not None and not plan.update.has_state_from_the_start:
                for name in names:  # state of a first step that has not been: torch has none
                    self.subject.optimizer.state.pop(self.subject.parameters[name], None)
        self.binding.bound = False  # step counts are read anew
        self.variant.uses, self.variant.checked = 0, False
        for name in self.empty_grads:
            self.subject.parameters[name].grad = None
        return "the state was put back" if self.complete else "there was no memory to keep a copy: the state is changed"

    # ---- after the live step ----

    def after(self, result: Result, total: torch.Tensor | None) -> None:
        loss, _ = result
        what = "the compiled step"
        if not self.accumulates and self._loss_differs(loss):
            told = f"the loss is {float(loss):.7g}, in eager {float(self.eager.loss):.7g}"
            raise self._differs(f"{what}: {told}; {self._put_back()}", None)
        if self.subject.nonfinite == "skip" and total is not None and not bool(total.isfinite()):
            return  # nothing was updated, so there is nothing to compare
        scale, norm_error = self._clipped(total)
        failing = self._failing_updates(scale, {})
        if failing and self.complete:
            before = {e.name: old for e, (_, old) in self.kept.items() if e.role in (Role.PARAMETER, Role.BUFFER)}
            failing = self._judged(failing, lambda rounding: self._failing_updates(scale, rounding), before)
        if (
            not self.variant.capture.plans and not self.accumulates
        ):  # the update is the user's, or torch's and yet to come
            grads = {n: self.subject.parameters[n].grad for n in self.eager.gradients if n in self.empty_grads}
            left = {n: g for n, g in grads.items() if g is not None}
            failing |= {n: e for n, e in self._failing(left, self.limits.lowered).items() if n in self.empty_grads}
            self.saw_gradients |= bool(left)
        if failing:
            self._report_gradients(failing, what, self._put_back())
        if norm_error > self.limits.lowered:
            raise self._differs(f"{what}: the gradient norm is off by {norm_error:.2g}; {self._put_back()}", None)
        self._check_buffers()

    def forget(self) -> None:
        """Drop the copies and eager's gradients."""
        self.kept = {}
        del self.eager
        give_back(self.subject.device)

    def _gradient(self, name: str) -> torch.Tensor | None:
        """What the optimizer should have been given: eager's gradient, or the (checked) accumulated one."""
        if not self.accumulates:
            return self.eager.gradients.get(name)
        weight = self.binding.gradients.get(ACCUMULATED_WEIGHT)
        total = self.binding.gradients.get(name)
        return None if total is None else total / (self.loss_scale if weight is None else weight * self.loss_scale)

    def _clipped(self, total: torch.Tensor | None) -> tuple[float, float]:
        """The factor of clipping by the norm the step itself found, and how far that norm is off, relatively.

        With eager's norm instead, one wrong gradient would make every update look wrong.
        """
        if self.subject.clip_norm is None or total is None or not self.binding.members:
            return 1.0, 0.0
        every = (self._gradient(n) for names in self.binding.members.values() for n in names)
        expected = math.hypot(*(norm(g) for g in every if g is not None))
        ours = float(total)
        return min(1.0, self.subject.clip_norm / (ours + 1e-6)), abs(ours - expected) / max(expected, 1e-30)

    def _failing_updates(self, scale: float, rounding: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Parameter -> (error, allowed), for every update that is further from the one eager's gradient makes."""
        found = {
            name: self._update_error(plan, name, scale, rounding.get(name, 0.0))
            for plan, names in self.binding.members.items() for name in names
        }  # fmt: skip
        outcomes = {name: outcome for name, outcome in found.items() if outcome is not None}
        self.saw_gradients |= 2 * len(outcomes) > len(found)
        return {name: outcome for name, outcome in outcomes.items() if not outcome[0] <= outcome[1]}

    def _judged(
        self,
        failing: dict[str, tuple[float, float]],
        again: Callable[[dict[str, float]], dict[str, tuple[float, float]]],
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, tuple[float, float]]:
        """What fails `again` when eager's own rounding is allowed as well; a warning where memory does not suffice to know that."""
        try:
            rounding = self._own_rounding(failing, before)
        except torch.OutOfMemoryError:
            self.undecided = True
            name = nearest_to_loss(self.graph, failing)
            error, allowed = failing[name]
            others = f", {len(failing) - 1} others likewise" if len(failing) > 1 else ""
            text = f"the gradient of {name} is off by {error:.2g} (limit {allowed:.2g}){others}"
            why = "memory does not suffice to tell whether that is eager's own rounding"
            self.step._note(check_note("undecided", f"{text}; {why}"))
            warnings.warn(
                f"{text}: wholestep.verify(...) tells whether that is rounding", WholestepWarning, stacklevel=2
            )
            return {}
        return again(rounding)

    def _own_rounding(self, names: Iterable[str], before: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """Twice the rounding of eager's own gradients, found in a wider type on the state `before` the step (or the live one).

        Some gradients are mostly rounding in eager as well (of a first convolution, summed over a million positions; of a bias in
        front of a norm, which is zero in truth); a fixed share of their norm says nothing then. Empty where it cannot be known;
        torch.OutOfMemoryError where memory does not suffice.
        """
        if self.accumulates:
            return {}
        wider = torch.float32 if self.limits is LIMITS["bf16"] else torch.float64
        try:
            exact = self._reference(tensors=before, dtype=wider).gradients
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError):
            return {}
        return {n: 2 * distance(self.eager.gradients[n], exact[n]) for n in names if n in exact}

    def _update_error(self, plan: UpdatePlan, name: str, scale: float, slack: float) -> tuple[float, float] | None:
        """(error, allowed) of the first tensor in which the gradient shows; None where none says enough."""
        gradient = self._gradient(name)
        if gradient is None or not bool(gradient.isfinite().all()):
            return None
        kept, place = self.kept, place_of(None, name)
        if name in self.eager.written and place in kept:  # the update starts from what the loss has written
            if self.accumulates:  # micro by micro, of which eager has run one
                return None
            kept = {**kept, place: (kept[place][0], self.eager.written[name])}
        floor = self.limits.floor * self.rms * scale * math.sqrt(gradient.numel())
        off = self.limits.lowered * scale * norm(gradient) + floor + scale * slack
        for rule in rules_of(plan, self.numbers[plan.hyper_name]):
            seen = look(rule, name, kept, gradient, scale)
            if seen is not None and seen.tells:
                return seen.error, seen.allowed(off)
        return None

    def _check_buffers(self) -> None:
        if self.accumulates:
            return
        for name, eager in self.eager.buffers.items():
            ours = self.subject.buffers[name]
            if eager.is_floating_point():
                floor = self.limits.floor * self.eager.activation_rms * math.sqrt(eager.numel())
                error = distance(ours, eager, eager.isfinite())
                allowed = self.limits.lowered * norm(eager) + floor
            else:
                error, allowed = float((ours != eager).sum()), 0.0
            if not error <= allowed:
                told = f"buffer {name} is off by {error:.2g} (allowed {allowed:.2g})"
                raise self._differs(f"the compiled step: {told}; {self._put_back()}", module_of_tensor(name))

    # ---- telling ----

    def told(self) -> Note:
        """How much of the check was done, where memory is short."""
        assert self.lean is not None
        moved = (
            f", {show_bytes(self.eager.moved_bytes)} of what eager saves on the host" if self.eager.moved_bytes else ""
        )
        graph = (
            ""
            if self.lean.interpret
            else "; the captured graph was not run by itself, for which memory does not suffice"
        )
        return check_note("whole", f"the first step is compared with eager PyTorch on all rows{moved}{graph}")

    def _report_graph(self, bare: TrainingGraph, loss: torch.Tensor, failing: dict[str, tuple[float, float]]) -> None:
        """The module is the first whose output departs; where none does, the fault is in the backward."""
        eager = self._reference(keep_outputs=True).module_outputs
        paths = [path for path in bare.boundaries if path in eager]
        values = self._run(lower_interpret(bare, watch=[bare.boundaries[path] for path in paths]))
        for path, ours in zip(paths, values[len(bare.outputs) :], strict=True):
            theirs = eager[path]
            error = distance(ours, theirs, theirs.isfinite()) if ours.shape == theirs.shape else math.inf
            if not error <= self.limits.graph * norm(theirs):
                told = f"its output is off by {error:.2g} of {norm(theirs):.2g}"
                raise self._differs(f"the captured forward: module {path}: {told}", path)
        if failing:
            self._report_gradients(failing, "the captured graph")
        told = f"the loss is {float(loss):.7g}, in eager {float(self.eager.loss):.7g}"
        raise self._differs(f"the captured graph: {told}", None)

    def _report_gradients(self, failing: dict[str, tuple[float, float]], what: str, ending: str = "") -> None:
        name = nearest_to_loss(self.graph, failing)
        error, allowed = failing[name]
        told = f"the gradient of {name} is off by {error:.2g} (allowed {allowed:.2g}), as are {len(failing) - 1} others"
        raise self._differs(f"{what}: {told}" + (f"; {ending}" if ending else ""), module_of_tensor(name))

    def _differs(self, what: str, where: str | None) -> FirstStepDiffers:
        return FirstStepDiffers(
            f"the first step differs from eager PyTorch: {what}",
            where=where or None,
            hint="backend='interpret' shows whether compiled code is at fault, wholestep.verify(...) names the pass, "
            "check='off' runs anyway; please report it",
        )
