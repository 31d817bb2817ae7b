"""`compile(check="first")`: before and after a variant's first live step, compare it with eager PyTorch.

Before the step the user's own code runs, for real and on the live model, with the random keys of the step; what Python does
beside the computation is done by it and not replayed. Its loss and gradients are compared with those of the captured
graph, interpreted without its updates (so state stays as it is). With accumulation the compiled micro-step itself
runs on the first micro-batch, and what it wrote is put back. After the step, the compiled code: the gradient that
reached the optimizer is seen in the state that is linear in it (Adam's exp_avg, SGD's momentum, the parameter itself
for plain SGD), and buffers are compared directly. On a difference the state is put back and FirstStepDiffers names
the module. Costs one eager forward and backward, one interpreted one, and a copy of the state during the first step.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from wholestep.capture.cache import remember_checked, was_checked
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.tracer import ACCUMULATED_WEIGHT, HOLDS
from wholestep.capture.undo import Undo
from wholestep.errors import CaptureRefused, FirstStepDiffers
from wholestep.graph.copies import without_updates
from wholestep.graph.training_graph import Input, OutputKind, Role, TrainingGraph
from wholestep.lower import lower_interpret
from wholestep.runtime.eager import Result
from wholestep.runtime.one_step import OneStep
from wholestep.runtime.random import seeded_generator
from wholestep.runtime.variant import Variant
from wholestep.verify.blame import module_of_tensor, nearest_to_loss
from wholestep.verify.compare import compute_dtype, distance, gradient_rms, norm, total_norm
from wholestep.verify.reference import Reference, live_reference, reference_gradients


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Errors relative to the norm of the tensor. They find a wrong step, not a rounding: `verify` measures that."""

    graph: float
    """The captured graph, interpreted: the same operators as eager."""
    lowered: float
    """The compiled step, which sums in another order."""
    floor: float
    """In units of the root mean square of all gradients: a gradient that is truly zero is noise in eager as well."""
    loss: float


LIMITS = {
    "fp32": Limits(1e-3, 5e-3, 1e-4, 1e-4),
    "tf32": Limits(5e-3, 2e-2, 2e-3, 2e-3),
    "bf16": Limits(6e-2, 0.1, 2e-2, 2e-2),
}


def check_first_step(
    run: OneStep, variant: Variant, args: Sequence[Any], numbers: Sequence[Any]
) -> Callable[[OneStep, Result], None] | None:
    """Compare before the live step; returns what is to be called with its result after it, or None when skipped."""
    if was_checked(variant.capture):
        run.step._note("this captured step was compared with eager PyTorch by an earlier process")
        return None
    check = _FirstStep(run, variant, args, numbers)
    undo = Undo(variant.subject.loss_fn, variant.subject.model, run.batch)
    if run.python_random is not None:  # Dynamo's code has drawn what the loss draws from Python's generators
        random.setstate(run.python_random[0])
        np.random.set_state(run.python_random[1])
    try:
        check.before()
        undo.detach_new()
    except (torch.OutOfMemoryError, NotImplementedError, CaptureRefused) as error:
        undo.restore()
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        run.step._note(f"the first step was not checked against eager: {type(error).__name__}: {reason}")
        return None
    except BaseException:
        undo.restore()
        variant.uses = 0  # checked again at the next call
        raise
    finally:
        _give_back(variant.subject.device)

    def after(run: OneStep, result: Result) -> None:
        try:
            check.after(result, run.norm)
            remember_checked(variant.capture)
        except BaseException:
            undo.restore()
            raise
        finally:
            check.forget()

    return after


def nothing_after(run: OneStep, result: Result) -> None:
    """In place of the check after a step, where only the one before it is wanted."""


