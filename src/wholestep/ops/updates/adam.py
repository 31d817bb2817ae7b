"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import implementation_flags
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, floats, implementation, sign_of

STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
NUMBERS = ("step", "lr", "beta1", "beta2", "eps", "weight_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    # torch counts by itself, hence step - 1; fused kernels want the counts beside the parameters
    device = params[0].device if flags["implementation"] == "fused" else torch.device("cpu")
    steps = list(torch.full((len(params),), n["step"] - 1, dtype=torch.float32, device=device).unbind())
    update = adamw if flags["decoupled"] else adam
    update(
        params, grads, *states, steps, amsgrad=flags["amsgrad"],
        lr=n["lr"], beta1=n["beta1"], beta2=n["beta2"], eps=n["eps"], weight_decay=n["weight_decay"],
        maximize=flags["maximize"], **implementation_flags(flags["implementation"]),
    )  # fmt: skip


def launch(
    params: list[Tensor], grads: list[Tensor], states: Lists, hyper: Tensor, scale: Tensor | None, flags: Flags
) -> None:
    from wholestep.ops import adamw_triton

    how = {"maximize": flags["maximize"], "decoupled": flags["decoupled"]}
    adamw_triton.launch(params, grads, states, hyper, scale, **how)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    amsgrad = bool(group["amsgrad"])
    decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
    flags = dict(amsgrad=amsgrad, maximize=bool(group["maximize"]), decoupled=decoupled)
    return STATES if amsgrad else STATES[:2], flags | {"implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    beta1, beta2 = group["betas"]
    return [steps + 1, float(group["lr"]), float(beta1), float(beta2), *floats(group, "eps", "weight_decay")]


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    decay = 0.0 if flags["decoupled"] else n["weight_decay"]
    return (Rule("exp_avg", n["beta1"], 1 - n["beta1"], decay, sign_of(flags)),)


def flops(call: Call) -> int:
    """Decay 1; first moment, a lerp, 3; second moment 4; denominator: sqrt, divide, add eps 3; divide, times rate, subtract 3."""
    return 14 + int(bool(call["amsgrad"]))


ADAM = define_update(
    "adamw",
    classes=(Adam, AdamW),
    elementwise=True,
    states=STATES,
    numbers=NUMBERS,
    flags={"amsgrad": "bool", "maximize": "bool", "decoupled": "bool"},
    eager=eager,
    launch=launch,
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("amsgrad", "maximize", "fused", "foreach", "decoupled_weight_decay", "capturable", "differentiable"),
    has_fused_kernel=True,
    is_one_kernel=True,
    torch_operators=("aten::_fused_adamw", "aten::_fused_adam"),
)
