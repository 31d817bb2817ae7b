"""The function that is traced: the loss, autograd, clipping and update, on given tensors.

`Tracer` holds one capture at work: its fake tensors, the order of its inputs, and the step as a function of them. The loss is
a LossGraph, run under our modes, or the user's own code (`forward.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from wholestep import compat
from wholestep.capture import loss_scale, optimizers
from wholestep.capture.absent import Absent, Listed
from wholestep.capture.batch import flatten, unflatten
from wholestep.capture.chunked_loss import WHOLE_LOGITS_BYTES, ChunkedLoss
from wholestep.capture.forward import Forward, run_loss
from wholestep.capture.front.replay import Assumed
from wholestep.capture.gpu_autocast import gpu_autocast
from wholestep.capture.modes import keyed
from wholestep.capture.parts import local_part, norms_of_parts
from wholestep.capture.reading import Reading
from wholestep.capture.repeats import Run
from wholestep.capture.sites import Sites
from wholestep.capture.subject import Subject
from wholestep.capture.write_out import Watch
from wholestep.errors import BadLoss, CaptureRefused
from wholestep.graph.notes import Note
from wholestep.graph.training_graph import Input, Output, OutputKind, Role
from wholestep.ops import multi_tensor

ws = torch.ops.ws

ACCUMULATED_WEIGHT = "~weight"
"""Name of the GRADIENT input that sums aux["weight"] over micro-batches; `~` cannot begin a parameter's name."""


SCALE = Input(Role.SCALE, "loss_scale")
HOLDS = "~holds"
"""Name of the output that tells, for each assumption about data, whether it holds."""
FACT = "~fact"
"""Outputs of this name and a number: facts about sizes that data decides, which hold."""


class WeightUnknown(Exception):
    """Where no graph of Dynamo's tells beforehand: the loss returns a weight of its micro-batch."""