def _give_back(device: torch.device) -> None:
    """Eager's step may have taken twice what this one will ever need; the card need not stay full of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _precision(graph: TrainingGraph, device: torch.device) -> str:
    if compute_dtype(graph) in (torch.bfloat16, torch.float16):
        return "bf16"
    if device.type != "cuda":
        return "fp32"
    convolves = any("convolution" in str(node.target) for node in graph.operations())
    loose = torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
    return "tf32" if loose else "fp32"


class _FirstStep:
    """One check at work."""

    def __init__(self, run: OneStep, variant: Variant, args: Sequence[Any], numbers: Sequence[Any]) -> None:
        self.step, self.batch, self.micro = run.step, run.batch, len(run.results)
        self.variant, self.args, self.given = variant, args, numbers
        self.subject, self.binding, self.graph = variant.subject, variant.binding, variant.capture.graph
        self.accumulates = self.subject.accumulate > 1
        self.limits = LIMITS[_precision(self.graph, self.subject.device)]
        self.kept: dict[Input, tuple[torch.Tensor, torch.Tensor]] = {}
        """Input -> (live tensor, its value before the step)."""
        self.complete = True
        self.empty_grads: list[str] = []

    # ---- before the live step ----

    def before(self) -> None:
        self.numbers = self.variant.numbers
        targets = [entry.target for entry in self.graph.outputs if entry.target is not None]
        live = self.variant.inputs(self.args)
        written = [live[t] for t in targets if self.graph.inputs[t].role in (Role.CONSTANT, Role.BATCH)]
        self.eager = live_reference(
            self.subject, self.batch, self.step.seed, self.step.count, self.micro,
            num_sites=self.variant.capture.num_sites, written=written,
        )  # fmt: skip
        self.rms = gradient_rms(self.eager.gradients)
        sites = self.variant.capture.num_sites
        if self.eager.draws != sites:
            raise self._differs(f"eager draws {self.eager.draws} random numbers, the captured step {sites}", None)
        bare = without_updates(self.graph)
        watched = list(bare.gradients.items())
        values = self._run(lower_interpret(bare, watch=[node for _, node in watched]))
        kinds = [entry.kind for entry in bare.outputs]
        loss = values[kinds.index(OutputKind.LOSS)]
        for entry, value in zip(bare.outputs, values):
            if entry.name == HOLDS:
                self.variant.check_assumed(value)
        gradients = dict(zip([name for name, _ in watched], values[len(kinds) :], strict=True))
        if self.subject.loss_scale is not None:
            gradients = self._unscaled(gradients)
        failing = self._failing(gradients, self.limits.graph)
        if failing:
            failing = self._failing(gradients, self.limits.graph, self._own_rounding(failing))
        if failing or self._loss_differs(loss):
            self._report_graph(bare, loss, failing)
        if self.accumulates:
            self._check_micro_step()
        self._keep()

    def _unscaled(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the update sees them. An overflow is the loss scale's business: it is halved, and nothing is to be compared."""
        assert self.subject.loss_scale is not None
        if not all(bool(g.isfinite().all()) for g in (*self.eager.gradients.values(), *gradients.values())):
            scale = float(self.subject.loss_scale.numbers[0])
            raise NotImplementedError(f"gradients overflow at the loss scale {scale:g}")
        scale_now = self.subject.loss_scale.on(self.subject.device)[0]
        return {n: g.float() / scale_now for n, g in gradients.items()}  # in fp16 they would vanish

    def _reference(self, **options: Any) -> Reference:
        capture = self.variant.capture
        return reference_gradients(
            self.subject, self.batch, self.step.seed, self.step.count, self.micro,
            num_sites=capture.num_sites, constants=capture.constants, **options,
        )  # fmt: skip

    def _run(self, runner: Any) -> list[Any]:
        """The first micro-batch through `runner`, with the keys of this step."""
        self.variant.feed(self.step.seed, self.step.count, self.micro, self.given)
        with seeded_generator(self.subject.device, self.step.seed, self.step.count, self.micro):
            return runner(self.variant.inputs(self.args))

    def _loss_differs(self, loss: torch.Tensor) -> bool:
        ours, eager = float(loss), float(self.eager.loss)
        if not (math.isfinite(ours) and math.isfinite(eager)):
            return math.isfinite(ours) != math.isfinite(eager)
        return abs(ours - eager) > self.limits.loss * (abs(eager) + self.eager.activation_rms)

    def _failing(
        self, gradients: dict[str, torch.Tensor], relative: float, rounding: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, tuple[float, float]]:
        """Parameter -> (error, allowed), for every gradient that is further from eager's than allowed."""
        failing = {}
        for name in [*self.eager.gradients, *(n for n in gradients if n not in self.eager.gradients)]:
            ours, eager = gradients.get(name), self.eager.gradients.get(name)
            if ours is None or eager is None or ours.shape != eager.shape:
                failing[name] = (math.inf, 0.0)
                continue
            finite = ours.isfinite()
            allowed = relative * norm(eager) + self.limits.floor * self.rms * math.sqrt(eager.numel()) + rounding.get(name, 0.0)
            error = distance(ours, eager, finite) if torch.equal(finite, eager.isfinite()) else math.inf
            if not error <= allowed:
                failing[name] = (error, allowed)
        return failing

    def _check_micro_step(self) -> None:
        """The compiled micro-step on the first micro-batch: its gradients are all there to be compared."""
        live = self.variant.inputs(self.args)
        targets = [entry.target for entry in self.graph.outputs if entry.target is not None]
        before = [(live[t], live[t].clone()) for t in targets]
        for gradient in self.binding.gradients.values():
            gradient.zero_()
        self._run(self.variant.runner)
        gradients = {n: g for n, g in self.binding.gradients.items() if n != ACCUMULATED_WEIGHT}
        failing = self._failing({n: gradients[n] for n in self.graph.gradients}, self.limits.lowered)
        for tensor, value in before:
            tensor.copy_(value)
        if failing:
            self._report_gradients(failing, "the compiled micro-step")

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
        if self.subject.device.type == "cuda":
            wanted = sum(t.numel() * t.element_size() for t in found.values())
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            if torch.cuda.mem_get_info()[0] + unused < 1.2 * wanted:
                self.complete = False
                found = {e: t for e, t in found.items() if self._is_linear(e)}
        self.kept = {entry: (tensor, tensor.detach().clone()) for entry, tensor in found.items()}
        self.counters = {
            n: state["step"].clone() for n, state in self._states() if isinstance(state.get("step"), torch.Tensor)
        }
        self.first = {plan for plan, steps in self.binding.steps.items() if steps == 0}
        self.empty_grads = [n for n, p in self.subject.trained.items() if p.grad is None]

    def _is_linear(self, entry: Input) -> bool:
        if entry.role is Role.STATE:
            return entry.name.endswith(("/exp_avg", "/momentum_buffer"))
        plain = {n for plan, names in self.binding.members.items() if not plan.state_keys for n in names}
        return entry.role is Role.BUFFER or (entry.role is Role.PARAMETER and entry.name in plain)

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
            if plan in self.first and self.subject.optimizer is not None:
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
            failing = self._failing_updates(scale, self._own_rounding(failing, before))
        if self.subject.optimizer is None and not self.accumulates:
            grads = {n: self.subject.parameters[n].grad for n in self.eager.gradients if n in self.empty_grads}
            left = {n: g for n, g in grads.items() if g is not None}
            failing |= {n: e for n, e in self._failing(left, self.limits.lowered).items() if n in self.empty_grads}
        if failing:
            self._report_gradients(failing, what, self._put_back())
        if norm_error > self.limits.lowered:
            raise self._differs(f"{what}: the gradient norm is off by {norm_error:.2g}; {self._put_back()}", None)
        self._check_buffers()

    def forget(self) -> None:
        """Drop the copies and eager's gradients."""
        self.kept = {}
        del self.eager
        _give_back(self.subject.device)

    def _gradient(self, name: str) -> torch.Tensor | None:
        """What the optimizer should have been given: eager's gradient, or the (checked) accumulated one."""
        if not self.accumulates:
            return self.eager.gradients.get(name)
        weight = self.binding.gradients.get(ACCUMULATED_WEIGHT)
        total = self.binding.gradients.get(name)
        return total if weight is None or total is None else total / weight

    def _clipped(self, total: torch.Tensor | None) -> tuple[float, float]:
        """The factor of clipping by the norm the step itself found, and how far that norm is off, relatively.

        With eager's norm instead, one wrong gradient would make every update look wrong.
        """
        if self.subject.clip_norm is None or total is None or not self.binding.members:
            return 1.0, 0.0
        every = {n: self._gradient(n) for names in self.binding.members.values() for n in names}
        expected = total_norm({n: g for n, g in every.items() if g is not None})
        ours = float(total)
        return min(1.0, self.subject.clip_norm / (ours + 1e-6)), abs(ours - expected) / max(expected, 1e-30)

    def _failing_updates(self, scale: float, rounding: dict[str, float]) -> dict[str, tuple[float, float]]:
        """Parameter -> (error, allowed), for every update that is further from the one eager's gradient makes."""
        failing = {}
        for plan, names in self.binding.members.items():
            for name in names:
                outcome = self._update_error(plan, name, scale, rounding.get(name, 0.0))
                if outcome is not None and not outcome[0] <= outcome[1]:
                    failing[name] = outcome
        return failing

    def _own_rounding(self, names: Iterable[str], before: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """Twice the rounding of eager's own gradients, found in a wider type on the state `before` the step (or the live one).

        Some gradients are mostly rounding in eager as well (of a first convolution, summed over a million positions; of a bias in
        front of a norm, which is zero in truth); a fixed share of their norm says nothing then. Empty where it cannot be known.
        """
        if self.accumulates:
            return {}
        wider = torch.float32 if self.limits is LIMITS["bf16"] else torch.float64
        try:
            exact = self._reference(tensors=before, dtype=wider).gradients
        except (torch.OutOfMemoryError, RuntimeError, TypeError):
            return {}
        return {n: 2 * distance(self.eager.gradients[n], exact[n]) for n in names if n in exact}

    def _update_error(self, plan: UpdatePlan, name: str, scale: float, slack: float) -> tuple[float, float] | None:
        """(error, allowed) of the state that is linear in the gradient; None where it says too little.

        Adam: m' = b1 m + (1 - b1) g.  Momentum: b' = mu b + (1 - d) g.  Plain SGD: p' = p - lr g.
        """
        key = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[plan.kind]
        entry = Input(Role.STATE, f"{name}/{key}") if plan.state_keys else Input(Role.PARAMETER, name)
        gradient = self._gradient(name)
        if entry not in self.kept or gradient is None or not bool(gradient.isfinite().all()):
            return None
        numbers, flags = self.numbers[plan.hyper_name], dict(plan.flags)
        decay = numbers[-1] if plan.kind == "sgd" or not flags["decoupled"] else 0.0
        parameter = self.kept.get(Input(Role.PARAMETER, name))
        if decay and parameter is None:
            return None
        gradient = gradient.double() * (-scale if flags["maximize"] else scale)
        pull = gradient if not decay else gradient + decay * parameter[1].double()  # type: ignore[index]
        if plan.kind == "adamw":
            carried, share = numbers[2], 1 - numbers[2]
        elif plan.state_keys:
            carried, share = numbers[1], 1 - numbers[2]
        else:
            carried, share = 1.0, -numbers[0]
        live, old = self.kept[entry]
        rounding = 4 * torch.finfo(live.dtype).eps * (norm(live) + norm(old))
        if rounding > abs(share) * norm(gradient):
            return None
        floor = self.limits.floor * self.rms * scale * math.sqrt(gradient.numel())
        error = distance(live, carried * old.double() + share * pull)
        return error, abs(share) * (self.limits.lowered * norm(gradient) + floor + scale * slack) + rounding

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
