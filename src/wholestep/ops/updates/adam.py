"""Adam and AdamW: the record; the operator is `wholestep.ops.adamw`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from wholestep.ops import adamw
from wholestep.ops.call import Call
from wholestep.ops.updates.update import Flags, Group, Rule, Update, floats, implementation, sign_of


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    amsgrad = bool(group["amsgrad"])
    decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
    flags = dict(amsgrad=amsgrad, maximize=bool(group["maximize"]), decoupled=decoupled)
    keys = ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ())
    return keys, flags | {"implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    beta1, beta2 = group["betas"]
    return [steps + 1, float(group["lr"]), float(beta1), float(beta2), *floats(group, "eps", "weight_decay")]


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    decay = 0.0 if flags["decoupled"] else n["weight_decay"]
    return (Rule("exp_avg", n["beta1"], 1 - n["beta1"], decay, sign_of(flags)),)


def flops(call: Call) -> int:
    """Decay 1; first moment, a lerp, 3; second moment 4; denominator: sqrt, divide, add eps 3; divide, times rate, subtract 3."""
    return 14 + int(bool(call["amsgrad"]))


ADAM = Update(
    kind="adamw",
    classes=(Adam, AdamW),
    operator=torch.ops.ws.adamw.default,
    elementwise=True,
    in_place=adamw.update_in_place,
    states=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    numbers=("step", "lr", "beta1", "beta2", "eps", "weight_decay"),
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("amsgrad", "maximize", "fused", "foreach", "decoupled_weight_decay", "capturable", "differentiable"),
    has_fused_kernel=True,
    is_one_kernel=True,
    torch_operators=("aten::_fused_adamw", "aten::_fused_adam"),
)
