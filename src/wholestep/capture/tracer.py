"""The function that is traced: the user's forward and loss, autograd, clipping and update, on given tensors.

`run_loss` runs the user's code under our modes, for tracing and for the eager reference alike. `Tracer` holds one capture at
work: its fake tensors, the order of its inputs, and the step as a function of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wholestep import compat
from wholestep.capture import loss_scale, optimizers
from wholestep.capture.batch import BatchSpec, unflatten
from wholestep.capture.chunked_loss import WHOLE_LOGITS_BYTES, ChunkedLoss
from wholestep.capture.modes import keyed
from wholestep.capture.preflight import autocast_for
from wholestep.capture.provenance import ModuleCalls
from wholestep.capture.sites import Sites
from wholestep.capture.subject import Subject
from wholestep.errors import BadLoss, CaptureRefused
from wholestep.graph.training_graph import Input, Output, OutputKind, Role
from wholestep.kernels import multi_tensor

ws = torch.ops.ws

ACCUMULATED_WEIGHT = "~weight"
"""Name of the GRADIENT input that sums aux["weight"] over micro-batches; `~` cannot begin a parameter's name."""


SCALE = Input(Role.SCALE, "loss_scale")


@dataclasses.dataclass(slots=True)
class Forward:
    """One run of the user's loss on given tensors."""

    loss: torch.Tensor
    aux: dict[str, torch.Tensor]
    calls: ModuleCalls
    reassigned: dict[str, torch.Tensor]
    fingerprint: list[tuple]
    unrolled: bool
    """Whether a recurrent layer ran, which tracing turns into one copy of the cell per time step."""
    losses: list[str] = dataclasses.field(default_factory=list)
    """One line per loss that is computed in chunks."""


