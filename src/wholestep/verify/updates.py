"""Was a parameter updated with the gradient that eager PyTorch has? Told by a tensor in which the gradient shows.

    Adam      m' = b1 m + (1 - b1) g               momentum   b' = mu b + (1 - d) g
    plain SGD p' = p - lr g                        Adagrad    p' = p - lr g / (sqrt(s') + eps),  s' = s + g^2

In: a rule of an update (`wholestep.ops.updates`), what it wrote and what was there before, the gradient. Out: how far the tensor is
from what the gradient makes of it, and how far rounding could bring it. Copies may be on the host; a part of them is on the device
at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from wholestep.capture.optimizers import UpdatePlan
from wholestep.graph.training_graph import Input, Role
from wholestep.ops.updates import Rule
from wholestep.verify.compare import distance, norm, parts

Kept = Mapping[Input, tuple[torch.Tensor, torch.Tensor]]
"""Input -> (live tensor, its value before the step)."""


def rules_of(plan: UpdatePlan, numbers: Sequence[float]) -> Sequence[Rule]:
    """Where the gradient shows in what an update writes, the best place first."""
    named = dict(zip(plan.update.numbers, numbers, strict=True))
    return plan.update.rules(plan.state_keys, dict(plan.flags), named)


def place_of(key: str | None, name: str) -> Input:
    """The input that holds a state of a parameter, or itself."""
    return Input(Role.PARAMETER, name) if key is None else Input(Role.STATE, f"{name}/{key}")


def places_read(plan: UpdatePlan, numbers: Sequence[float], name: str) -> set[Input]:
    """What has to be kept to compare the update of a parameter."""
    rules = rules_of(plan, numbers)
    return {
        place_of(key, name) for rule in rules for key in (rule.key, rule.root) if key is not None or rule.key is None
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What a rule says about one update, in units of its tensor."""

    error: float
    rounding: float
    """Of the tensor itself, beside what is allowed for the gradient."""
    size: float
    """What the whole gradient makes of it."""
    reach: float
    """A gradient that is off by a norm of 1 moves it by as much, squares aside."""
    spread: float = 0.0
    """The same, for the square of that norm."""

    def allowed(self, off: float) -> float:
        """How far it may be, where the gradient may be `off`."""
        return self.reach * off + self.spread * off * off + self.rounding

    @property
    def tells(self) -> bool:
        """Whether the gradient is more than rounding."""
        return self.rounding <= self.size


def look(rule: Rule, name: str, kept: Kept, gradient: torch.Tensor, scale: float) -> Seen | None:
    """The update of one parameter by a (clipped) gradient; None where something is not at hand."""
    place, parameter = kept.get(place_of(rule.key, name)), kept.get(place_of(None, name))
    if place is None or (rule.decay and parameter is None):
        return None
    old = parameter[1] if rule.decay and parameter is not None else None
    if rule.squared:
        return _square_seen(rule, place, gradient, scale, old)
    if rule.root is None:
        return _pull_seen(rule, place, gradient, scale, old)
    root = kept.get(place_of(rule.root, name))
    return None if root is None else _divided_seen(rule, place, gradient, scale, old, root[0])


def _rounding(live: torch.Tensor, old: torch.Tensor) -> float:
    return 4 * torch.finfo(live.dtype).eps * (norm(live) + norm(old, live.device))


def _pulls(
    rule: Rule, gradient: torch.Tensor, scale: float, parameter: torch.Tensor | None, *others: torch.Tensor
) -> Iterator[list[torch.Tensor]]:
    """Part by part: what the update takes for the gradient, and the same part of other tensors, in float64 beside it."""
    decayed = [] if parameter is None else [parameter]
    for pull, *rest in parts(gradient, *others, *decayed):
        near = [t.to(gradient.device).double() for t in rest]
        wanted = pull.double() * (rule.sign * scale)
        if parameter is not None:
            wanted += rule.decay * near.pop()
        yield [wanted, *near]


def _pull_seen(
    rule: Rule, place: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor, scale: float, parameter: torch.Tensor | None
) -> Seen:  # fmt: skip
    live, old = place
    pulls = _pulls(rule, gradient, scale, parameter, live, old)
    error = math.hypot(*(distance(now, rule.carried * was + rule.share * pull) for pull, now, was in pulls))
    share = abs(rule.share)
    return Seen(error, _rounding(live, old), share * scale * norm(gradient), share)


def _divided_seen(
    rule: Rule,
    place: tuple[torch.Tensor, torch.Tensor],
    gradient: torch.Tensor,
    scale: float,
    parameter: torch.Tensor | None,
    squares: torch.Tensor,
) -> Seen:
    """Multiplied by what the update divided by, the tensor has moved by a share of the gradient."""
    live, old = place
    eps, share = torch.finfo(live.dtype).eps, abs(rule.share)
    errors, roundings = [], []
    for pull, now, was, square in _pulls(rule, gradient, scale, parameter, live, old, squares):
        divisor = square.sqrt() + rule.eps
        errors.append(distance((now - rule.carried * was) * divisor, rule.share * pull))
        roundings += [norm((now.abs() + was.abs()) * divisor), share * norm(pull)]
    return Seen(math.hypot(*errors), 4 * eps * math.hypot(*roundings), share * scale * norm(gradient), share)


def _square_seen(
    rule: Rule, place: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor, scale: float, parameter: torch.Tensor | None
) -> Seen:  # fmt: skip
    """(g + e)^2 is off by 2 g e + e^2: at most by the largest g (the longest row, where rows are averaged) times the norm of e."""
    live, old = place
    if rule.mean_over is None:
        errors, sizes, longest, count = [], [], 0.0, 1
        for pull, now, was in _pulls(rule, gradient, scale, parameter, live, old):
            errors.append(distance(now, rule.carried * was + rule.share * pull.square()))
            sizes.append(norm(pull.square()))
            longest = max(longest, float(pull.abs().max())) if pull.numel() else longest
    else:
        count, rows = gradient.size(rule.mean_over), gradient.double() * (rule.sign * scale)
        lengths = torch.linalg.vector_norm(rows, dim=rule.mean_over, keepdim=True)
        means = lengths.square() / count
        wanted = rule.carried * old.to(live.device).double() + rule.share * means
        errors, sizes, longest = (
            [distance(live, wanted)],
            [norm(means)],
            float(lengths.max()) if lengths.numel() else 0.0,
        )
    share = abs(rule.share) / count
    size = abs(rule.share) * math.hypot(*sizes)
    return Seen(math.hypot(*errors), _rounding(live, old), size, 2 * share * longest, share)
