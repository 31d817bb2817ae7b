"""Binding: from a graph's input list to the live tensors, checked before every step.

Modules and `optimizer.state` stay the owners. The tensors found there are bound once; before each step identities and
addresses are compared (`load_state_dict`, `.data = ...`, `model.to(...)` move storage) and everything is bound anew when one
moved. Reading a pointer costs about 0.1 us, so a model of 400 parameters costs a few tens of microseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.capture import optimizers
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.capture.tracer import ACCUMULATED_WEIGHT
from wholestep.errors import WholestepError, WholestepWarning
from wholestep.graph.training_graph import Input, Role, TrainingGraph
from wholestep.ops.offload import lies_on_host
from wholestep.runtime.feed import Feed
from wholestep.tiers.arena import pinned_like

Columns = tuple[list[dict], list[str], list[torch.Tensor]]
"""Tables, keys, and the tensors expected there; columns rather than rows, so that C loops can compare them."""


class StateMoved(Exception):
    """A tensor was replaced by one of another shape, layout, dtype or device, or step counts parted: the graph no longer fits."""


class Binding:
    """The live tensors behind one capture."""

    def __init__(
        self, subject: Subject, capture: Capture, num_numbers: int = 0, gradients: dict[str, torch.Tensor] | None = None
    ) -> None:
        """`gradients`: where micro-batches add up, shared by the variants of a Step."""
        self.subject, self.capture = subject, capture
        graphs = [g for g in (capture.graph, capture.update) if g is not None]
        used = {e.name.rsplit("/", 1)[0] for g in graphs for e in g.inputs if e.role is Role.STATE}
        updated = used | {
            o.name.removeprefix("parameter:") for g in graphs for o in g.outputs if o.name.startswith("parameter:")
        }
        self.members = {plan: [n for n in plan.names if n in updated] for plan in capture.plans}
        sizes = {plan.hyper_name: optimizers.hyper_size(plan) for plan in capture.plans}
        if subject.clip_norm is not None:
            sizes["clip_norm"] = 1
        sizes |= {f"number{i}": 1 for i in range(num_numbers)}
        self.on_host = {
            entry.name
            for graph in graphs
            for entry, node in zip(graph.inputs, graph.placeholders, strict=True)
            if entry.role is Role.STATE and lies_on_host(node)
        }
        """States that lie in the host's memory."""
        self.feed = Feed(subject.device, capture.num_sites, sizes)
        self.kinds = _kinds(subject)
        """Of parameters and buffers, as they were captured."""
        self.given_kinds = [_kind(t) for t in capture.constants]
        self.hooks = subject.gradient_hooks()
        self.gradients: dict[str, torch.Tensor] = {} if gradients is None else gradients
        self.owners: Columns = ([], [], [])
        self.pointers: list[int] = []
        self.constant_pointers: list[int] = []
        self.states: Columns = ([], [], [])
        self.state_tables: list[dict] = []
        self.counters: dict[UpdatePlan, torch.Tensor] = {}
        self.steps: dict[UpdatePlan, float] = {}
        self.templates: dict[int, list[Any]] = {}
        self.bound = False

    # ---- before a step ----

    def refresh(self, given: Sequence[torch.Tensor] = ()) -> bool:
        """Bind again if anything moved; True when addresses changed (a recorded CUDA graph is then void).

        `given` are the tensors of modules that only the loss knows, as this call brings them.
        """
        if given and not all(map(is_, given, self.capture.constants)):
            if [_kind(t) for t in given] != self.given_kinds[: len(given)]:
                raise StateMoved("a tensor that the loss reads changed its shape, layout, dtype or device")
            self.capture.constants = (*given, *self.capture.constants[len(given) :])
            self.bound = False
        if self.bound and self._unmoved():
            self._count_steps()
            return False
        self._bind()
        return True

    def _unmoved(self) -> bool:
        """All of it in C loops: some two thousand comparisons, about a tenth of a millisecond."""
        tables, keys, tensors = self.owners
        if not all(map(is_, map(dict.get, tables, keys), tensors)):
            return False
        if [t.data_ptr() for t in tensors] != self.pointers:
            return False
        if [t.data_ptr() for t in self.capture.constants] != self.constant_pointers:
            return False
        optimizer = self.subject.optimizer
        if optimizer is None or not self.capture.plans:
            return True
        if len(optimizer.state) != len(self.state_tables):
            return False
        tables, keys, tensors = self.states
        return all(map(is_, optimizer.state.values(), self.state_tables)) and all(
            map(is_, map(dict.get, tables, keys), tensors)
        )

    def _bind(self) -> None:
        subject = self.subject
        subject.refresh()
        if _kinds(subject) != self.kinds:
            raise StateMoved("parameters or buffers changed their shape, layout, dtype or device")
        hooks = subject.gradient_hooks()
        if len(hooks) != len(self.hooks) or not all(map(is_, hooks, self.hooks)):
            raise StateMoved("parameters with other hooks took the place of others")
        named = [*subject.parameters.items(), *subject.buffers.items()]
        owners = [_owner(subject.root, name) for name, _ in named]
        self.owners = [table for table, _ in owners], [key for _, key in owners], [tensor for _, tensor in named]
        self.pointers = [tensor.data_ptr() for _, tensor in named]
        self.constant_pointers = [t.data_ptr() for t in self.capture.constants]
        self._bind_optimizer()
        self.templates = {}
        self.bound = True

    def _bind_optimizer(self) -> None:
        optimizer = self.subject.optimizer
        self.states, self.counters = ([], [], []), {}
        if optimizer is None:
            return
        self._make_states(optimizer)
        for plan, members in self.members.items():
            self._bind_group(optimizer, plan, {n: self.subject.parameters[n] for n in members})
        if self.on_host:
            guard_steps_by_hand(optimizer)
        self.state_tables = list(optimizer.state.values())
        self._count_steps()

    def _make_states(self, optimizer: Optimizer) -> None:
        """Where there are none yet, in the order in which torch would make them."""
        plans = {id(self.subject.parameters[n]): (plan, n) for plan, names in self.members.items() for n in names}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            plan, name = plans.get(id(parameter), (None, ""))
            if plan is None or optimizer.state.get(parameter):
                continue
            if plan.state_keys or plan.update.counts_steps:
                state = optimizers.new_state(optimizer, plan, parameter)
                optimizer.state[parameter] = {key: self._placed(f"{name}/{key}", value) for key, value in state.items()}

    def _placed(self, name: str, state: torch.Tensor) -> torch.Tensor:
        """Pinned memory of the host for a state that lies there; where all memory is the host's it stays what it is."""
        return pinned_like(state).copy_(state) if name in self.on_host and state.is_cuda else state

    def _bind_group(self, optimizer: Optimizer, plan: UpdatePlan, parameters: dict[str, torch.Tensor]) -> None:
        tables = []
        for name, parameter in parameters.items():
            table = optimizer.state.get(parameter, {})
            for key in plan.state_keys:
                if table.get(key) is None:
                    table[key] = optimizers.new_state(optimizer, plan, parameter)[key]
                if f"{name}/{key}" in self.on_host:
                    table[key] = self._on_host(table[key], parameter)
                # torch keeps a number on the CPU (NAdam's product of momenta), where no graph of a GPU reads it
                elif table[key].device != parameter.device:
                    table[key] = table[key].to(parameter.device)
                self._watch(table, key)
            tables.append(table)
        if plan.update.counts_steps and tables:
            self.counters[plan] = _shared_counter(tables)
            for table in tables:
                self._watch(table, "step")

    def _on_host(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The state where its graph reads it: what `load_state_dict` brought, to the card or pageable, is copied once."""
        if not parameter.is_cuda or (state.device.type == "cpu" and state.is_pinned()):
            return state
        return pinned_like(state).copy_(state)

    def _watch(self, table: dict, key: str) -> None:
        tables, keys, tensors = self.states
        tables.append(table)
        keys.append(key)
        tensors.append(table[key])

    def _count_steps(self) -> None:
        """How many steps each group has taken; other variants, eager steps and the user may have counted too.

        A counter on the CPU is simply read. One on the device is read only when its version says that someone else wrote
        it, because reading waits for the device.
        """
        optimizer = self.subject.optimizer
        for plan in self.capture.plans if optimizer is not None else ():
            counter = self.counters.get(plan)
            if counter is None:  # nobody counts: whether state holds a gradient matters, for SGD's dampening
                first = next(iter(self.members[plan]), None)
                known = 0.0 if first is None else optimizers.steps_taken(optimizer, self.subject.parameters[first])  # type: ignore[arg-type]
                self.steps[plan] = known
            elif counter.is_cuda and getattr(counter, _KNOWN, (None, 0.0))[0] == counter._version:
                self.steps[plan] = getattr(counter, _KNOWN)[1]
            else:
                self.steps[plan] = _counted(counter.tolist())
                setattr(counter, _KNOWN, (counter._version, self.steps[plan]))

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
        if role is Role.SCALE:
            assert subject.loss_scale is not None
            return subject.loss_scale.on(subject.device)
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
        for plan, members in self.members.items():
            counter = self.counters.get(plan)
            if counter is not None:
                counter.add_(1.0)
                setattr(counter, _KNOWN, (counter._version, self.steps[plan] + 1))
            elif self.steps[plan] == 0.0 and plan.state_keys:
                assert self.subject.optimizer is not None
                optimizers.mark_stepped(self.subject.optimizer, [self.subject.parameters[n] for n in members])


def guard_steps_by_hand(optimizer: Optimizer) -> None:
    """Beside a Step, `optimizer.step()` by hand finds no gradients and does nothing, or finds state on the host, where it
    cannot update a parameter of the card: the one is told, the other refused. State on the host is written by copies
    that the host does not wait for, so whoever asks for it has to."""
    if hasattr(optimizer, optimizers.OWN_HOOKS) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return  # a wrapper that was never initialised as an optimizer has no hooks; its update is its own call

    def look(owner: Optimizer, args: Any, kwargs: Any) -> None:
        if _lies_apart(owner):
            hint = "call the Step, which brings it to the card, or compile without host_memory= and state in the plan"
            raise WholestepError("optimizer.step() by hand while optimizer state lies on the host", hint=hint)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is None and all(p.grad is None for group in owner.param_groups for p in group["params"]):
            told = (
                "optimizer.step() by hand changes nothing: the Step has updated the parameters and leaves no gradients"
            )
            warnings.warn(f"{told}; to update them by hand compile with optimizer=None", WholestepWarning, stacklevel=3)

    def wait(owner: Optimizer) -> None:
        if _lies_apart(owner):
            for device in {p.device for p in owner.state if p.is_cuda}:
                torch.cuda.synchronize(device)

    handles = optimizer.register_step_pre_hook(look), optimizer.register_state_dict_pre_hook(wait)
    setattr(optimizer, optimizers.OWN_HOOKS, handles)


def _lies_apart(optimizer: Optimizer) -> bool:
    return any(_apart(p, t) for p, state in optimizer.state.items() for k, t in state.items() if k != "step")


def _apart(parameter: torch.Tensor, state: Any) -> bool:
    """Whether a state lies on the host and its parameter does not; numbers without dimensions may."""
    return isinstance(state, torch.Tensor) and state.dim() > 0 and parameter.is_cuda and not state.is_cuda


_KNOWN = "_wholestep_count"
"""On a counter: (version, steps) as last known to the host."""


def _shared_counter(tables: list[dict]) -> torch.Tensor:
    """One tensor of which every parameter's "step" is a view: counting is one addition, not hundreds.

    Variants of one Step meet the same counter again; a checkpoint that was loaded brings separate ones, which are joined.
    """
    steps = [torch.as_tensor(table["step"]) for table in tables]
    base = steps[0]._base
    if base is not None and base.dim() == 1 and base.numel() == len(steps):
        if all(s._base is base and s.storage_offset() == i for i, s in enumerate(steps)):
            return base
    counter = torch.stack([s.detach().reshape(()) for s in steps])
    _counted(counter.tolist())
    for i, table in enumerate(tables):
        table["step"] = counter[i]
    return counter


def _counted(steps: list[float]) -> float:
    """The number that all parameters of a group have."""
    if steps.count(steps[0]) != len(steps):
        raise StateMoved("parameters of one group have taken different numbers of steps")
    return steps[0]


def _kinds(subject: Subject) -> dict[str, tuple]:
    return {n: _kind(t) for n, t in [*subject.parameters.items(), *subject.buffers.items()]}


def _kind(tensor: torch.Tensor) -> tuple:
    strides = tensor.stride() if tensor.layout == torch.strided else None
    return tensor.shape, strides, tensor.layout, tensor.dtype, tensor.device


def _owner(root: torch.nn.Module, name: str) -> tuple[dict, str]:
    """The table (`_parameters` or `_buffers`) of the module that holds a tensor, and its key there."""
    path, _, key = name.rpartition(".")
    module = root.get_submodule(path) if path else root
    return (module._parameters if key in module._parameters else module._buffers), key