def run_loss(
    subject: Subject,
    tensors: dict[str, torch.Tensor],
    batch: Any,
    sites: Sites,
    *,
    tracing: bool = False,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    chunked: ChunkedLoss | None = None,
) -> Forward:
    """The user's loss with `tensors` in place of parameters and buffers, under our modes; only a trace has `chunked`."""
    calls = ModuleCalls(subject.root)
    named = {name: tensors[canonical] for name, canonical in subject.aliases.items()}
    with (
        compat.swapped_tensors(subject.root, dict(named)),  # a copy: torch writes the replaced ones into what it is given
        calls.recorded(annotate=tracing),
        keyed(sites, tracing=tracing, record=True, on_gpu=subject.on_gpu, chunked=chunked) as lower,
        autocast_for(subject),
    ):
        loss, aux = check_loss((loss_fn or subject.loss_fn)(subject.model, batch))
        lower.record = False
        live = dict(subject.root.named_buffers(remove_duplicate=False))
    reassigned = {
        subject.aliases[n]: t for n, t in live.items() if n in named and t is not named[n] and n in subject.aliases
    }
    notes = [] if chunked is None else chunked.notes
    return Forward(loss, aux, calls, reassigned, lower.fingerprint, lower.unrolled, notes)


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
        whole_logits_bytes: int = WHOLE_LOGITS_BYTES,
    ) -> None:
        self.subject, self.batch_spec, self.loss_fn = subject, batch_spec, loss_fn
        self.whole_logits_bytes = whole_logits_bytes
        self.mode = compat.new_fake_mode()
        self.symbols: dict[str, Any] = {}
        self.notes: list[str] = []
        self.captured_update = subject.optimizer is not None and optimizers.supported(subject.optimizer) is None
        names = {id(p): n for n, p in subject.trained.items()}
        self.plans = optimizers.plan_updates(subject.optimizer, names) if self.captured_update else []  # type: ignore[arg-type]
        self.fakes: dict[Input, torch.Tensor] = {}
        for name, tensor in subject.parameters.items():
            self.fakes[Input(Role.PARAMETER, name)] = self.fake_of(tensor)
        for name, tensor in subject.buffers.items():
            self.fakes[Input(Role.BUFFER, name)] = self.fake_of(tensor)
        self.batch_inputs = [Input(Role.BATCH, n) for n in batch_spec.names]
        for i, (entry, tensor) in enumerate(zip(self.batch_inputs, batch_tensors, strict=True)):
            self.fakes[entry] = self._fake_batch(tensor, dynamic[i] if dynamic else {})
        self.aux_names: tuple[str, ...] = ()
        self.used: list[str] = []
        self.settled: dict[str, Any] = {}

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake that stands for a tensor; for one without data, on the device of the step."""
        if self.subject.dry is not None and tensor.device.type == "meta":
            return compat.stand_in(self.mode, tensor, self.subject.device)
        return compat.to_fake(self.mode, tensor)

    def _fake_batch(self, tensor: torch.Tensor, dims: dict[int, str]) -> torch.Tensor:
        if not dims:
            return self.fake_of(tensor).requires_grad_(tensor.requires_grad)
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

    def forward(self, values: dict[Input, torch.Tensor], sites: Sites, *, tracing: bool) -> tuple[Forward, dict]:
        leaves = self._leaves(values)
        tensors = leaves | {n: values[Input(Role.BUFFER, n)] for n in self.subject.buffers}
        batch = unflatten([values[entry] for entry in self.batch_inputs], self.batch_spec)
        chunked = ChunkedLoss(self.subject.chunked_loss, self.whole_logits_bytes)
        run = run_loss(self.subject, tensors, batch, sites, tracing=tracing, loss_fn=self.loss_fn, chunked=chunked)
        return run, leaves

    def step(self, values: dict[Input, torch.Tensor], sites: Sites) -> tuple[list[Any], list[Output]]:
        """Forward, backward, and the update or the accumulation; values and their meaning, side by side."""
        results: list[tuple[Any, Output]] = []
        with compat.annotate(phase="forward"):
            run, leaves = self.forward(values, sites, tracing=True)
        self.fingerprint, self.aux_names = run.fingerprint, tuple(run.aux)
        accumulate = self.subject.accumulate
        with compat.annotate(phase="backward"):
            objective = self._objective(run, accumulate)
            if SCALE in values:
                objective = objective * values[SCALE][0]
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

    def _objective(self, run: Forward, accumulate: int) -> torch.Tensor:
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
        skips = self.subject.nonfinite == "skip"
        if self.subject.clip_norm is not None or skips:
            norm, scale = self._clipped(values, grads)
            results.append((norm, Output(OutputKind.NORM, "grad_norm")))
            if skips:
                scale = torch.where(norm.isfinite(), scale, multi_tensor.SKIP)
            if SCALE in values:
                results.append((loss_scale.following(values[SCALE], norm.isfinite()), self._update_of(SCALE)))
        for plan in self.plans:
            members = [n for n in plan.names if n in grads]
            if not members:
                continue
            params = [values[Input(Role.PARAMETER, n)] for n in members]
            states = {k: [values[Input(Role.STATE, f"{n}/{k}")] for n in members] for k in plan.state_keys}
            hyper = values[Input(Role.HYPER, plan.hyper_name)]
            if SCALE in values and plan.kind == "adamw":
                hyper = loss_scale.counted(hyper, values[SCALE])
            new_params, new_states = optimizers.call_update(
                plan, params, [grads[n] for n in members], states, hyper, scale
            )
            for i, name in enumerate(members):
                results.append((new_params[i], self._update_of(Input(Role.PARAMETER, name))))
                for key in plan.state_keys:
                    results.append((new_states[key][i], self._update_of(Input(Role.STATE, f"{name}/{key}"))))
        return results

    def _clipped(
        self, values: dict[Input, torch.Tensor], grads: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the gradients, and what the update multiplies them by."""
        in_torch_order = [grads[n] for n in self.parameter_order() if n in grads]
        limit = values.get(Input(Role.HYPER, "clip_norm"))
        given = torch.ones((), dtype=torch.float64, device=self.subject.device) if limit is None else limit
        norm, scale = ws.clip(in_torch_order, given)
        if limit is None:  # finite gradients have a norm that is; the factor is not used
            scale = torch.ones_like(scale)
        if SCALE not in values:
            return norm, scale
        inverse = values[SCALE][0].reciprocal()  # a power of two: exact
        norm = norm * inverse
        if limit is not None:  # as clip_grad_norm_ on unscaled gradients
            scale = ((norm + 1e-6).reciprocal() * limit.to(norm.dtype)).clamp(max=1.0)
        return norm, scale * inverse

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
                self.add_update_inputs(device)
            if subject.loss_scale is not None:
                self.fakes[SCALE] = torch.empty(len(loss_scale.KEYS), device=device)
            if accumulating:
                for name in subject.trained:
                    self.fakes[Input(Role.GRADIENT, name)] = torch.empty_like(self.fakes[Input(Role.PARAMETER, name)])
                if "weight" in self.aux_names:
                    self.fakes[Input(Role.GRADIENT, ACCUMULATED_WEIGHT)] = torch.empty((), device=device)
            for site in range(num_sites):
                self.fakes[Input(Role.KEY, f"site{site}")] = torch.empty((), dtype=torch.int64, device=device)
        self.order = list(self.fakes)
        self.place = {entry: i for i, entry in enumerate(self.order)}

    def add_update_inputs(self, device: torch.device) -> None:
        for plan in self.plans:
            # an accumulating step's update knows only the parameters that got a gradient
            for name in [n for n in plan.names if Input(Role.PARAMETER, n) in self.fakes]:
                for key in plan.state_keys:
                    fake = torch.empty_like(self.fakes[Input(Role.PARAMETER, name)])
                    self.fakes[Input(Role.STATE, f"{name}/{key}")] = fake
            size = optimizers.hyper_size(plan)
            self.fakes[Input(Role.HYPER, plan.hyper_name)] = torch.empty(size, dtype=torch.float64, device=device)
        if self.subject.clip_norm is not None:
            self.fakes[Input(Role.HYPER, "clip_norm")] = torch.empty((), dtype=torch.float64, device=device)
