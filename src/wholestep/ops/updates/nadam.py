"""NAdam: Adam with Nesterov's momentum, whose weight grows from step to step; the product of these weights is a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import NAdam as TorchNAdam
from torch.optim import Optimizer
from torch.optim.nadam import nadam

from wholestep.ops.call import Call
from wholestep.ops.updates.lists import blend_, decayed, plus_, signed, times_
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import (
    Flags,
    Group,
    Rule,
    capturable_on_cpu,
    floats,
    implementation,
    sign_of,
)
from wholestep.ops.wide import wide_dtype

STATES = ("mu_product", "exp_avg", "exp_avg_sq")
NUMBERS = ("step", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    products, averages, squares = states
    steps = [torch.tensor(n["step"] - 1) for _ in params]
    nadam(
        params, grads, averages, squares, products, steps,
        lr=n["lr"], beta1=n["beta1"], beta2=n["beta2"], eps=n["eps"], weight_decay=n["weight_decay"],
        momentum_decay=n["momentum_decay"], maximize=flags["maximize"], decoupled_weight_decay=flags["decoupled"],
        foreach=flags["implementation"] == "foreach",
    )  # fmt: skip


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    products, averages, squares = states
    if flags["decoupled"]:
        pulls = signed(grads, flags["maximize"])
        times_(params, 1 - n["lr"] * n["weight_decay"])
    else:
        pulls = decayed(params, grads, n["weight_decay"], flags["maximize"])
    weight, next_weight = (
        n["beta1"] * (1 - 0.5 * torch.pow(0.96, step * n["momentum_decay"])) for step in (n["step"], n["step"] + 1)
    )
    times_(products, weight)
    blend_(averages, pulls, n["beta1"])
    blend_(squares, list(torch._foreach_mul(pulls, pulls)), n["beta2"])
    roots = list(torch._foreach_sqrt(squares))
    times_(roots, (1 - n["beta2"] ** n["step"]).rsqrt())
    plus_(roots, n["eps"])
    # one product per parameter: their shares of the step are made in one go
    so_far = torch.stack(products).double()
    dtype = params[0].dtype
    of_pulls = (-n["lr"] * (1 - weight) / (1 - so_far)).to(dtype).unbind()
    of_averages = (-n["lr"] * next_weight / (1 - so_far * next_weight)).to(dtype).unbind()
    moved = torch._foreach_mul(pulls, of_pulls)
    torch._foreach_add_(moved, torch._foreach_mul(averages, of_averages))
    torch._foreach_addcdiv_(params, moved, roots)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    flags = {"maximize": bool(group["maximize"]), "decoupled": bool(group["decoupled_weight_decay"])}
    return STATES, flags | {"implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    beta1, beta2 = group["betas"]
    return [steps + 1, float(group["lr"]), float(beta1), float(beta2), *floats(group, *NUMBERS[4:])]


def new_state(optimizer: Optimizer, key: str, parameter: Tensor) -> Tensor:
    """The product lies beside its parameter, where torch's own loading of a checkpoint puts it too: a GPU reads it there."""
    if key == "mu_product":
        dtype = wide_dtype(torch.get_default_dtype())
        return torch.ones((), dtype=dtype, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    decay = 0.0 if flags["decoupled"] else n["weight_decay"]
    return (Rule("exp_avg", n["beta1"], 1 - n["beta1"], decay, sign_of(flags)),)


def flops(call: Call) -> int:
    """Adam's 14, and a share of the gradient: times its rate, divide, subtract."""
    return 17


NADAM = define_update(
    "nadam",
    classes=(TorchNAdam,),
    elementwise=True,
    states=STATES,
    numbers=NUMBERS,
    flags={"maximize": "bool", "decoupled": "bool"},
    eager=eager,
    arithmetic=arithmetic,
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("maximize", "decoupled_weight_decay", "foreach", "capturable", "differentiable"),
    new_state=new_state,
    refuses=capturable_on_cpu,
)