def _alike(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Sizes as text: no trace relies on the answer."""
    return new.dtype == old.dtype and list(map(str, new.shape)) == list(map(str, old.shape))


class Tracer:
    """One capture at work: the fakes, the order of inputs, the function that is traced."""

    def __init__(
        self,
        subject: Subject,
        reading: Reading | None,
        batch: Any = None,
        *,
        dynamic: Sequence[dict[int, str]] | None = None,
        whole_logits_bytes: int = WHOLE_LOGITS_BYTES,
        run: Run | None = None,
    ) -> None:
        """`reading` None traces the user's own code on `batch`, without guards. `run`: equal layers of which few are traced."""
        self.subject, self.reading = subject, reading
        self.ranks = (None if reading is None else reading.graph.ranks) or subject.ranks
        self.whole_logits_bytes = whole_logits_bytes
        self.mode = compat.new_fake_mode()
        self.symbols: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.captured_update = subject.optimizer is not None and optimizers.supported(subject.optimizer) is None
        self.assumed: list[Assumed] = []
        self.facts: list[Assumed] = []
        self.holds: torch.Tensor | None = None
        self.go: torch.Tensor | None = None
        names = {id(p): n for n, p in subject.trained.items()}
        self.plans = optimizers.plan_updates(subject.optimizer, names) if self.captured_update else []  # type: ignore[arg-type]
        self.watch = None if run is None or reading is None else Watch(run, self._places(reading), reading.graph.paths)
        self.absent = Absent({})
        if self.watch is not None and subject.accumulate == 1 and not self.ranks.several:
            self.absent = self.watch.leave_out(self.plans, list(subject.trained))
        self.fakes: dict[Input, Any] = {}
        """None until `add_inputs` has the order: an input that the trace is made without."""
        for name, tensor in subject.parameters.items():
            there = name not in self.absent.twins
            fake = local_part(self.ranks, name, self.fake_of(tensor), self.mode) if there else None
            self.fakes[Input(Role.PARAMETER, name)] = fake
        for name, tensor in subject.buffers.items():
            self.fakes[Input(Role.BUFFER, name)] = self.fake_of(tensor)
        self._add_given(batch, dynamic)
        self.aux_names: tuple[Any, ...] = ()
        self.used: list[str] = []

    def _places(self, reading: Reading) -> dict[Any, Input]:
        nodes = [n for n in reading.graph.module.graph.nodes if n.op == "placeholder"]
        return {node: place for node, place in zip(nodes, reading.places) if place is not None}

    def _add_given(self, batch: Any, dynamic: Sequence[dict[int, str]] | None) -> None:
        """Inputs that a call brings: the batch, tensors around the model, numbers."""
        if self.reading is None:
            tensors, self.spec = flatten(batch)
            given = [(Input(Role.BATCH, name), tensor) for name, tensor in zip(self.spec.names, tensors, strict=True)]
        else:
            places = zip(self.reading.places, self.reading.args, strict=True)
            given = [(place, tensor) for place, tensor in places if place is not None and place not in self.fakes]
        leaf = 0
        for entry, tensor in given:
            dims: dict[int, str] = {}
            if entry.role is Role.BATCH:
                dims = dynamic[leaf] if dynamic else {}
                leaf += 1
            self.fakes[entry] = self._fake_given(tensor, dims)

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake that stands for a tensor; for one without data, on the device of the step."""
        if self.subject.dry is not None and (tensor.device.type == "meta" or compat.is_fake(tensor)):
            return compat.stand_in(self.mode, tensor, self.subject.device)
        return compat.to_fake(self.mode, tensor)

    def _fake_given(self, tensor: torch.Tensor, dims: dict[int, str]) -> torch.Tensor:
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
        """Parameters as fresh leaves."""
        trained = self.subject.trained
        parameters = [n for n in self.subject.parameters if n not in self.absent.twins]
        leaves = {n: values[Input(Role.PARAMETER, n)].detach().requires_grad_(n in trained) for n in parameters}
        for leaf in leaves.values():
            leaf._is_param = True  # for isinstance(leaf, nn.Parameter)
        return leaves

    def forward(self, values: dict[Input, torch.Tensor], sites: Sites) -> tuple[Forward, dict]:
        leaves = self._leaves(values)
        chunked = ChunkedLoss(self.subject.chunked_loss, self.whole_logits_bytes)
        if self.reading is None:
            tensors = leaves | {n: values[Input(Role.BUFFER, n)] for n in self.subject.buffers}
            given = {e.name: values[e] for e in self.fakes if e.role is Role.BATCH}
            held = {name: StorageWeakRef(value.untyped_storage()) for name, value in (tensors | given).items()}
            batch = unflatten(list(given.values()), self.spec)
            run = run_loss(self.subject, tensors, batch, sites, tracing=True, chunked=chunked)
            for name, value in (tensors | given).items():
                if StorageWeakRef(value.untyped_storage()) != held[name]:  # no operator that a trace would record
                    raise CaptureRefused(f"without guards, the loss gives {name} other memory (.data = ...)")
        else:
            run = self._replayed(self.reading, values, leaves, sites, chunked)
        run.losses = chunked.notes
        return run, leaves

    def _replayed(
        self, reading: Reading, values: dict[Input, torch.Tensor], leaves: dict, sites: Sites, chunked: ChunkedLoss
    ) -> Forward:
        places = [None if place is None else self.absent.twin(place) or place for place in reading.places]
        args = [
            None if place is None else leaves[place.name] if place.role is Role.PARAMETER else values[place]
            for place in places
        ]
        numbers = []
        for i, integer in enumerate(reading.graph.host.integer):
            number = values[Input(Role.HYPER, f"number{i}")][0]
            numbers.append(number.to(torch.int64) if integer else number)
        dry = (
            gpu_autocast()
            if self.subject.dry == "cuda" and self.subject.precision != "fp32"
            else contextlib.nullcontext()
        )
        with dry, keyed(sites, on_gpu=self.subject.target.is_gpu, chunked=chunked) as modes:
            if self.watch is not None:
                self.watch.sites = sites
            found = reading.graph.run(args, numbers, self.subject.device, self.watch)
        return Forward(
            found.loss,
            found.aux,
            found.outputs,
            found.kept,
            found.gradients,
            unrolled=modes.unrolled,
            assumed=found.assumed,
        )

    def step(self, values: dict[Input, torch.Tensor], sites: Sites) -> tuple[list[Any], list[Output]]:
        """Forward, backward, and the update or the accumulation; values and their meaning, side by side."""
        results: list[tuple[Any, Output]] = []
        with compat.annotate(phase="forward"):
            run, leaves = self.forward(values, sites)
            self._assume([*run.assumed, *(Assumed(holds, where) for holds, where in sites.assumed)])
        self.aux_names = tuple(run.aux)
        self._note_run(run)
        accumulate = self.subject.accumulate
        with compat.annotate(phase="backward"):
            objective = self._objective(run, accumulate)
            if SCALE in values:
                objective = objective * values[SCALE][0]
            grads = self._differentiate(objective, leaves, run.gradients)
        results.append((run.loss.detach(), Output(OutputKind.LOSS, "loss")))
        results += [(v.detach(), Output(OutputKind.AUX, str(n))) for n, v in run.aux.items()]
        results += [(v.detach(), Output(OutputKind.KEPT, n)) for n, v in run.kept.items()]
        if self.holds is not None:
            results.append((self.holds, Output(OutputKind.KEPT, HOLDS)))
        results += [(one.holds, Output(OutputKind.KEPT, f"{FACT}{i}")) for i, one in enumerate(self.facts)]
        with torch.no_grad():
            if accumulate > 1:
                results += self._accumulated(values, grads, run.aux)
            elif self.captured_update:
                with compat.annotate(phase="update"):
                    results += self.updated(values, grads)
            else:
                results += [(g, Output(OutputKind.GRADIENT, n)) for n, g in grads.items()]
        for name, tensor in run.reassigned.items():
            entry = Input(Role.BUFFER, name)
            if not _alike(tensor, values[entry]):
                raise CaptureRefused(
                    f"{entry} is replaced by a tensor of another shape or dtype, or of a size that only data tells"
                )
            results.append((tensor.detach(), self._update_of(entry)))
        # carried out as outputs only to learn their nodes; `assemble` takes them off again
        results += [(g, Output(OutputKind.KEPT, f"gradient/{n}")) for n, g in grads.items()]
        results += [(compat.as_recorded(t), Output(OutputKind.KEPT, f"boundary/{n}")) for n, t in run.outputs.items()]
        return [value for value, _ in results], [meaning for _, meaning in results]

    def _assume(self, assumed: list[Assumed]) -> None:
        """`holds`: of each assumption about data. `go`: the factor by which an update is left out where one does not hold.

        Facts about sizes end the step by themselves, before its update; what they return only keeps them in the graph.
        """
        self.holds = self.go = None
        self.facts = [one for one in assumed if one.fact is not None]
        self.assumed = [one for one in assumed if one.fact is None]
        if self.assumed:
            self.holds = torch.stack([one.holds.to(self.subject.device) for one in self.assumed])
            one = torch.ones((), dtype=torch.float32, device=self.subject.device)
            self.go = torch.where(self.holds.all(), one, multi_tensor.SKIP)

    def _note_run(self, run: Forward) -> None:
        if run.unrolled:
            unrolled = "a recurrent layer is unrolled over its time steps: the graph grows with the sequence"
            self.notes.append(Note("capture", unrolled))
        self.notes += run.losses
        if self.subject.chunked_loss and not run.losses:
            missing = "chunked_loss=True: no cross-entropy over the output of a linear layer was recognised"
            self.notes.append(Note("capture", missing))

    def _objective(self, run: Forward, accumulate: int) -> torch.Tensor:
        if accumulate == 1:
            return run.loss
        weight = run.aux.get("weight")
        return run.loss / accumulate if weight is None else run.loss * weight.detach().reshape(()).to(run.loss.dtype)

    def _differentiate(
        self, loss: torch.Tensor, leaves: dict[str, torch.Tensor], hooked: list[torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        if not loss.requires_grad:
            raise BadLoss(
                "the loss does not depend on any trained parameter",
                hint="check for .detach(), torch.no_grad() or a wrong optimizer in loss_fn",
            )
        trained = [n for n in self.subject.trained if n not in self.absent.twins]
        compat.number_backward(loss)
        grads = torch.autograd.grad(
            loss, [leaves[n] for n in trained], allow_unused=True, retain_graph=hooked is not None
        )
        if hooked is not None:  # hooks saw the gradients already; which parameters got one is torch's to say
            grads = tuple(None if g is None else h for g, h in zip(grads, hooked, strict=True))
        found = {n: g for n, g in zip(trained, grads, strict=True) if g is not None}
        if self.watch is not None:
            found = self.watch.add_gradients(found, list(self.subject.trained))
        for name, grad in found.items():
            if grad.layout is not torch.strided:
                raise CaptureRefused(f"the gradient of {name} is sparse")
        self.used = self.absent.with_absent(self.subject.trained, found)
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
                results.append((values[entry] + self._if_holds(grad), self._update_of(entry)))
            if "weight" in aux:
                entry = Input(Role.GRADIENT, ACCUMULATED_WEIGHT)
                if entry not in values:
                    raise WeightUnknown
                weight = aux["weight"].detach().reshape(()).to(torch.float32)
                results.append((values[entry] + self._if_holds(weight), self._update_of(entry)))
        return results

    def _if_holds(self, added: torch.Tensor) -> torch.Tensor:
        """Nothing is added up by a micro-batch for which an assumption does not hold."""
        return added if self.go is None else torch.where(self.go > 0, added, torch.zeros_like(added))

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
        if self.go is not None:
            scale = self.go if scale is None else torch.where(self.go > 0, scale, multi_tensor.SKIP)
        for plan in self.plans:
            members = [n for n in plan.names if n in grads]
            if not members:
                continue
            params = [values[Input(Role.PARAMETER, n)] for n in members]
            states = {k: [values[Input(Role.STATE, f"{n}/{k}")] for n in members] for k in plan.state_keys}
            hyper = values[Input(Role.HYPER, plan.hyper_name)]
            if SCALE in values and plan.update.counts_steps:
                hyper = loss_scale.counted(hyper, values[SCALE])
            new_params, new_states = optimizers.call_update(
                plan, params, [grads[n] for n in members], states, hyper, scale
            )
            self._note_lists(new_params[0], members, plan.names)
            for i, name in enumerate(members):
                results.append((new_params[i], self._update_of(Input(Role.PARAMETER, name))))
                for key in plan.state_keys:
                    results.append((new_states[key][i], self._update_of(Input(Role.STATE, f"{name}/{key}"))))
        return results

    def _clipped(
        self, values: dict[Input, torch.Tensor], grads: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the gradients, and what the update multiplies them by."""
        counted = grads | norms_of_parts(self.ranks, grads)
        order = self.parameter_order()
        members = [n for n in order if n in grads]
        limit = values.get(Input(Role.HYPER, "clip_norm"))
        given = torch.ones((), dtype=torch.float64, device=self.subject.device) if limit is None else limit
        norm, scale = ws.clip([counted[n] for n in members], given)
        self._note_lists(norm, members, order)
        if limit is None:  # finite gradients have a norm that is; the factor is not used
            scale = torch.ones_like(scale)
        if SCALE not in values:
            return norm, scale
        inverse = values[SCALE][0].reciprocal()  # a power of two: exact
        norm = norm * inverse
        if limit is not None:  # as clip_grad_norm_ on unscaled gradients
            scale = ((norm + 1e-6).reciprocal() * limit.to(norm.dtype)).clamp(max=1.0)
        return norm, scale * inverse

    def _note_lists(self, result: torch.Tensor, members: Sequence[str], names: Sequence[str]) -> None:
        """That the operator which gave `result` took lists of `members`, of the parameters `names`."""
        if self.absent.twins:
            operator = compat.recorded_node(result).args[0]
            self.absent.lists[operator] = Listed(members, self.absent.with_absent(names, set(members)))

    def parameter_order(self) -> list[str]:
        """The optimizer's order: a norm over gradients depends on it in the last bits."""
        assert self.subject.optimizer is not None
        names = {id(p): n for n, p in self.subject.trained.items()}
        members = (p for group in self.subject.optimizer.param_groups for p in group["params"])
        return [names[id(p)] for p in members if id(p) in names]

    # ---- inputs ----

    def add_inputs(self, num_sites: int) -> None:
        """Complete the input list; keys that no random site takes are dropped after tracing."""
        subject, device = self.subject, self.subject.device
        accumulating = subject.accumulate > 1
        with self.mode:
            if self.captured_update and not accumulating:
                self.add_update_inputs(device)
            if accumulating:
                if subject.loss_scale is not None:
                    self.fakes[SCALE] = torch.empty(len(loss_scale.KEYS), device=device)
                for name in subject.trained:
                    self.fakes[Input(Role.GRADIENT, name)] = torch.empty_like(self.fakes[Input(Role.PARAMETER, name)])
                if self._has_weight():
                    self.fakes[Input(Role.GRADIENT, ACCUMULATED_WEIGHT)] = torch.empty((), device=device)
            for number in range(len(self.reading.graph.host.integer) if self.reading else 0):
                self.fakes[Input(Role.HYPER, f"number{number}")] = torch.empty(1, dtype=torch.float64, device=device)
            for site in range(num_sites):
                self.fakes[Input(Role.KEY, f"site{site}")] = torch.empty((), dtype=torch.int64, device=device)
        self.order = list(self.fakes)
        self.place = {entry: i for i, entry in enumerate(self.order)}
        self.fakes = {entry: fake for entry, fake in self.fakes.items() if fake is not None}

    def fakes_of_all(self) -> list[torch.Tensor]:
        """Also of inputs that the trace was made without."""
        found = []
        for entry in self.order:
            twin = self.absent.twin(entry)
            fake = self.fakes[twin or entry]
            found.append(fake if twin is None else compat.stand_in(self.mode, fake, fake.device))
        return found

    def _has_weight(self) -> bool:
        if self.reading is None:  # as an earlier trace has told
            return "weight" in self.aux_names
        return "weight" in self.reading.graph.aux_names

    def add_update_inputs(self, device: torch.device) -> None:
        for plan in self.plans:
            # an accumulating step's update knows only the parameters that got a gradient
            for name in [n for n in plan.names if Input(Role.PARAMETER, n) in self.fakes]:
                parameter = self.fakes[Input(Role.PARAMETER, name)]
                for key in plan.state_keys:
                    assert self.subject.optimizer is not None
                    there = parameter is not None
                    fake = plan.update.new_state(self.subject.optimizer, key, parameter) if there else None
                    self.fakes[Input(Role.STATE, f"{name}/{key}")] = None if fake is None else fake.detach()
            size = optimizers.hyper_size(plan)
            self.fakes[Input(Role.HYPER, plan.hyper_name)] = torch.empty(size, dtype=torch.float64, device=device)
        if self.subject.clip_norm is not None:
            self.fakes[Input(Role.HYPER, "clip_norm")] = torch.empty((), dtype=torch.float64, device=device)
        if self.subject.loss_scale is not None:
            self.fakes[SCALE] = torch.empty(len(loss_scale.KEYS), device=device)
