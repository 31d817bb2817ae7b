"""The reference: eager PyTorch on the same tensors, batch and random keys as one micro-step, touching nothing live.

In go the subject, a batch and (seed, step, micro-batch); out comes a `Reference`: loss, aux, gradients by parameter,
buffers after the forward, module outputs. It runs the user's own code under the modes of `capture.modes`, so dropout
and random numbers draw the bits the captured step draws. With `dtype=torch.float64` everything floating is converted
first and autocast is off: that is the yardstick for rounding (keyed masks and draws do not depend on the dtype).

`live_reference` is the same on the live model, as the first step of a variant needs it: what the user's Python does
beside the computation happens for real, once, and only what was written to tensors is undone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wholestep.capture.batch import flatten, unflatten
from wholestep.capture.forward import run_loss
from wholestep.capture.preflight import set_aside
from wholestep.capture.sites import Sites
from wholestep.capture.subject import Subject
from wholestep.capture.undo import Undo
from wholestep.errors import BadBatch, BadLoss, WholestepError, one_line
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.ops import IN_PLACE
from wholestep.ops.wide import wide_dtype
from wholestep.runtime.random import keys_for, seeded_generator
from wholestep.verify.compare import parts
from wholestep.verify.host import Saved, gradients_to_host

SPARE_KEYS = 256
"""So that a forward which draws more often than the captured one runs to its end, and can be told from it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """What eager PyTorch computes in one micro-step; every tensor is detached and shares nothing with live state."""

    loss: torch.Tensor
    aux: dict[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    """Of the micro-step's objective: with accumulation the loss over the count, or times aux["weight"]."""
    buffers: dict[str, torch.Tensor]
    """All buffers after the forward."""
    module_outputs: dict[str, torch.Tensor]
    """Module path (`path#2` at its second call) -> first output, in order of completion; empty unless asked for."""
    draws: int
    """Random numbers asked for: the captured step must have as many sites."""
    activation_rms: float
    """Median over modules of the root mean square of their outputs: the scale of what losses are made of."""
    moved_bytes: int = 0
    """Saved tensors that waited on the host."""
    written: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The parameters that the loss itself writes to, after the forward."""


def written_parameters(graph: TrainingGraph) -> tuple[str, ...]:
    """Those that the loss itself writes to, as `nn.Embedding(max_norm=...)` does: what their update starts from is no input."""
    found = []
    for entry, value in zip(graph.outputs, graph.output_values, strict=True):
        if entry.target is not None and graph.inputs[entry.target].role is Role.PARAMETER:
            start = value
            if value.target is operator.getitem and value.args[0].target in IN_PLACE:
                start = value.args[0].args[0][value.args[1]]
            if start is not graph.placeholders[entry.target]:
                found.append(graph.inputs[entry.target].name)
    return tuple(found)


def reference_gradients(
    subject: Subject,
    batch: Any,
    seed: int,
    step: int,
    micro: int,
    *,
    num_sites: int,
    tensors: Mapping[str, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    constants: Sequence[torch.Tensor] = (),
    written: Sequence[str] = (),
    keep_outputs: bool = False,
    room: int | None = None,
) -> Reference:
    """Loss and gradients in eager PyTorch.

    `tensors` replaces live parameters and buffers by name (buffers after the previous micro-batch, for example);
    `constants` are closure tensors to put back, should the forward write to them; `written` names parameters that it does write
    to. With `room`, saved tensors beyond so many
    bytes and all gradients wait on the host.
    """
    given = dict(tensors or {})
    if dtype is not None:
        subject = dataclasses.replace(subject, precision="fp32")
    leaves = _leaves(subject, given, dtype, written)
    buffers = {n: _copied(given.get(n, b).to(b.device), dtype) for n, b in subject.buffers.items()}
    copied = own_batch(batch, dtype)
    sites = Sites(list(keys_for(seed, step, micro, num_sites + SPARE_KEYS).to(subject.device).unbind()))
    saved = None if room is None else Saved(room, {**leaves, **buffers})
    with (
        _untouched(subject, constants),
        seeded_generator(subject.device, seed, step, micro),
        saved or contextlib.nullcontext(),
    ):
        run = run_loss(subject, {**leaves, **buffers}, copied, sites, noted=None if keep_outputs else _rms)
        outputs = {n: t.detach() for n, t in run.outputs.items()} if keep_outputs else {}
        rms = _median_rms(map(_rms, outputs.values()) if keep_outputs else run.outputs.values())
        run.outputs.clear()  # kept alive any longer they would hold every activation through the backward
        objective = _objective(subject, run.loss, run.aux)
        scale = (
            None
            if dtype is not None or subject.loss_scale is None
            else subject.loss_scale.on(subject.device)[0].clone()
        )
        gradients = _differentiate(subject, objective, leaves, scale, on_host=room is not None)
    after = buffers | run.reassigned
    return Reference(
        run.loss.detach(),
        {n: v.detach() for n, v in run.aux.items()},
        gradients,
        {n: t.detach() for n, t in after.items()},
        outputs,
        sites.used,
        rms,
        0 if saved is None else saved.moved_bytes,
        {n: leaves[n].detach() for n in written},
    )


def live_reference(
    subject: Subject, batch: Any, seed: int, step: int, micro: int, *, num_sites: int, touched: Sequence[torch.Tensor] = (),
    written: Sequence[str] = (), room: int | None = None,
) -> Reference:  # fmt: skip
    """Loss and gradients of the live model; `touched` are tensors, beside buffers, that the step writes, `written` parameters.

    Those, and the buffers, are as before when it returns; Python state is as the user's code leaves it. Where that raises,
    they are as it leaves them, as in eager PyTorch. `room` as above.
    """
    put_back = True
    sites = Sites(list(keys_for(seed, step, micro, num_sites + SPARE_KEYS).to(subject.device).unbind()))
    held: dict[str, torch.Tensor] = dict(subject.buffers)
    own = {n: subject.parameters[n] for n in written}
    kept = [(t, t.detach().clone()) for t in (*held.values(), *touched, *own.values())]
    trained = subject.trained
    saved = None if room is None else Saved(room, {**subject.parameters, **held})
    generator = seeded_generator(subject.device, seed, step, micro)
    try:
        with torch.enable_grad(), set_aside(subject), generator, saved or contextlib.nullcontext():
            run = run_loss(subject, None, batch, sites, noted=_rms)
            rms = _median_rms(run.outputs.values())
            objective = _objective(subject, run.loss, run.aux)
            scale = None if subject.loss_scale is None else subject.loss_scale.on(subject.device)[0].clone()
            gradients = _differentiate(subject, objective, trained, scale, on_host=room is not None)
        # one that was replaced is Python's to hold, not the step's to write
        now: dict[str, torch.Tensor] = dict(subject.root.named_buffers())
        buffers = {n: b.detach().clone() for n, b in held.items() if n in now and now[n] is b}
        after = {n: p.detach().clone() for n, p in own.items()}
    except Exception as error:
        ours = isinstance(error, torch.OutOfMemoryError | NotImplementedError | WholestepError)
        put_back = ours or room is not None  # which is tried again
        raise
    finally:
        with torch.no_grad():
            for tensor, value in kept if put_back else ():
                tensor.detach().copy_(value)
    aux = {n: v.detach() for n, v in run.aux.items()}
    moved = 0 if saved is None else saved.moved_bytes
    return Reference(run.loss.detach(), aux, gradients, buffers, {}, sites.used, rms, moved, after)


def own_batch(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """The batch with tensors of its own; a structure that only the user's code knows is copied as a whole."""
    try:
        flat, spec = flatten(batch)
    except BadBatch:
        return copy.deepcopy(batch)
    return unflatten([_copied(t, dtype).requires_grad_(t.requires_grad) for t in flat], spec)


def nudged(tensors: Mapping[str, torch.Tensor], eps: float, seed: int) -> dict[str, torch.Tensor]:
    """The same to rounding: elements moved by at most half of `eps`, relatively. What is computed from them is as right."""
    draw = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        share = torch.rand(tensor.shape, generator=draw).sub_(0.5).mul_(eps).to(tensor.device)
        found[name] = torch.addcmul(tensor.detach(), tensor.detach(), share.to(tensor.dtype))
    return found


def float64_reference(subject: Subject, batch: Any, *args: Any, **options: Any) -> Reference | str:
    """The same in float64; where the model cannot run so, the reason in words.

    Code that makes tensors of the default dtype (`torch.zeros(n)`) mixes dtypes at first, so a second attempt changes
    it.
    """
    reason = ""
    kept = torch.get_default_dtype()
    for default in (kept, torch.float64):
        torch.set_default_dtype(default)
        try:
            return reference_gradients(subject, batch, *args, dtype=torch.float64, **options)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            reason = reason or one_line(error)
        finally:
            torch.set_default_dtype(kept)
    return reason


def _leaves(
    subject: Subject, given: Mapping[str, torch.Tensor], dtype: torch.dtype | None, written: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Parameters as fresh leaves, sharing storage where the dtype stays and nothing writes, with the user's tensor hooks."""
    trained = subject.trained
    leaves = {}
    for name, parameter in subject.parameters.items():
        value = given.get(name, parameter).detach().to(parameter.device)
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        if name in written:
            value = value.clone()
        leaf = nn.Parameter(value.detach(), name in trained)  # as the loss may ask
        if name in trained:
            for hook in (parameter._backward_hooks or {}).values():
                leaf.register_hook(hook)
        leaves[name] = leaf
    return leaves


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(wanted, copy=True)


def _objective(subject: Subject, loss: torch.Tensor, aux: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What the captured micro-step differentiates."""
    if subject.accumulate == 1:
        return loss
    weight = aux.get("weight")
    return loss / subject.accumulate if weight is None else loss * weight.detach().reshape(()).to(loss.dtype)


def _differentiate(
    subject: Subject,
    objective: torch.Tensor,
    leaves: Mapping[str, torch.Tensor],
    scale: torch.Tensor | None,
    *,
    on_host: bool,
) -> Mapping[str, torch.Tensor]:
    """Gradients by name; with a loss scale of what it scales, and divided by it again."""
    if not objective.requires_grad:
        raise BadLoss("the loss does not depend on any trained parameter")
    scaled = objective if scale is None else objective * scale
    trained = {n: leaves[n] for n in subject.trained}
    if on_host:
        return gradients_to_host(scaled, trained, scale, subject.device)
    found = torch.autograd.grad(scaled, list(trained.values()), allow_unused=True)
    pairs = [(n, g.detach()) for n, g in zip(trained, found, strict=True) if g is not None]
    return {n: g if scale is None else g / scale for n, g in pairs}


@contextlib.contextmanager
def _untouched(subject: Subject, constants: Sequence[torch.Tensor]) -> Iterator[None]:
    """The user's code runs as it did for the trace; what it writes on modules and closure tensors is undone."""
    undo = Undo(subject.loss_fn, subject.model)
    kept = [c.detach().clone() for c in constants]
    try:
        with torch.enable_grad(), set_aside(subject):
            yield
    finally:
        undo.restore()
        for live, value in zip(constants, kept, strict=True):
            live.data.copy_(value)


def _rms(output: torch.Tensor) -> torch.Tensor:
    """The root mean square of a module's output, noted in place of the output, which may go."""
    value = output.detach()
    if not value.is_floating_point() or not value.numel():
        return torch.full((), float("nan"), device=value.device)
    wide = wide_dtype(value.dtype)
    norms = [torch.linalg.vector_norm(part, dtype=wide) for (part,) in parts(value)]  # autocast would copy a whole one
    return (torch.linalg.vector_norm(torch.stack(norms)) / value.numel() ** 0.5).float()


def _median_rms(scales: Iterable[torch.Tensor]) -> float:
    """The median is not moved by a mask of -1e9 among the outputs."""
    finite = sorted(s for s in map(float, scales) if 0 <= s < float("inf"))
    return finite[len(finite) // 2] if finite else 0.0
