"""Adagrad: every element is divided by the root of the sum of all its squared gradients so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adagrad as TorchAdagrad
from torch.optim import Optimizer
from torch.optim.adagrad import adagrad

from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import implementation_flags
from wholestep.ops.updates.lists import decayed, plus_, times_
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, floats, implementation, sign_of

STATES = ("sum",)
NUMBERS = ("step", "lr", "lr_decay", "eps", "weight_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    steps = [torch.tensor(n["step"] - 1) for _ in params]  # torch counts by itself
    adagrad(
        params, grads, states[0], steps, lr=n["lr"], lr_decay=n["lr_decay"], eps=n["eps"], weight_decay=n["weight_decay"],
        maximize=flags["maximize"], **implementation_flags(flags["implementation"]),
    )  # fmt: skip


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    pulls = decayed(params, grads, n["weight_decay"], flags["maximize"])
    torch._foreach_addcmul_(states[0], pulls, pulls)
    roots = list(torch._foreach_sqrt(states[0]))
    plus_(roots, n["eps"])
    times_(pulls, -n["lr"] / (1 + (n["step"] - 1) * n["lr_decay"]))
    torch._foreach_addcdiv_(params, pulls, roots)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    return STATES, {"maximize": bool(group["maximize"]), "implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    return [steps + 1, *floats(group, *NUMBERS[1:])]


def new_state(optimizer: Optimizer, key: str, parameter: Tensor) -> Tensor:
    start = float(optimizer.defaults["initial_accumulator_value"])
    return torch.full_like(parameter, start, memory_format=torch.preserve_format)


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    rate = n["lr"] / (1 + (n["step"] - 1) * n["lr_decay"])
    moved = Rule(None, 1.0, -rate, n["weight_decay"], sign_of(flags), root="sum", eps=n["eps"])
    return moved, Rule("sum", 1.0, 1.0, n["weight_decay"], sign_of(flags), squared=True)


def flops(call: Call) -> int:
    """Decay 2; square and add 2; sqrt, add eps 2; divide, times the rate, subtract 3."""
    return 9


ADAGRAD = define_update(
    "adagrad",
    classes=(TorchAdagrad,),
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
    structure=("maximize", "fused", "foreach", "differentiable"),
    new_state=new_state,
    has_state_from_the_start=True,
    has_fused_kernel=True,
    torch_operators=("aten::_fused_adagrad",),
)
