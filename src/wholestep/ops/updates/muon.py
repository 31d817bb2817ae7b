"""Muon: the momentum of a matrix, made orthogonal by a few iterations in bf16, is the direction of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon as TorchMuon
from torch.optim import Optimizer
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz, muon

from wholestep.ops.call import Call
from wholestep.ops.updates.lists import blend_
from wholestep.ops.updates.operators import Lists, define_update
from wholestep.ops.updates.update import Flags, Group, Rule, floats

STATES = ("momentum_buffer",)
NUMBERS = ("lr", "momentum", "weight_decay")
FLAGS = {"nesterov": "bool", "a": "float", "b": "float", "c": "float", "eps": "float"}
FLAGS |= {"ns_steps": "int", "adjust_lr": "str"}


def eager(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, float], flags: Flags) -> None:
    muon(
        params, grads, states[0], lr=n["lr"], weight_decay=n["weight_decay"], momentum=n["momentum"],
        nesterov=flags["nesterov"], ns_coefficients=_coefficients(flags), eps=flags["eps"], ns_steps=flags["ns_steps"],
        adjust_lr_fn=flags["adjust_lr"], has_complex=False,
    )  # fmt: skip


def _coefficients(flags: Flags) -> tuple[float, float, float]:
    return flags["a"], flags["b"], flags["c"]


def arithmetic(params: list[Tensor], grads: list[Tensor], states: Lists, n: Mapping[str, Tensor], flags: Flags) -> None:
    buffers = states[0]
    n = {name: number.to(params[0].dtype) for name, number in n.items()}
    blend_(buffers, grads, n["momentum"])
    for param, grad, buffer in zip(params, grads, buffers, strict=True):
        pull = grad.lerp(buffer, n["momentum"]) if flags["nesterov"] else buffer
        direction = _zeropower_via_newtonschulz(pull, _coefficients(flags), flags["ns_steps"], flags["eps"])
        rate = n["lr"] * _adjust_lr(1.0, flags["adjust_lr"], param.shape)
        param.mul_(1 - n["lr"] * n["weight_decay"]).sub_(direction.to(param.dtype) * rate)


def describe(optimizer: Optimizer, group: Group, params: Sequence[Tensor]) -> tuple[tuple[str, ...], dict[str, Any]]:
    a, b, c = map(float, group["ns_coefficients"])
    flags = {"nesterov": bool(group["nesterov"]), "a": a, "b": b, "c": c, "eps": float(group["eps"])}
    flags |= {"ns_steps": int(group["ns_steps"]), "adjust_lr": group["adjust_lr_fn"] or "original"}  # type: ignore[dict-item]
    return STATES, flags | {"implementation": "single"}


def fill(group: Group, steps: float) -> list[float]:
    return floats(group, *NUMBERS)


def refuses(group: Group) -> str | None:
    if not group["nesterov"] and any(p.dtype is torch.bfloat16 for p in group["params"]):
        return "nesterov=False with bfloat16 parameters: torch writes its iterations into the momentum itself"
    return None


def rules(keys: Sequence[str], flags: Flags, n: Mapping[str, float]) -> Sequence[Rule]:
    return (Rule("momentum_buffer", n["momentum"], 1 - n["momentum"]),)


def flops(call: Call) -> int:
    """Momentum 6, decay and step 3; an iteration on sides n <= m is three products of 2 m n^2, 2 n^3 and 2 m n^2 FLOPs."""
    matrices = [t for t in call.tensors("params") if t.numel()]
    iterations = sum(2 * min(t.shape) ** 2 * (2 * max(t.shape) + min(t.shape)) for t in matrices) * call["ns_steps"]
    return 9 + iterations // max(1, sum(t.numel() for t in matrices))


MUON = define_update(
    "muon",
    classes=(TorchMuon,),
    states=STATES,
    numbers=NUMBERS,
    flags=FLAGS,
    eager=eager,
    arithmetic=arithmetic,
    fill=fill,
    describe=describe,
    rules=rules,
    flops=flops,
    structure=("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
    counts_steps=False,
    refuses=refuses,
)
