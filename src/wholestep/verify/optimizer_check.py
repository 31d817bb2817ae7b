"""The update, checked on identical gradients: torch's own optimizer, from the same state, on our gradients.

Parameters after Adam are no measure of a gradient (a true-zero gradient moves a parameter by lr in a random
direction), so gradients are compared by themselves, and the update here. On the CPU backend `interpret` runs torch's
own update code: bit for bit. Elsewhere a fused kernel rounds in another order: 1e-5 of the size of the update, and
one rounding of the result. The norm that clipping divides by is one more sum, over all gradients; torch's own rounding of it is
measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from wholestep.capture.subject import Subject
from wholestep.ops.multi_tensor import matching
from wholestep.verify.compare import MISSING, Comparison, distance, norm, same_bits, total_norm
from wholestep.verify.report import TensorRow
from wholestep.verify.state import StateCopy

UPDATE_TOLERANCE = 1e-5
"""Relative to the size of the update: float32 arithmetic of about ten operations, with room."""

CLIP_ROUNDINGS = 4
"""Times the rounding of torch's norm of all gradients: ours may round as far the other way, and second moments have it twice."""


def optimizer_rows(
    subject: Subject,
    before: StateCopy,
    starts: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    step: str,
    *,
    exact: bool,
) -> Iterator[TensorRow]:
    """One row per parameter, of which an update `starts`, and per state tensor; `exact` asks for equal bits."""
    assert subject.optimizer is not None and before.optimizer is not None
    stand_ins = {p: starts[n].detach().clone() for n, p in subject.parameters.items()}
    for name, gradient in gradients.items():
        stand_ins[subject.parameters[name]].grad = gradient.detach().clone()
    twin = before.optimizer.twin(stand_ins)
    skips = subject.nonfinite == "skip" and not all(bool(g.isfinite().all()) for g in gradients.values())
    allowed = 0.0 if exact else UPDATE_TOLERANCE
    if subject.clip_norm is not None and not skips:
        in_order = [p for group in twin.param_groups for p in group["params"]]
        total = torch.nn.utils.clip_grad_norm_(in_order, subject.clip_norm)
        allowed += 0.0 if exact else CLIP_ROUNDINGS * _rounding_of_norm(float(total), gradients)
    if not skips:
        for stand_in in stand_ins.values():  # autograd leaves a gradient in the memory order of its parameter
            stand_in.grad = None if stand_in.grad is None else matching(stand_in.grad, stand_in)
        twin.step()
    names = {p: n for n, p in subject.parameters.items()}
    olds = {p: values for p, _, _, values in before.optimizer.state}
    for group in subject.optimizer.param_groups:
        for parameter in group["params"]:
            name, stand_in = names[parameter], stand_ins[parameter]
            found = _compare(parameter, stand_in, starts[name], allowed)
            yield TensorRow(step, "parameter", name, found.error, found.tolerance, found.bitwise)
            ours, theirs = subject.optimizer.state.get(parameter, {}), twin.state.get(stand_in, {})
            for key in dict.fromkeys([*theirs, *ours]):
                if skips and (key == "step" or key not in theirs):
                    continue  # a step that is left out is counted on the host, and its state is made, at zero
                old = olds.get(parameter, {}).get(key)
                a, b = ours.get(key), theirs.get(key)
                if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
                    found = _compare(a, b, old, allowed)
                    yield TensorRow(step, "state", f"{name}/{key}", found.error, found.tolerance, found.bitwise)


def _rounding_of_norm(total: float, gradients: Mapping[str, torch.Tensor]) -> float:
    """How far torch's norm is from that in float64, relative to it: on a CPU 4e-5 for some 100,000 elements."""
    truth = total_norm(gradients)
    return abs(total - truth) / truth if truth and math.isfinite(truth) and math.isfinite(total) else 0.0


def _compare(
    ours: torch.Tensor | None, theirs: torch.Tensor | None, old: torch.Tensor | None, allowed: float
) -> Comparison:
    """`allowed`: how far it may be off, relative to the size of the update; at 0 not by one bit."""
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor) or ours.shape != theirs.shape:
        return MISSING
    ours, theirs = ours.detach(), theirs.detach()
    bitwise = same_bits(ours, theirs)
    if not theirs.is_floating_point():
        return Comparison(float((ours != theirs.to(ours.device)).sum()), 0.0, bitwise)
    theirs = theirs.to(ours.device)
    error = distance(ours, theirs, theirs.isfinite())
    update = norm(theirs) if old is None else distance(theirs, old.to(theirs.device), theirs.isfinite())
    rounding = torch.finfo(theirs.dtype).eps * norm(theirs)
    return Comparison(error, allowed * update + rounding if allowed else 0.0, bitwise)
