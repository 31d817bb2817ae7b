"""SGD: the record; the operator is `wholestep.ops.sgd`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD as TorchSGD
from torch.optim import Optimizer

from wholestep.ops import sgd
from wholestep.ops.call import Call
from wholestep.ops.updates.update import Flags, Group, Rule, Update, floats, implementation, sign_of


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    flags = dict(nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"]))
    keys = ("momentum_buffer",) if float(group["momentum"]) != 0.0 else ()
    return keys, flags | {"implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    lr, momentum, dampening, weight_decay = floats(group, "lr", "momentum", "dampening", "weight_decay")
    # torch's first momentum step takes the gradient undamped; with a zero buffer that is dampening 0
    return [lr, momentum, dampening if steps > 0 else 0.0, weight_decay]


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    if keys:
        return (Rule("momentum_buffer", n["momentum"], 1 - n["dampening"], n["weight_decay"], sign_of(flags)),)
    return (Rule(None, 1.0, -n["lr"], n["weight_decay"], sign_of(flags)),)


def flops(call: Call) -> int:
    """Decay 2; times learning rate, subtract 2. Momentum adds 3 (times momentum, plus the dampened gradient), Nesterov 2."""
    momentum = bool(call.tensors("momentum_buffers") or call.tensors("momentum_buffer_list"))
    return 4 + 3 * momentum + 2 * bool(call["nesterov"])


SGD = Update(
    kind="sgd",
    classes=(TorchSGD,),
    operator=torch.ops.ws.sgd.default,
    elementwise=True,
    in_place=sgd.update_in_place,
    states=("momentum_buffer",),
    numbers=("lr", "momentum", "dampening", "weight_decay"),
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("maximize", "nesterov", "fused", "foreach", "differentiable"),
    switches=("momentum",),
    counts_steps=False,
    has_fused_kernel=True,
    is_one_kernel=True,
    torch_operators=("aten::_fused_sgd",),
)
