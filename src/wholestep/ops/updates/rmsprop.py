"""RMSprop: every element is divided by the root of the average of its squared gradients; centered, of their variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import RMSprop as TorchRMSprop
from torch.optim.rmsprop import rmsprop

from wholestep.ops.call import Call
from wholestep.ops.updates.lists import blend_, decayed, plus_, times, times_
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

STATES = ("square_avg", "momentum_buffer", "grad_avg")
NUMBERS = ("step", "lr", "alpha", "eps", "weight_decay", "momentum")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    squares, buffers, averages = states
    steps = [torch.tensor(n["step"] - 1) for _ in params]
    rmsprop(
        params, grads, squares, averages, buffers, steps,
        lr=n["lr"], alpha=n["alpha"], eps=n["eps"], weight_decay=n["weight_decay"], momentum=n["momentum"] if buffers else 0.0,
        centered=bool(averages), maximize=flags["maximize"], foreach=flags["implementation"] == "foreach",
    )  # fmt: skip


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    squares, buffers, averages = states
    pulls = decayed(params, grads, n["weight_decay"], flags["maximize"])
    blend_(squares, list(torch._foreach_mul(pulls, pulls)), n["alpha"])
    if averages:
        blend_(averages, pulls, n["alpha"])
        roots = list(torch._foreach_addcmul(squares, averages, averages, value=-1))
        torch._foreach_sqrt_(roots)
    else:
        roots = list(torch._foreach_sqrt(squares))
    plus_(roots, n["eps"])
    torch._foreach_div_(pulls, roots)
    if buffers:
        times_(buffers, n["momentum"])
        torch._foreach_add_(buffers, pulls)
        pulls = buffers
    torch._foreach_sub_(params, times(pulls, n["lr"]))


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    keeps = {"square_avg": True, "momentum_buffer": float(group["momentum"]) > 0, "grad_avg": bool(group["centered"])}
    flags = {"maximize": bool(group["maximize"]), "implementation": implementation(group, params)}
    return tuple(key for key in STATES if keeps[key]), flags


def fill(group: Group, steps: float) -> list[float]:
    return [steps + 1, *floats(group, *NUMBERS[1:])]


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    sign, decay = sign_of(flags), n["weight_decay"]
    if "grad_avg" in keys:
        return (Rule("grad_avg", n["alpha"], 1 - n["alpha"], decay, sign),)
    root = dict(root="square_avg", eps=n["eps"])
    if "momentum_buffer" in keys:
        moved = Rule("momentum_buffer", n["momentum"], 1.0, decay, sign, **root)  # type: ignore[arg-type]
    else:
        moved = Rule(None, 1.0, -n["lr"], decay, sign, **root)  # type: ignore[arg-type]
    return moved, Rule("square_avg", n["alpha"], 1 - n["alpha"], decay, sign, squared=True)


def flops(call: Call) -> int:
    """Decay 2; average of squares 4; sqrt, add eps 2; divide, times the rate, subtract 3. Momentum 2, the centre 5 more."""
    return 11 + 2 * bool(call.tensors("momentum_buffers")) + 5 * bool(call.tensors("grad_avgs"))


RMSPROP = define_update(
    "rmsprop",
    classes=(TorchRMSprop,),
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
    structure=("maximize", "centered", "foreach", "capturable", "differentiable"),
    switches=("momentum",),
    refuses=capturable_on_cpu,
)
