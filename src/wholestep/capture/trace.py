"""Tracing: the user's forward and loss, autograd, clipping and update, as one functional graph.

Two make_fx passes. The first runs the step on fake tensors with autograd inside and records aten operators, mutations and
all. The second replays that record through functionalisation (legal now, no autograd is left), which turns every write into a
value; writes to inputs end as one `copy_` per input, and these become the UPDATE outputs.
"""

from __future__ import annotations

import dataclasses
import operator
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.capture.batch import BatchSpec, unflatten
from wholestep.capture.modes import keyed
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.preflight import autocast_for, set_aside
from wholestep.capture.provenance import ModuleCalls, attribute_backward, complete
from wholestep.capture.reach import reached
from wholestep.capture.sites import Sites
from wholestep.capture.snapshot import Snapshot, frozen, leftover_fakes, same_content
from wholestep.capture.subject import Subject
from wholestep.errors import BadLoss, CaptureRefused
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

aten = torch.ops.aten
ws = torch.ops.ws

ACCUMULATED_WEIGHT = "~weight"
"""Name of the GRADIENT input that sums aux["weight"] over micro-batches; `~` cannot begin a parameter's name."""


@dataclasses.dataclass(slots=True)
class Capture:
    """A captured step: its graph(s) and what the runtime must know to feed them."""

    graph: TrainingGraph
    """The whole step; with accumulation the micro-step, whose update is `update`."""
    update: TrainingGraph | None
    batch_spec: BatchSpec
    aux_names: tuple[str, ...]
    num_sites: int
    plans: tuple[UpdatePlan, ...]
    constants: tuple[torch.Tensor, ...]
    """The live tensors behind the CONSTANT inputs."""
    notes: list[str]
    symbols: dict[str, Any] = dataclasses.field(default_factory=dict)
    guards: list[Any] = dataclasses.field(default_factory=list)
    fake_mode: Any = None
    rung: str = "whole step"
    from_cache: bool = False


@dataclasses.dataclass(slots=True)
class _Forward:
    """One run of the user's loss on given tensors."""

    loss: torch.Tensor
    aux: dict[str, torch.Tensor]
    calls: ModuleCalls
    reassigned: dict[str, torch.Tensor]
    fingerprint: list[tuple]
    unrolled: bool
    """Whether a recurrent layer ran, which tracing turns into one copy of the cell per time step."""


