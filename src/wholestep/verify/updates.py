"""Was a parameter updated with the gradient that eager PyTorch has? Told by the state that is linear in the gradient.

    Adam      m' = b1 m + (1 - b1) g
    momentum  b' = mu b + (1 - d) g
    plain SGD p' = p - lr g

In: the rule and numbers of an update, what it wrote and what was there before, the gradient. Out: an error. Copies may be on the
host; a part of them is on the device at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from wholestep.capture.optimizers import UpdatePlan
from wholestep.graph.training_graph import Input, Role
from wholestep.verify.compare import distance, parts


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """new = carried * old + share * (gradient + decay * parameter)."""

    carried: float
    share: float
    decay: float
    sign: float


def rule_of(plan: UpdatePlan, numbers: Sequence[float]) -> Rule:
    """How an update moves the state that is linear in the gradient."""
    flags = dict(plan.flags)
    decay = numbers[-1] if plan.kind == "sgd" or not flags["decoupled"] else 0.0
    sign = -1.0 if flags["maximize"] else 1.0
    if plan.kind == "adamw":
        return Rule(numbers[2], 1 - numbers[2], decay, sign)
    if plan.state_keys:
        return Rule(numbers[1], 1 - numbers[2], decay, sign)
    return Rule(1.0, -numbers[0], decay, sign)


def linear_state(plan: UpdatePlan, name: str) -> Input:
    """The input that holds it, for one parameter."""
    key = {"adamw": "exp_avg", "sgd": "momentum_buffer"}[plan.kind]
    return Input(Role.STATE, f"{name}/{key}") if plan.state_keys else Input(Role.PARAMETER, name)


def update_error(
    rule: Rule,
    live: torch.Tensor,
    old: torch.Tensor,
    gradient: torch.Tensor,
    scale: float,
    parameter: torch.Tensor | None,
) -> float:
    """How far the new state is from what the (clipped) gradient makes of the old one."""
    decayed = [] if parameter is None or not rule.decay else [parameter]
    errors = []
    for now, was, pull, *weight in parts(live, old, gradient, *decayed):
        wanted = pull.double() * (rule.sign * scale)
        if weight:
            wanted += rule.decay * weight[0].to(live.device).double()
        errors.append(distance(now, rule.carried * was.to(live.device).double() + rule.share * wanted))
    return math.hypot(*errors)
