"""Binding: from a graph's input list to the live tensors, checked before every step.

Modules and `optimizer.state` stay the owners. The tensors found there are bound once; before each step identities and
addresses are compared (`load_state_dict`, `.data = ...`, `model.to(...)` move storage) and everything is bound anew when one
moved. Reading a pointer costs about 0.1 us, so a model of 400 parameters costs a few tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture import optimizers
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.subject import Subject
from wholestep.capture.trace import ACCUMULATED_WEIGHT, Capture
from wholestep.graph.training_graph import Input, Role, TrainingGraph
from wholestep.runtime.feed import Feed


class StateMoved(Exception):  # noqa: N818 - a signal to the Step, which captures anew
    """A tensor was replaced by one of another shape, dtype or device, or step counts parted: the graph no longer fits."""


class Binding:
    """The live tensors behind one capture."""

    def __init__(self, subject: Subject, capture: Capture) -> None:
        self.subject, self.capture = subject, capture
        graphs = [g for g in (capture.graph, capture.update) if g is not None]
        used = {e.name.rsplit("/", 1)[0] for g in graphs for e in g.inputs if e.role is Role.STATE}
        updated = used | {o.name.removeprefix("parameter:") for g in graphs for o in g.outputs if o.name.startswith("parameter:")}
        self.members = {plan: [n for n in plan.names if n in updated] for plan in capture.plans}
        sizes = {plan.hyper_name: optimizers.hyper_size(plan) for plan in capture.plans}
        if subject.clip_norm is not None:
            sizes["clip_norm"] = 1
        self.feed = Feed(subject.device, capture.num_sites, sizes)
        self.gradients: dict[str, torch.Tensor] = {}
        self.owners: list[tuple[dict, str, torch.Tensor, int]] = []
        self.states: list[tuple[torch.Tensor, dict, str, torch.Tensor]] = []
        self.constants: list[tuple[torch.Tensor, int]] = []
        self.step_tensors: list[torch.Tensor] = []
        self.steps: dict[UpdatePlan, float] = {}
        self.templates: dict[int, list[Any]] = {}
        self.bound = False

    # ---- before a step ----

    def refresh(self) -> bool:
        """Bind again if anything moved; True when addresses changed (a recorded CUDA graph is then void)."""
        if self.bound and self._unmoved():
            return False
        self._bind()
        return True

    def _unmoved(self) -> bool:
        for table, key, tensor, pointer in self.owners:
            if table.get(key) is not tensor or tensor.data_ptr() != pointer:
                return False
        if any(tensor.data_ptr() != pointer for tensor, pointer in self.constants):
            return False
        optimizer = self.subject.optimizer
        if optimizer is None or not self.capture.plans:
            return True
        live = optimizer.state
        return all(
            live.get(parameter) is table and table.get(key) is tensor for parameter, table, key, tensor in self.states
        )

    def _bind(self) -> None:
        subject = self.subject
        before = {n: (p.shape, p.dtype, p.device) for n, p in [*subject.parameters.items(), *subject.buffers.items()]}
        subject.refresh()
        now = {n: (p.shape, p.dtype, p.device) for n, p in [*subject.parameters.items(), *subject.buffers.items()]}
        if before != now:
            raise StateMoved("parameters or buffers changed their shape, dtype or device")
        self.owners = []
        for name, tensor in [*subject.parameters.items(), *subject.buffers.items()]:
            table, key = _owner(subject.root, name)
            self.owners.append((table, key, tensor, tensor.data_ptr()))
        self.constants = [(t, t.data_ptr()) for t in self.capture.constants]
        self._bind_optimizer()
        self.templates = {}
        self.bound = True

    def _bind_optimizer(self) -> None:
        optimizer = self.subject.optimizer
        self.states, self.step_tensors = [], []
        if optimizer is None:
            return
        for plan, members in self.members.items():
            counts = set()
            for name in members:
                parameter = self.subject.parameters[name]
                counts.add(optimizers.steps_taken(optimizer, parameter))
                if not optimizer.state.get(parameter) and (plan.state_keys or plan.kind == "adamw"):
                    optimizer.state[parameter] = optimizers.new_state(optimizer, plan, parameter)
                table = optimizer.state.get(parameter, {})
                for key in plan.state_keys:
                    if table.get(key) is None:
                        table[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                for key in (*plan.state_keys, *(("step",) if plan.kind == "adamw" else ())):
                    self.states.append((parameter, table, key, table[key]))
                if plan.kind == "adamw":
                    if not isinstance(table["step"], torch.Tensor):
                        table["step"] = torch.tensor(float(table["step"]))
                        self.states[-1] = (parameter, table, "step", table["step"])
                    self.step_tensors.append(table["step"])
            if len(counts) > 1:
                raise StateMoved("parameters of one group have taken different numbers of steps")
            self.steps[plan] = counts.pop() if counts else 0.0

    # ---- inputs ----

    def inputs(self, graph: TrainingGraph, batch: Sequence[torch.Tensor]) -> list[Any]:
        """The input list of `graph`; `batch` fills the BATCH entries in order."""
        template = self.templates.get(id(graph))
        if template is None:
            template = self.templates[id(graph)] = [self._find(entry) for entry in graph.inputs]
        stream = iter(batch)
        return [next(stream) if value is None else value for value in template]

    def _find(self, entry: Input) -> torch.Tensor | None:
        subject, role, name = self.subject, entry.role, entry.name
        if role is Role.PARAMETER:
            return subject.parameters[name].detach()
        if role is Role.BUFFER:
            return subject.buffers[name].detach()
        if role is Role.STATE:
            parameter, _, key = name.rpartition("/")
            assert subject.optimizer is not None
            return subject.optimizer.state[subject.parameters[parameter]][key]
        if role is Role.HYPER:
            return self.feed.hyper(name)
        if role is Role.KEY:
            return self.feed.key(int(name.removeprefix("site")))
        if role is Role.CONSTANT:
            return self.capture.constants[int(name.removeprefix("constant"))].detach()
        if role is Role.GRADIENT:
            return self._gradient(name)
        return None

    def _gradient(self, name: str) -> torch.Tensor:
        if name not in self.gradients:
            parameter = self.subject.parameters.get(name)
            assert parameter is not None or name == ACCUMULATED_WEIGHT
            self.gradients[name] = (
                torch.zeros((), device=self.subject.device)
                if parameter is None
                else torch.zeros_like(parameter, memory_format=torch.preserve_format)
            )
        return self.gradients[name]

    def numbers(self) -> dict[str, list[float]]:
        """This step's optimizer numbers, read from `optimizer.param_groups` (schedulers write there)."""
        optimizer = self.subject.optimizer
        numbers: dict[str, list[float]] = {}
        if optimizer is not None:
            for plan in self.capture.plans:
                numbers[plan.hyper_name] = optimizers.hyper_values(
                    plan, optimizer.param_groups[plan.group], self.steps[plan]
                )
        if self.subject.clip_norm is not None and self.capture.plans:
            numbers["clip_norm"] = [float(self.subject.clip_norm)]
        return numbers

    def after_update(self) -> None:
        """Count the step where torch counts it."""
        for plan in self.steps:
            self.steps[plan] += 1
        if self.step_tensors:
            torch._foreach_add_(self.step_tensors, 1.0)


def _owner(root: torch.nn.Module, name: str) -> tuple[dict, str]:
    """The table (`_parameters` or `_buffers`) of the module that holds a tensor, and its key there."""
    path, _, key = name.rpartition(".")
    module = root.get_submodule(path) if path else root
    return (module._parameters if key in module._parameters else module._buffers), key
