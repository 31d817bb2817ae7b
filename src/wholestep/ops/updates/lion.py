"""Lion (`wholestep.optim.Lion`): the sign of a momentum is the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wholestep import optim
from wholestep.ops.call import Call
from wholestep.ops.updates.lists import blend_, signed, times, times_
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, sign_of

STATES = ("exp_avg",)
NUMBERS = ("lr", "beta1", "beta2", "weight_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    optim.lion(params, grads, states[0], maximize=flags["maximize"], **n)


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    averages = states[0]
    pulls = signed(grads, flags["maximize"])
    directions = times(averages, n["beta1"])
    torch._foreach_add_(directions, times(pulls, 1 - n["beta1"]))
    torch._foreach_sign_(directions)
    times_(params, 1 - n["lr"] * n["weight_decay"])
    torch._foreach_sub_(params, times(directions, n["lr"]))
    blend_(averages, pulls, n["beta2"])


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    return STATES, {"maximize": bool(group["maximize"]), "implementation": "single"}


def fill(group: Group, steps: float) -> list[float]:
    return [float(group["lr"]), *map(float, group["betas"]), float(group["weight_decay"])]


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    return (Rule("exp_avg", n["beta2"], 1 - n["beta2"], sign=sign_of(flags)),)


def flops(call: Call) -> int:
    """Two averages 6; sign 1; decay 1; times the rate, subtract 2."""
    return 10


LION = define_update(
    "lion",
    classes=(optim.Lion,),
    elementwise=True,
    states=STATES,
    numbers=NUMBERS,
    flags={"maximize": "bool"},
    eager=eager,
    arithmetic=arithmetic,
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("maximize",),
    counts_steps=False,
)
