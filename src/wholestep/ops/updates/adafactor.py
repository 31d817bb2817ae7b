"""Adafactor: second moments of a matrix are kept as one number per row and one per column, those of a vector whole.

Matrices and vectors are updated by two nodes, because they keep different states. A step is measured by the size of the parameter
and of the update: norms, which stay on the device in `arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor as TorchAdafactor
from torch.optim import Optimizer
from torch.optim._adafactor import adafactor

from wholestep.ops.call import Call
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, floats, sign_of

STATES = ("row_var", "col_var", "variance")
NUMBERS = ("step", "lr", "beta2_decay", "eps1", "eps2", "d", "weight_decay")


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    absent: list[Any] = [None] * len(params)
    rows, columns, variances = (kept or absent for kept in states)
    steps = [torch.tensor(n["step"] - 1) for _ in params]
    adafactor(
        params, grads, rows, columns, variances, steps,
        d=n["d"], lr=n["lr"], beta2_decay=n["beta2_decay"], weight_decay=n["weight_decay"], eps1=n["eps1"], eps2=n["eps2"],
        maximize=flags["maximize"], foreach=flags["implementation"] == "foreach",
    )  # fmt: skip


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    kept = zip(*(tensors for tensors in states if tensors), strict=True)
    n = {name: number.to(params[0].dtype) for name, number in n.items()}
    fresh = n["step"] ** n["beta2_decay"]
    rate = torch.minimum(n["lr"], n["step"].rsqrt())
    for param, grad, moments in zip(params, grads, kept, strict=True):
        root = math.sqrt(param.numel())
        step = torch.maximum(n["eps2"], param.norm() / root) * rate
        param.mul_(1 - n["lr"] * n["weight_decay"])
        estimate = _second_moment(grad, moments, fresh, n["eps1"])
        update = torch.maximum(estimate, n["eps1"] * n["eps1"]).rsqrt_().mul_(grad)
        shrunk = step / (update.norm() / (root * n["d"])).clamp(min=1.0)
        param.sub_(update.mul_(-shrunk if flags["maximize"] else shrunk))


def _second_moment(grad: Tensor, moments: Sequence[Tensor], fresh: Tensor, eps: Tensor) -> Tensor:
    """The states move towards the squares of this gradient; what they now say each element's square is."""
    if len(moments) == 1:
        return moments[0].lerp_(grad * grad, fresh).clone()
    rows, columns = moments
    rows.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.size(-1)), fresh)
    columns.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.size(-2)), fresh)
    return (rows @ columns).div_(torch.maximum(rows.mean(dim=-2, keepdim=True), eps))


def is_matrix(parameter: Tensor) -> int:
    return int(parameter.dim() > 1)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    keys = STATES[:2] if all(map(is_matrix, params)) else STATES[2:]
    how = "foreach" if group["foreach"] else "single"  # torch takes it here only where it is asked for
    return keys, {"maximize": bool(group["maximize"]), "implementation": how}


def fill(group: Group, steps: float) -> list[float]:
    eps1, eps2 = group["eps"]
    eps1 = torch.finfo(group["params"][0].dtype).eps if eps1 is None else float(eps1)
    return [steps + 1, *floats(group, "lr", "beta2_decay"), eps1, float(eps2), *floats(group, "d", "weight_decay")]


def new_state(optimizer: Optimizer, key: str, parameter: Tensor) -> Tensor:
    if key == "variance":
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    shape = list(parameter.shape)
    shape[-1 if key == "row_var" else -2] = 1
    return parameter.detach().new_zeros(shape)


def refuses(group: Group) -> str | None:
    if group["eps"][0] is None and len({p.dtype for p in group["params"]}) > 1:
        return "eps[0] is None in a group of several dtypes: torch takes the first parameter's for all; give a number"
    return None


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    """The size of a gradient shows, its sign does not."""
    fresh = n["step"] ** n["beta2_decay"]
    key, over = ("row_var", -1) if "row_var" in keys else ("variance", None)
    return (Rule(key, 1 - fresh, fresh, sign=sign_of(flags), squared=True, mean_over=over),)


def flops(call: Call) -> int:
    """Decay 1; squares for rows and columns 4; their product and its mean 2; clamp, rsqrt, times the gradient 3; two norms 4;
    times the step, subtract 2."""
    return 16


ADAFACTOR = define_update(
    "adafactor",
    classes=(TorchAdafactor,),
    states=STATES,
    numbers=NUMBERS,
    flags={"maximize": "bool"},
    eager=eager,
    arithmetic=arithmetic,
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("maximize", "foreach"),
    new_state=new_state,
    refuses=refuses,
    apart=is_matrix,
)
