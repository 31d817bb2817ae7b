"""Within rounding of eager PyTorch? What a replayed training computed in, what is further from float64 than that out.

The rule is that of `wholestep.verify`, with more room: among ten thousand graphs its far tail is met too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tests.fuzz.program import SEED, UPDATES, Case, loss_fn
from torch import fx
from torch.utils._pytree import tree_map

from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture
from wholestep.graph.training_graph import Input, Role, TrainingGraph, phase_of
from wholestep.graph.views import shares_memory
from wholestep.ops.flops import flops
from wholestep.verify.compare import compute_dtype, distance, yardstick
from wholestep.verify.reference import Reference, float64_reference, reference_gradients, written_parameters

if TYPE_CHECKING:
    from tests.fuzz.check import Recording, Values

SLACK = 8.0
"""Times what `verify` allows; a fault is larger than that."""
SHAKES, SHAKEN = 8, 4.0
"""What is further off is compared with what the captured graph itself makes of roundings, drawn so often (`shaken`): values that
cancel, or that are normalised though they hardly differ, leave as much. A result may be off by so many times the most of that."""


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
        before = state_before(recording, place)
        held = {e.name: value for e, value in before.items() if e.role in (Role.PARAMETER, Role.BUFFER)}
        at = (subject, next(batches), SEED, number // count, number % count)
        if place not in recording.references:
            recording.references[place] = _references(recording.capture, at, held)
        spread = functools.partial(shaken, recording, place)
        found = _call_beyond_rounding(recording.capture, *recording.references[place], results[place], spread)
        if found is None and count == 1:
            written = recording.references[place][0].written
            found = _update_apart(case, model, optimizer, recording.results[place], results[place], written)
        if found is not None:
            return f"update {number // count}: {found}"
    return None


def _references(capture: Capture, at: tuple, held: dict[str, torch.Tensor]) -> tuple[Reference, Reference | None]:
    """Eager PyTorch's, and float64's."""
    written = written_parameters(capture.graph)
    options: Any = dict(num_sites=capture.num_sites, constants=capture.constants, tensors=held, written=written)
    eager, exact = reference_gradients(*at, **options), float64_reference(*at, **options)
    if isinstance(exact, str) or float((eager.loss - exact.loss).abs()) > 1e-2 * (1 + float(exact.loss.abs())):
        return eager, None  # no float64 form, or one that takes another path
    return eager, exact


def _call_beyond_rounding(
    capture: Capture,
    eager: Reference,
    exact: Reference | None,
    result: Values,
    spread: Callable[[], Shaken],
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
                if distance(result[name], value) <= SHAKEN * spread().most(name):
                    continue
                return f"{name} is off by {told.error:.3g} (allowed {told.tolerance:.3g})"
    return None


# ---- what roundings do ----


def state_before(recording: Recording, place: int) -> dict[Input, torch.Tensor]:
    """What the recorded training had before that call."""
    return recording.start if place == 0 else {e: recording.results[place - 1][str(e)] for e in recording.start}


@dataclasses.dataclass(frozen=True)
class Shaken:
    """What a graph computes, and what it computes where every result is off by a rounding."""

    plain: Values
    others: list[Values]

    def most(self, name: str) -> float:
        """How far one of the others is from it."""
        others = [other[name] for other in self.others if name in other]
        return max((distance(other, self.plain[name]) for other in others), default=0.0) if name in self.plain else 0.0


def shaken(recording: Recording, place: int) -> Shaken:
    """One call of the captured graph, from the recorded state."""
    if place not in recording.shaken:
        graph = recording.capture.graph
        values = state_before(recording, place) | recording.calls[place].fresh
        inputs = [values[entry] for entry in graph.inputs]
        sources = [None, *(torch.Generator().manual_seed(SEED + number) for number in range(SHAKES))]
        found = [_Shaking(graph, source).values(inputs) for source in sources]
        recording.shaken[place] = Shaken(found[0], found[1:])
    return recording.shaken[place]


class _Shaking(fx.Interpreter):
    """Runs a graph; with a source, all that is given and all that is computed is off by a rounding of its dtype."""

    def __init__(self, graph: TrainingGraph, source: torch.Generator | None) -> None:
        super().__init__(graph.module, garbage_collect_values=False)
        self.training, self.source = graph, source
        given = (Role.PARAMETER, Role.BUFFER, Role.BATCH)
        pairs = zip(graph.placeholders, graph.inputs, strict=True)
        self.given = {node for node, entry in pairs if entry.role in given}

    def values(self, inputs: list[torch.Tensor]) -> Values:
        graph = self.training
        found: Values = {}
        try:
            results = self.run(*inputs)
        except RuntimeError:  # of a loss that takes nothing above one
            if self.source is None:
                raise
            return found
        for entry, value in zip(graph.outputs, results, strict=True):
            if isinstance(value, torch.Tensor):
                name = f"{entry.kind.value} {entry.name}" if entry.target is None else str(graph.inputs[entry.target])
                found[name] = value
        nodes = {node.name: node for node in self.training.graph.nodes}
        return found | {f"gradient of {name}": self.env[nodes[node]] for name, node in graph.gradients.items()}

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if self.source is None or not (node in self.given or (node.op == "call_function" and _rounds(node))):
            return value
        return tree_map(self._shaken, value)

    def _shaken(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        sides = torch.rand(value.shape, generator=self.source, dtype=torch.float64) * 2 - 1
        moved = value.clone().copy_(value.double() * (1 + torch.finfo(value.dtype).eps * sides))
        return moved if moved.stride() == value.stride() else value  # as it lies in memory may be read


def _rounds(node: fx.Node) -> bool:
    """Whether it computes; what only moves values does not, and casts of numbers that have roundings do."""
    if shares_memory(node.target) or phase_of(node) == "update":
        return False
    if node.target is torch.ops.aten._to_copy.default:
        return node.args[0].meta["val"].is_floating_point()
    return flops(node).kind != "movement"


def _update_apart(
    case: Case, model: Any, optimizer: Any, recorded: Values, result: Values, written: dict[str, torch.Tensor]
) -> str | None:
    """Whether parameters are not what torch's optimizer makes of these gradients; both then move on as recorded."""
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    for which, (net, own), values in ((0, (twin, its_optimizer), result), (1, (model, optimizer), recorded)):
        for name, parameter in net.named_parameters():
            gradient = values.get(f"gradient of {name}")
            parameter.grad = None if gradient is None else gradient.clone().to(parameter.dtype)
            if name in written:  # by the loss
                parameter.detach().copy_(written[name])
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
