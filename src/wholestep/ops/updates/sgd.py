"""SGD: momentum, dampening, Nesterov, weight decay.

The first step of torch (buffer = gradient) is a zero buffer with dampening 0: there is no branch on the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD as TorchSGD
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from wholestep.ops.call import Call
from wholestep.ops.multi_tensor import implementation_flags
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, floats, implementation, sign_of

STATES = ("momentum_buffer",)
NUMBERS = ("lr", "momentum", "dampening", "weight_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    buffers, how = states[0], flags["implementation"]
    if how == "fused" and _fused_is_broken(params):
        how = "single"
    if how == "foreach" and flags["nesterov"]:  # it adds the momentum into the gradients themselves
        grads = [grad.clone() for grad in grads]
    sgd(
        params, grads, list(buffers) if buffers else [None] * len(params),
        lr=n["lr"], momentum=n["momentum"] if buffers else 0.0, dampening=n["dampening"], weight_decay=n["weight_decay"],
        nesterov=flags["nesterov"], maximize=flags["maximize"], **implementation_flags(how),
    )  # fmt: skip


def _fused_is_broken(params: list[Tensor]) -> bool:
    """torch's fused CPU kernel is wrong for bf16 and fp16 (2.11 and 2.13): parameters are off by a whole step, with and without
    momentum, and momentum buffers differ from run to run."""
    return any(not p.is_cuda and p.dtype in (torch.bfloat16, torch.float16) for p in params)


def launch(
    params: list[Tensor], grads: list[Tensor], states: Lists, hyper: Tensor, scale: Tensor | None, flags: Flags
) -> None:
    from wholestep.ops import sgd_triton

    how = {"nesterov": flags["nesterov"], "maximize": flags["maximize"]}
    sgd_triton.launch(params, grads, states, hyper, scale, **how)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    flags = dict(nesterov=bool(group["nesterov"]), maximize=bool(group["maximize"]))
    return STATES if float(group["momentum"]) else (), flags | {"implementation": implementation(group, params)}


def fill(group: Group, steps: float) -> list[float]:
    lr, momentum, dampening, weight_decay = floats(group, *NUMBERS)
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


SGD = define_update(
    "sgd",
    classes=(TorchSGD,),
    elementwise=True,
    states=STATES,
    numbers=NUMBERS,
    flags={"nesterov": "bool", "maximize": "bool"},
    eager=eager,
    launch=launch,
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