def run_loss(
    subject: Subject,
    tensors: dict[str, torch.Tensor],
    batch: Any,
    sites: Sites,
    *,
    tracing: bool = False,
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> _Forward:
    """The user's loss with `tensors` in place of parameters and buffers, under our modes."""
    calls = ModuleCalls(subject.root)
    named = {name: tensors[canonical] for name, canonical in subject.aliases.items()}
    with (
        compat.swapped_tensors(subject.root, dict(named)),  # a copy: torch writes the replaced ones into what it is given
        calls.recorded(annotate=tracing),
        keyed(sites, tracing=tracing, record=True) as lower,
        autocast_for(subject),
    ):
        loss, aux = check_loss((loss_fn or subject.loss_fn)(subject.model, batch))
        lower.record = False
        live = dict(subject.root.named_buffers(remove_duplicate=False))
    reassigned = {
        subject.aliases[n]: t for n, t in live.items() if n in named and t is not named[n] and n in subject.aliases
    }
    return _Forward(loss, aux, calls, reassigned, lower.fingerprint, lower.unrolled)


def check_loss(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Split what loss_fn returned into the scalar loss and its aux tensors."""
    aux: dict[str, torch.Tensor] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result, aux = result
    if not isinstance(result, torch.Tensor):
        raise BadLoss(
            f"loss_fn returned a {type(result).__name__}",
            hint="return a scalar tensor, or (loss, aux) with aux a dict of tensors",
        )
    if result.numel() != 1:
        raise BadLoss(f"the loss has shape {tuple(result.shape)}", hint="reduce it to a scalar, for example with .mean()")
    if not result.is_floating_point():
        raise BadLoss(f"the loss has dtype {result.dtype}", hint="a loss must be a floating-point scalar")
    for name, value in aux.items():
        if not isinstance(value, torch.Tensor):
            raise BadLoss(f"aux[{name!r}] is a {type(value).__name__}", hint="aux must hold tensors")
    return result.reshape(()), aux


class Tracer:
    """One capture at work: the fakes, the order of inputs, the function that is traced."""

    def __init__(
        self,
        subject: Subject,
        batch_tensors: Sequence[torch.Tensor],
        batch_spec: BatchSpec,
        *,
        dynamic: Sequence[dict[int, str]] | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.subject, self.batch_spec, self.loss_fn = subject, batch_spec, loss_fn
        self.mode = compat.new_fake_mode()
        self.symbols: dict[str, Any] = {}
        self.notes: list[str] = []
        self.captured_update = subject.optimizer is not None and optimizers.supported(subject.optimizer) is None
        names = {id(p): n for n, p in subject.trained.items()}
        self.plans = optimizers.plan_updates(subject.optimizer, names) if self.captured_update else []  # type: ignore[arg-type]
        self.fakes: dict[Input, torch.Tensor] = {}
        for name, tensor in subject.parameters.items():
            self.fakes[Input(Role.PARAMETER, name)] = compat.to_fake(self.mode, tensor)
        for name, tensor in subject.buffers.items():
            self.fakes[Input(Role.BUFFER, name)] = compat.to_fake(self.mode, tensor)
        self.batch_inputs = [Input(Role.BATCH, n) for n in batch_spec.names]
        for i, (entry, tensor) in enumerate(zip(self.batch_inputs, batch_tensors, strict=True)):
            self.fakes[entry] = self._fake_batch(tensor, dynamic[i] if dynamic else {})
        self.aux_names: tuple[str, ...] = ()
        self.used: list[str] = []

    def _fake_batch(self, tensor: torch.Tensor, dims: dict[int, str]) -> torch.Tensor:
        if not dims:
            return compat.to_fake(self.mode, tensor).requires_grad_(tensor.requires_grad)
        sizes: list[Any] = list(tensor.shape)
        for dim, name in dims.items():
            if name not in self.symbols:
                self.symbols[name] = compat.new_symbol(self.mode, name, tensor.shape[dim])
            sizes[dim] = self.symbols[name]
        with self.mode:
            return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)

    # ---- the functions that are traced ----

    def _leaves(self, values: dict[Input, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters as fresh leaves; the user's tensor hooks are registered on them."""
        trained = self.subject.trained
        leaves = {}
        for name, parameter in self.subject.parameters.items():
            leaf = values[Input(Role.PARAMETER, name)].detach().requires_grad_(name in trained)
            if name in trained:
                for hook in (parameter._backward_hooks or {}).values():
                    leaf.register_hook(hook)
            leaves[name] = leaf
        return leaves

    def forward(self, values: dict[Input, torch.Tensor], sites: Sites, *, tracing: bool) -> tuple[_Forward, dict]:
        leaves = self._leaves(values)
        tensors = leaves | {n: values[Input(Role.BUFFER, n)] for n in self.subject.buffers}
        batch = unflatten([values[entry] for entry in self.batch_inputs], self.batch_spec)
        return run_loss(self.subject, tensors, batch, sites, tracing=tracing, loss_fn=self.loss_fn), leaves

    def step(self, values: dict[Input, torch.Tensor], sites: Sites) -> tuple[list[Any], list[Output]]:
        """Forward, backward, and the update or the accumulation; values and their meaning, side by side."""
        results: list[tuple[Any, Output]] = []
        with compat.annotate(phase="forward"):
            run, leaves = self.forward(values, sites, tracing=True)
        self.fingerprint, self.aux_names = run.fingerprint, tuple(run.aux)
        accumulate = self.subject.accumulate
        with compat.annotate(phase="backward"):
            objective = self._objective(run, accumulate)
            grads = self._differentiate(objective, leaves)
        results.append((run.loss.detach(), Output(OutputKind.LOSS, "loss")))
        results += [(v.detach(), Output(OutputKind.AUX, n)) for n, v in run.aux.items()]
        with torch.no_grad():
            if accumulate > 1:
                results += self._accumulated(values, grads, run.aux)
            elif self.captured_update:
                with compat.annotate(phase="update"):
                    results += self.updated(values, grads)
            else:
                results += [(g, Output(OutputKind.GRADIENT, n)) for n, g in grads.items()]
        for name, tensor in run.reassigned.items():
            results.append((tensor.detach(), self._update_of(Input(Role.BUFFER, name))))
        # carried out as outputs only to learn their nodes; `_assemble` takes them off again
        results += [(g, Output(OutputKind.GRADIENT, f"gradient/{n}")) for n, g in grads.items()]
        results += [(t.detach(), Output(OutputKind.AUX, f"boundary/{n}")) for n, t in run.calls.outputs.items()]
        return [value for value, _ in results], [meaning for _, meaning in results]

    def _objective(self, run: _Forward, accumulate: int) -> torch.Tensor:
        if accumulate == 1:
            return run.loss
        weight = run.aux.get("weight")
        return run.loss / accumulate if weight is None else run.loss * weight.detach().reshape(()).to(run.loss.dtype)

    def _differentiate(self, loss: torch.Tensor, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not loss.requires_grad:
            raise BadLoss(
                "the loss does not depend on any trained parameter",
                hint="check for .detach(), torch.no_grad() or a wrong optimizer in loss_fn",
            )
        trained = list(self.subject.trained)
        compat.number_backward(loss)
        grads = torch.autograd.grad(loss, [leaves[n] for n in trained], allow_unused=True)
        found = {n: g for n, g in zip(trained, grads, strict=True) if g is not None}
        for name, grad in found.items():
            if grad.layout is not torch.strided:
                raise CaptureRefused(f"the gradient of {name} is sparse")
        self.used = list(found)
        return found

    def _update_of(self, entry: Input) -> Output:
        return Output(OutputKind.UPDATE, str(entry), self.place[entry])

    def _accumulated(
        self, values: dict[Input, torch.Tensor], grads: dict[str, torch.Tensor], aux: dict[str, torch.Tensor]
    ) -> list[tuple[Any, Output]]:
        results = []
        with compat.annotate(phase="backward"):
            for name, grad in grads.items():
                entry = Input(Role.GRADIENT, name)
                results.append((values[entry] + grad, self._update_of(entry)))
            if "weight" in aux:
                entry = Input(Role.GRADIENT, ACCUMULATED_WEIGHT)
                weight = aux["weight"].detach().reshape(()).to(torch.float32)
                results.append((values[entry] + weight, self._update_of(entry)))
        return results

    def updated(self, values: dict[Input, torch.Tensor], grads: dict[str, torch.Tensor]) -> list[tuple[Any, Output]]:
        """Clip by the global norm, then one update node per group."""
        results: list[tuple[Any, Output]] = []
        scale = None
        if self.subject.clip_norm is not None:
            in_torch_order = [grads[n] for n in self.parameter_order() if n in grads]
            norm, scale = ws.clip(in_torch_order, values[Input(Role.HYPER, "clip_norm")])
            results.append((norm, Output(OutputKind.NORM, "grad_norm")))
        for plan in self.plans:
            members = [n for n in plan.names if n in grads]
            if not members:
                continue
            params = [values[Input(Role.PARAMETER, n)] for n in members]
            states = {k: [values[Input(Role.STATE, f"{n}/{k}")] for n in members] for k in plan.state_keys}
            hyper = values[Input(Role.HYPER, plan.hyper_name)]
            new_params, new_states = optimizers.call_update(
                plan, params, [grads[n] for n in members], states, hyper, scale
            )
            for i, name in enumerate(members):
                results.append((new_params[i], self._update_of(Input(Role.PARAMETER, name))))
                for key in plan.state_keys:
                    results.append((new_states[key][i], self._update_of(Input(Role.STATE, f"{name}/{key}"))))
        return results

    def parameter_order(self) -> list[str]:
        """The optimizer's order: a norm over gradients depends on it in the last bits."""
        return [n for plan in self.plans for n in plan.names]

    # ---- inputs ----

    def add_inputs(self, num_sites: int) -> None:
        """Complete the input list once the number of random sites is known."""
        subject, device = self.subject, self.subject.device
        accumulating = subject.accumulate > 1
        with self.mode:
            if self.captured_update and not accumulating:
                self._add_update_inputs(device)
            if accumulating:
                for name in subject.trained:
                    self.fakes[Input(Role.GRADIENT, name)] = torch.empty_like(self.fakes[Input(Role.PARAMETER, name)])
                if "weight" in self.aux_names:
                    self.fakes[Input(Role.GRADIENT, ACCUMULATED_WEIGHT)] = torch.empty((), device=device)
            for site in range(num_sites):
                self.fakes[Input(Role.KEY, f"site{site}")] = torch.empty((), dtype=torch.int64, device=device)
        self.order = list(self.fakes)
        self.place = {entry: i for i, entry in enumerate(self.order)}

    def _add_update_inputs(self, device: torch.device) -> None:
        for plan in self.plans:
            for name in plan.names:
                for key in plan.state_keys:
                    fake = torch.empty_like(self.fakes[Input(Role.PARAMETER, name)])
                    self.fakes[Input(Role.STATE, f"{name}/{key}")] = fake
            size = optimizers.hyper_size(plan)
            self.fakes[Input(Role.HYPER, plan.hyper_name)] = torch.empty(size, dtype=torch.float64, device=device)
        if self.subject.clip_norm is not None:
            self.fakes[Input(Role.HYPER, "clip_norm")] = torch.empty((), dtype=torch.float64, device=device)


def capture(
    subject: Subject,
    batch_tensors: Sequence[torch.Tensor],
    batch_spec: BatchSpec,
    *,
    dynamic: Sequence[dict[int, str]] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
) -> Capture:
    """Trace the step. Raises CaptureRefused when the trace would not be the step; leaves the modules as they were."""
    began = time.perf_counter()
    foreign = reached(subject)[1]
    snapshot = Snapshot(subject.root, foreign)
    with python_randomness_watched(), set_aside(subject) as seen:
        try:
            tracer, graph, constants = _trace_faithfully(
                subject, batch_tensors, batch_spec, snapshot, dynamic=dynamic, loss_fn=loss_fn
            )
        finally:
            snapshot.restore()
    leaked = leftover_fakes(subject.root, foreign)
    assert not leaked, f"fake tensors left on {leaked}"
    update = None
    if subject.accumulate > 1 and tracer.captured_update:
        update = _trace_update(tracer)
    graph.seconds = time.perf_counter() - began
    num_sites = sum(1 for entry in tracer.order if entry.role is Role.KEY)
    return Capture(
        graph, update, batch_spec, tracer.aux_names, num_sites, tuple(tracer.plans), constants,
        seen.notes + tracer.notes, tracer.symbols, compat.shape_guards(tracer.mode), tracer.mode,
    )  # fmt: skip


def _trace_faithfully(
    subject: Subject, batch_tensors: Any, batch_spec: Any, snapshot: Snapshot, **options: Any
) -> tuple[Tracer, TrainingGraph, tuple[torch.Tensor, ...]]:
    """Run the forward twice, with other seeds and without tidying up between: only then is what repeats the step.

    An attribute that the first run stores and the second only reads is a cache: the trace is made again from a clean start, so
    that the cache is computed inside the graph. One that every run replaces carries state from step to step: refused.
    """
    tracer = Tracer(subject, batch_tensors, batch_spec, **options)
    first = _rehearse(tracer)
    stored = {str(c): frozen(c.value) for c in snapshot.changes()}
    try:
        graph, constants = _trace_once(tracer)
        difference = None if tracer.fingerprint == first else "its second run does other operations than its first"
    except (_LeakedFake, IndexError) as error:
        difference = str(error)
    rewritten = [c for c in snapshot.changes() if str(c) not in stored or not same_content(stored[str(c)], c.value)]
    if difference is None:
        for change in rewritten:
            tracer.notes.append(f"{change} changes in every forward: its Python value is fixed in the captured step")
        return tracer, graph, constants
    if rewritten or not stored:
        what = f"{rewritten[0]} is carried from one call to the next" if rewritten else difference
        raise CaptureRefused(f"the forward depends on Python state: {what}")
    snapshot.restore()  # caches only: trace again with cold caches, as the first run was
    tracer = Tracer(subject, batch_tensors, batch_spec, **options)
    _rehearse(tracer)
    snapshot.restore()
    graph, constants = _trace_once(tracer)
    if tracer.fingerprint != first:
        raise CaptureRefused("the forward does other operations at every call")
    tracer.notes.append(f"computed inside the step, not cached between steps: {', '.join(sorted(stored)[:3])}")
    return tracer, graph, constants


def _rehearse(tracer: Tracer) -> list[tuple]:
    """The forward on fakes, untraced: counts the random sites and leaves a fingerprint."""
    _reseed(1)
    with tracer.mode:
        sites = Sites(stand_in=torch.empty((), dtype=torch.int64, device=tracer.subject.device))
    with compat.fake_run(tracer.mode):
        run, _ = tracer.forward(tracer.fakes, sites, tracing=False)
    _refuse_drawn(1)
    tracer.aux_names = tuple(run.aux)
    if run.unrolled:
        tracer.notes.append("a recurrent layer is unrolled over its time steps: the graph grows with the sequence")
    tracer.add_inputs(sites.used)
    return run.fingerprint


class _LeakedFake(Exception):  # noqa: N818 - a signal inside this file
    """A tensor made by an earlier run of the forward was read by this one."""


def _trace_once(tracer: Tracer) -> tuple[TrainingGraph, tuple[torch.Tensor, ...]]:
    _reseed(2)
    order = tracer.order
    meanings: list[Output] = []

    def whole(*flat: torch.Tensor) -> list[Any]:
        values = dict(zip(order, flat, strict=True))
        keys = [values[e] for e in order if e.role is Role.KEY]
        outputs, described = tracer.step(values, Sites(keys))
        meanings[:] = described
        return outputs

    fakes = [tracer.fakes[e] for e in order]
    recorded = compat.trace(whole, fakes, mode=tracer.mode)
    attribute_backward(recorded)
    constants = _lift_constants(recorded, tracer)
    inputs = order + [Input(Role.CONSTANT, f"constant{i}") for i in range(len(constants))]
    fakes = fakes + [compat.to_fake(tracer.mode, c) for c in constants]
    return _functional(recorded, fakes, inputs, meanings, tracer.mode), constants


def _trace_update(tracer: Tracer) -> TrainingGraph:
    """The second graph of an accumulating step: accumulated gradients to clipped update."""
    subject = tracer.subject
    weighted = Input(Role.GRADIENT, ACCUMULATED_WEIGHT)
    update = Tracer.__new__(Tracer)
    update.subject, update.plans, update.mode, update.captured_update = subject, tracer.plans, tracer.mode, True
    update.fakes = {Input(Role.PARAMETER, n): tracer.fakes[Input(Role.PARAMETER, n)] for n in tracer.used}
    with tracer.mode:
        update._add_update_inputs(subject.device)
    update.fakes |= {Input(Role.GRADIENT, n): tracer.fakes[Input(Role.GRADIENT, n)] for n in tracer.used}
    if weighted in tracer.fakes:
        update.fakes[weighted] = tracer.fakes[weighted]
    missing = [e for e in update.fakes if e.role is Role.STATE and e.name.rsplit("/", 1)[0] not in tracer.used]
    for entry in missing:
        del update.fakes[entry]
    update.order = list(update.fakes)
    update.place = {entry: i for i, entry in enumerate(update.order)}
    meanings: list[Output] = []

    def whole(*flat: torch.Tensor) -> list[Any]:
        values = dict(zip(update.order, flat, strict=True))
        with torch.no_grad(), compat.annotate(phase="update"):
            grads = {n: values[Input(Role.GRADIENT, n)] for n in tracer.used}
            if weighted in values:
                grads = {n: (g / values[weighted]).to(g.dtype) for n, g in grads.items()}
            results = update.updated(values, grads)
        meanings[:] = [m for _, m in results]
        return [v for v, _ in results]

    fakes = list(update.fakes.values())
    recorded = compat.trace(whole, fakes, mode=tracer.mode)
    return _functional(recorded, fakes, update.order, meanings, tracer.mode)


def _lift_constants(recorded: fx.GraphModule, tracer: Tracer) -> tuple[torch.Tensor, ...]:
    """Tensors that the trace met without being given them become inputs, read live at every step."""
    graph = recorded.graph
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    live: list[torch.Tensor] = []
    placeholders: list[fx.Node] = []
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = getattr(recorded, str(node.target))
        if compat.is_fake(tensor):
            raise _LeakedFake("a tensor kept from the previous call is read")
        if not isinstance(tensor, torch.Tensor):
            continue
        if _becomes_literal(graph, node, tensor):
            continue
        known = next((i for i, t in enumerate(live) if t is tensor), None)
        if known is None:
            with graph.inserting_after(placeholders[-1] if placeholders else last):
                placeholders.append(graph.placeholder(f"constant{len(live)}"))
            placeholders[-1].meta["val"] = compat.to_fake(tracer.mode, tensor)
            live.append(tensor)
            known = len(live) - 1
        node.replace_all_uses_with(placeholders[known])
        graph.erase_node(node)
    _refuse_trained_constants(live, tracer.subject)
    return tuple(live)


def _becomes_literal(graph: fx.Graph, node: fx.Node, tensor: torch.Tensor) -> bool:
    """A number written in the code (`torch.tensor(0.5)`, or an empty list) is not state: it is put in the graph."""
    fresh = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
    if not (tensor.dim() == 0 or tensor.numel() == 0) or not node.users or not all(u.target in fresh for u in node.users):
        return False
    with graph.inserting_before(node):
        number = graph.call_function(
            aten.full.default,
            (list(tensor.shape), tensor.item() if tensor.numel() else 0),
            {"dtype": tensor.dtype, "device": tensor.device},
        )
    number.meta = {k: v for k, v in next(iter(node.users)).meta.items() if k in ("val", "custom")}
    for user in list(node.users):
        user.replace_all_uses_with(number)
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _refuse_trained_constants(live: list[torch.Tensor], subject: Subject) -> None:
    trained = {id(p): n for n, p in subject.trained.items()}
    for tensor in live:
        if id(tensor) in trained:
            raise CaptureRefused(
                f"{trained[id(tensor)]} is read around its module (through a closure or a list), so its gradient would be lost"
            )


def _functional(
    recorded: fx.GraphModule, fakes: list[Any], inputs: Sequence[Input], meanings: list[Output], mode: Any
) -> TrainingGraph:
    recorded.graph.eliminate_dead_code()
    if not any(_mutates(node) for node in recorded.graph.nodes):
        return _assemble(recorded, inputs, meanings)  # already functional: half of the tracing time saved
    module = compat.trace(lambda *flat: fx.Interpreter(recorded).run(*flat), fakes, mode=mode, functional=True)
    return _assemble(module, inputs, meanings)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (schema is None or schema.is_mutable) and node.target is not operator.getitem


_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)


def _assemble(module: fx.GraphModule, inputs: Sequence[Input], meanings: list[Output]) -> TrainingGraph:
    """From a functional trace to a TrainingGraph: writes to inputs become outputs, helper outputs become tables."""
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node in list(graph.nodes):
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    output = next(iter(reversed(graph.nodes)))
    values, outputs = list(output.args[0]), list(meanings)
    for node in list(graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in placeholders:
            index = placeholders.index(node.args[0])
            target, new = node.args[0], node.args[1]
            if new.meta["val"].dtype != target.meta["val"].dtype or new.meta["val"].shape != target.meta["val"].shape:
                raise CaptureRefused(f"{inputs[index]} is overwritten with another shape or dtype")
            values = [new if v is node else v for v in values]
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            if new is not target:
                values.append(new)
                outputs.append(Output(OutputKind.UPDATE, str(inputs[index]), index))
    gradients, boundaries, kept = {}, {}, []
    for value, meaning in zip(values, outputs, strict=True):
        if meaning.name.startswith("gradient/"):
            gradients[meaning.name.removeprefix("gradient/")] = value
        elif meaning.name.startswith("boundary/"):
            boundaries[meaning.name.removeprefix("boundary/")] = value
        elif not (meaning.kind is OutputKind.UPDATE and value is placeholders[meaning.target or 0]):
            kept.append((value, meaning))
    output.args = (tuple(v for v, _ in kept),)
    graph.eliminate_dead_code()
    kept_inputs, outputs = _drop_unused(graph, placeholders, inputs, [m for _, m in kept])
    complete(module)
    graph.lint()
    module.recompile()
    alive = set(graph.nodes)
    return TrainingGraph(
        module, tuple(kept_inputs), tuple(outputs),
        {n: v.name for n, v in gradients.items() if v in alive},
        {n: v.name for n, v in boundaries.items() if isinstance(v, fx.Node) and v in alive},
    )  # fmt: skip


def _drop_unused(
    graph: fx.Graph, placeholders: list[fx.Node], inputs: Sequence[Input], outputs: list[Output]
) -> tuple[list[Input], list[Output]]:
    """Parameters that got no gradient have no state, as in torch: their unused state inputs leave the graph."""
    dropped = [
        i for i, p in enumerate(placeholders) if not p.users and inputs[i].role in (Role.STATE, Role.GRADIENT)
    ]
    for i in dropped:
        graph.erase_node(placeholders[i])
    place: dict[int, int] = {}
    kept: list[Input] = []
    for i, entry in enumerate(inputs):
        if i not in dropped:
            place[i] = len(kept)
            kept.append(entry)
    return kept, [o if o.target is None else dataclasses.replace(o, target=place[o.target]) for o in outputs]


def _reseed(salt: int) -> None:
    """Other seeds at each run, so that a choice made by a random number shows as a difference."""
    random.seed(salt)
    np.random.seed(salt)


_KEEPS_NO_STATE = {"seed", "getstate", "setstate", "get_state", "set_state", "default_rng", "test"}


class python_randomness_watched:  # noqa: N801 - a context manager, named as one
    """Refuses a forward that draws from Python's or numpy's generators; puts their states back.

    Functions are watched by name, which gives the source line; `from random import random` is seen by the state it leaves.
    """

    def __enter__(self) -> None:
        self.states = random.getstate(), np.random.get_state()
        self.kept: list[tuple[Any, str, Any]] = []
        for owner, label in ((random, "random"), (np.random, "numpy.random")):
            for name in owner.__all__:
                function = getattr(owner, name, None)
                if callable(function) and not isinstance(function, type) and name not in _KEEPS_NO_STATE:
                    self.kept.append((owner, name, function))
                    setattr(owner, name, self._watched(function, f"{label}.{name}"))

    def _watched(self, function: Callable, label: str) -> Callable:
        def watched(*args: Any, **kwargs: Any) -> Any:
            from wholestep.capture.modes import user_source

            raise CaptureRefused(f"the forward draws from {label}: the value would be fixed", where=user_source())

        return watched

    def __exit__(self, *exc: object) -> None:
        for owner, name, function in self.kept:
            setattr(owner, name, function)
        random.setstate(self.states[0])
        np.random.set_state(self.states[1])


def _refuse_drawn(salt: int) -> None:
    """The generators as `_reseed(salt)` left them, or a refusal."""
    states = random.getstate(), np.random.get_state()
    _reseed(salt)
    fresh = random.getstate(), np.random.get_state()
    drawn = [] if states[0] == fresh[0] else ["random"]
    if repr(states[1]) != repr(fresh[1]):  # the repr holds the position in the stream
        drawn.append("numpy.random")
    if drawn:
        raise CaptureRefused(f"the forward draws from {drawn[0]}: the value would be fixed")
