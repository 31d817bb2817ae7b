"""The rules of equality: when two tensors count as the same training, and why.

`Yardstick.compare` is the rule of a verification, against a float64 reference, per tensor and in norms:

    ||ours - f64||  <=  2 ||eager - f64||  +  4 eps (||f64|| + floor)

Eager's own rounding error is the measure: a rewritten step may be off by as much again. `eps` is that of the dtype
the step computes in. `floor` is the root mean square of all gradients times sqrt(numel): a gradient that is truly
zero (the key bias of an attention layer) is pure rounding noise in eager as well, and its size comes from the other
gradients, not from its own. For losses, statistics and aux the floor is the scale of the activations in the same way.
On a tensor of few elements eager's error is a sample of few, and may be small by luck; there it is taken to be at
least eager's relative error over all gradients.

Where a model cannot run in float64, eager is its own reference with  4 eps sqrt(operations) (||eager|| + floor) :
independent roundings add up like a random walk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import torch

from wholestep.graph.training_graph import TrainingGraph, tensors_in

FEW = 64
"""Elements below which eager's error on one tensor says little."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How far two values are apart, and how far they may be."""

    error: float
    tolerance: float
    bitwise: bool

    @property
    def ok(self) -> bool:
        return self.bitwise or self.error <= self.tolerance


ELEMENTS_AT_ONCE = 1 << 24
"""Of a tensor that is compared in float64: 128 MiB."""
MISSING = Comparison(math.inf, 0.0, False)
"""One side has no such value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Yardstick:
    """What the rule needs to know about a whole step."""

    eps: float
    gradient_rms: float
    activation_rms: float
    relative_error: float
    """Eager's error over all gradients, relative to their norm; 0 without a float64 reference."""
    operations: int

    def compare(
        self,
        ours: torch.Tensor | None,
        eager: torch.Tensor | None,
        exact: torch.Tensor | None,
        *,
        gradient: bool = False,
        slack: float = 1.0,
    ) -> Comparison:
        """The rule for one tensor; `exact` is the float64 value, or None when there is none."""
        if ours is None or eager is None or ours.shape != eager.shape:
            return MISSING
        bitwise = same_bits(ours, eager)
        if not eager.is_floating_point():
            truth = eager if exact is None else exact.to(eager.dtype)
            return Comparison(float((ours != truth).sum()), 2.0 * float((eager != truth).sum()) * slack, bitwise)
        if not torch.equal(ours.isfinite(), eager.isfinite()):
            return Comparison(math.inf, 0.0, False)
        usable = eager.isfinite() if exact is None else eager.isfinite() & exact.isfinite()
        numel = max(1, eager.numel())
        floor = (self.gradient_rms if gradient else self.activation_rms) * math.sqrt(numel)
        if exact is None:
            size = _norm(eager, usable)
            tolerance = 4 * self.eps * math.sqrt(max(1, self.operations)) * (size + floor)
            return Comparison(distance(ours, eager, usable), tolerance * slack, bitwise)
        size, eager_error = _norm(exact, usable), distance(eager, exact, usable)
        if numel <= FEW:
            eager_error = max(eager_error, self.relative_error * size)
        tolerance = 2 * eager_error + 4 * self.eps * (size + floor)
        return Comparison(distance(ours, exact, usable), tolerance * slack, bitwise)


def yardstick(
    graph: TrainingGraph,
    eager: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor] | None,
    activation_rms: float,
    dtype: torch.dtype,
) -> Yardstick:
    """From the gradients of one step; `dtype` is the coarsest that computes."""
    truth = eager if exact is None else exact
    relative = 0.0
    if exact is not None:
        errors = [distance(eager[n], exact[n]) for n in eager if n in exact]
        relative = math.hypot(*errors) / max(total_norm(exact), 1e-300)
    return Yardstick(
        torch.finfo(dtype).eps, gradient_rms(truth), activation_rms, relative if math.isfinite(relative) else 0.0,
        sum(1 for _ in graph.operations()),
    )  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and values; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(a, b) or (a.is_floating_point() and ((a == b) | (a.isnan() & b.isnan())).all()))


def distance(a: torch.Tensor, b: torch.Tensor, usable: torch.Tensor | None = None) -> float:
    """||a - b|| in float64, over the elements that are `usable`."""
    shares = []
    for one, other, *keep in parts(a.detach(), b.detach(), *(() if usable is None else (usable,))):
        shares.append(_norm(one.double() - other.double(), *keep))
    return math.hypot(*shares)


def parts(*tensors: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Tensors of one shape, a part of all of them at a time: in float64 a large one would take twice or more of what it takes."""
    first = tensors[0]
    if first.numel() <= ELEMENTS_AT_ONCE or any(t.shape != first.shape for t in tensors):
        yield list(tensors)
        return
    dim = max(range(first.dim()), key=first.size)
    size = max(1, ELEMENTS_AT_ONCE * first.size(dim) // first.numel())
    yield from map(list, zip(*(t.split(size, dim) for t in tensors), strict=True))


def _norm(value: torch.Tensor, usable: torch.Tensor | None = None) -> float:
    value = value.detach().double()
    if usable is not None:
        value = torch.where(usable, value, 0.0)
    return float(torch.linalg.vector_norm(value))


def norm(value: torch.Tensor, device: torch.device | None = None) -> float:
    """||value|| over its finite elements, in float64; on a device, part by part."""
    near = (part.to(device or part.device) for (part,) in parts(value.detach()))
    return math.hypot(*(_norm(part, part.isfinite()) for part in near))


def total_norm(values: Mapping[str, torch.Tensor]) -> float:
    return math.hypot(*(norm(v) for v in values.values())) if values else 0.0


def gradient_rms(gradients: Mapping[str, torch.Tensor]) -> float:
    """Root mean square over all elements of all gradients."""
    found = [(norm(g), g.numel()) for g in gradients.values()]
    count = sum(numel for _, numel in found)
    return math.hypot(*(size for size, _ in found)) / math.sqrt(count) if count else 0.0


def compute_dtype(graph: TrainingGraph) -> torch.dtype:
    """The coarsest floating dtype anything in the graph has: bf16 under autocast, whoever entered it."""
    found = {t.dtype for node in graph.operations() for t in tensors_in(node.meta.get("val"))}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype in found:
            return dtype
    return torch.float64
