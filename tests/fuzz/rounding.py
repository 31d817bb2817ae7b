"""Within rounding of eager PyTorch? What a replayed training computed in, what is further from float64 than that out.

The rule is that of `wholestep.verify`, with more room: among ten thousand graphs its far tail is met too.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch
from tests.fuzz.program import SEED, UPDATES, Case, loss_fn

from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture
from wholestep.graph.training_graph import Role
from wholestep.verify.compare import compute_dtype, yardstick
from wholestep.verify.reference import Reference, float64_reference, reference_gradients

if TYPE_CHECKING:
    from tests.fuzz.check import Recording, Values

SLACK = 8.0
"""Times what `verify` allows; a fault is larger than that."""
SHAKES, SHAKEN = 8, 4.0
"""What is further off is compared with what eager itself makes of parameters that are off by a rounding, so often drawn: two values
that are normalised, or terms that cancel, leave as much. A result may be off by so many times the most of that."""


def beyond_rounding(case: Case, recording: Recording, results: list[Values]) -> str | None:
    """What is further from float64 than eager PyTorch's own rounding explains, in words; None when nothing is.

    Every call is compared by itself, from the recorded state before it. The update must be what torch's optimizer makes of the
    gradients that were found.
    """
    model, optimizer = case.build()
    subject = make_subject(model, loss_fn, optimizer, **case.step)
    count = subject.accumulate
    batches = iter(case.batches(UPDATES * count))
    number = -1
    for place, call in enumerate(recording.calls):
        if call.is_update:
            continue
        number += 1
        before = recording.start if place == 0 else {e: recording.results[place - 1][str(e)] for e in recording.start}
        held = {e.name: value for e, value in before.items() if e.role in (Role.PARAMETER, Role.BUFFER)}
        at = (subject, next(batches), SEED, number // count, number % count)
        if place not in recording.references:
            recording.references[place] = _references(recording.capture, at, held)
        found = _call_beyond_rounding(recording.capture, *recording.references[place], results[place], at, held)
        if found is None and count == 1:
            found = _update_apart(case, model, optimizer, recording.results[place], results[place])
        if found is not None:
            return f"update {number // count}: {found}"
    return None


def _references(capture: Capture, at: tuple, held: dict[str, torch.Tensor]) -> tuple[Reference, Reference | None]:
    """Eager PyTorch's, and float64's."""
    options: Any = dict(num_sites=capture.num_sites, constants=capture.constants, tensors=held)
    eager, exact = reference_gradients(*at, **options), float64_reference(*at, **options)
    if isinstance(exact, str) or float((eager.loss - exact.loss).abs()) > 1e-2 * (1 + float(exact.loss.abs())):
        return eager, None  # no float64 form, or one that takes another path
    return eager, exact


def _shaken(capture: Capture, at: tuple, held: dict[str, torch.Tensor]) -> list[Reference]:
    """Eager PyTorch from parameters that are off by a rounding."""
    source = torch.Generator().manual_seed(SEED)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        sides = torch.rand(tensor.shape, generator=source) * 2 - 1
        return (tensor.double() * (1 + torch.finfo(tensor.dtype).eps * sides)).to(tensor.dtype)

    options: Any = dict(num_sites=capture.num_sites, constants=capture.constants)
    draws = [{name: moved(tensor) for name, tensor in held.items()} for _ in range(SHAKES)]
    return [reference_gradients(*at, tensors=each, **options) for each in draws]


def _call_beyond_rounding(
    capture: Capture,
    eager: Reference,
    exact: Reference | None,
    result: Values,
    at: tuple,
    held: dict[str, torch.Tensor],
) -> str | None:
    truth = None if exact is None else exact.gradients
    rms = eager.activation_rms if exact is None else exact.activation_rms
    rule = yardstick(capture.graph, eager.gradients, truth, rms, compute_dtype(capture.graph))

    def rows(reference: Any) -> Values:
        found = {"loss loss": reference.loss, **{f"aux {name}": value for name, value in reference.aux.items()}}
        found |= {f"gradient of {name}": value for name, value in reference.gradients.items()}
        return found | {f"buffer:{name}": value for name, value in reference.buffers.items()}

    known = {} if exact is None else rows(exact)
    for name, value in rows(eager).items():
        if name in result and isinstance(value, torch.Tensor):
            told = rule.compare(result[name], value, known.get(name), gradient=name.startswith("gradient"), slack=SLACK)
            noise = SLACK * rule.eps * math.sqrt(value.numel())  # of terms of size one that cancel, in every gradient
            if not told.ok and not told.error < noise:
                others = [rows(each)[name] for each in _shaken(capture, at, held)]
                apart = [rule.compare(other, value, known.get(name), gradient=False).error for other in others]
                if told.error <= SHAKEN * max(apart):
                    continue
                return f"{name} is off by {told.error:.3g} (allowed {told.tolerance:.3g})"
    return None


def _update_apart(case: Case, model: Any, optimizer: Any, recorded: Values, result: Values) -> str | None:
    """Whether parameters are not what torch's optimizer makes of these gradients; both then move on as recorded."""
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    for which, (net, own), values in ((0, (twin, its_optimizer), result), (1, (model, optimizer), recorded)):
        for name, parameter in net.named_parameters():
            gradient = values.get(f"gradient of {name}")
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.dtype)
        if case.step.get("clip_norm") is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), case.step["clip_norm"])
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        if case.step.get("nonfinite") != "skip" or norm.isfinite():  # a norm may overflow where no gradient does
            own.step()
        for name, parameter in net.named_parameters():
            new = values.get(f"parameter:{name}")
            if new is None or which == 1:
                continue
            room = 1e-5 if parameter.dtype in (torch.float32, torch.float64) else 0.02
            if not torch.allclose(new.double(), parameter.detach().double(), rtol=room, atol=room, equal_nan=True):
                return f"parameter:{name} is not what the optimizer makes of its gradient"
    return None
