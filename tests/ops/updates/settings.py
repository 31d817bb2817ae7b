"""Optimizers and their settings, and a model of odd parameters that they train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.runtime.twins import Side
from torch import nn
from torch.optim import Adafactor, Adagrad, Muon, NAdam, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from wholestep.optim import Lion

Make = Callable[[Any], torch.optim.Optimizer]


def grouped(kind: type[torch.optim.Optimizer], **second: Any) -> Make:
    """Matrices and the rest in two groups, the second of which has its own settings."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        every = list(parameters)
        halves = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
        return kind([{"params": halves[0], "lr": 0.02}, {"params": halves[1], **second}], lr=0.01)  # type: ignore[call-arg]

    return make


SETTINGS: dict[str, Make] = {
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adagrad, all": lambda p: Adagrad(
        p, lr=0.1, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.3, eps=1e-4
    ),
    "adagrad, maximize": lambda p: Adagrad(p, lr=0.01, maximize=True, foreach=False),
    "adagrad, foreach": lambda p: Adagrad(p, lr=0.1, weight_decay=0.1, lr_decay=0.2, foreach=True),
    "adagrad, fused": lambda p: Adagrad(p, lr=0.1, weight_decay=0.1, fused=True),
    "adagrad, groups": grouped(Adagrad, lr_decay=0.5, maximize=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
    "rmsprop, momentum": lambda p: RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "rmsprop, centered": lambda p: RMSprop(p, lr=torch.tensor(0.01), centered=True, maximize=True, alpha=0.9, eps=1e-4),
    "rmsprop, foreach": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True, foreach=True),
    "rmsprop, groups": grouped(RMSprop, momentum=0.5, centered=True),
    "nadam": lambda p: NAdam(p, lr=0.01),
    "nadam, decay": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95), momentum_decay=0.1),
    "nadam, decoupled": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True, maximize=True),
    "nadam, foreach": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, foreach=True),
    "nadam, groups": grouped(NAdam, betas=(0.5, 0.9), decoupled_weight_decay=True),
    "adafactor": lambda p: Adafactor(p, lr=0.01),
    "adafactor, all": lambda p: Adafactor(p, lr=0.05, weight_decay=0.1, d=1.5, eps=(1e-6, 1e-2), beta2_decay=-0.5),
    "adafactor, foreach": lambda p: Adafactor(p, lr=0.01, weight_decay=0.1, maximize=True, foreach=True),
    "adafactor, groups": grouped(Adafactor, d=2.0, maximize=True),
    "muon": lambda p: Muon(p, lr=0.01),
    "muon, plain": lambda p: Muon(p, lr=0.01, nesterov=False, weight_decay=0.0, momentum=0.5, ns_steps=3),
    "muon, rms": lambda p: Muon(p, lr=0.01, adjust_lr_fn="match_rms_adamw", ns_coefficients=(2.0, -1.5, 0.5), eps=1e-5),
    "lion": lambda p: Lion(p, lr=0.01),
    "lion, all": lambda p: Lion(p, lr=torch.tensor(0.01), weight_decay=0.1, betas=(0.8, 0.95), maximize=True),
    "lion, groups": grouped(Lion, betas=(0.5, 0.5), weight_decay=0.5),
}
PLAIN = ("adagrad", "rmsprop", "nadam", "adafactor", "muon", "lion")


class Odd(nn.Module):
    """Parameters of odd sizes: of three, two, one and no dimensions, of one element and of none; frozen; without a gradient."""

    def __init__(self, matrices_only: bool = False, empty: bool = True) -> None:
        super().__init__()
        self.matrix, self.tall = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7, 5))
        self.unused, self.frozen = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.others = nn.ParameterList()
        if not matrices_only:
            shapes = [(2, 3, 5), (7,), (1,), (), *([(0,)] if empty else [])]
            self.others = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ self.frozen @ self.matrix.T).tanh() @ self.tall.T
        for parameter in self.others:
            if parameter.dim() == 3:
                hidden = hidden + (x @ parameter).mean() * hidden
            elif parameter.numel():
                hidden = hidden * parameter
            else:
                hidden = hidden + parameter.sum()
        return hidden


def matrices(name: str, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What an optimizer takes: Muon matrices only."""
    return [p for p in parameters if p.dim() == 2 or not name.startswith("muon")]


def mean_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


RATES = (1.0, 0.5, 0.0, 2.0, 0.1, 1.0, 1.0)
"""A learning rate that moves at every step, and is zero at one."""


def odd_side(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], Side]:
    def make() -> Side:
        # torch's own Adafactor divides by the number of elements
        model = Odd(name.startswith("muon"), empty=not name.startswith("adafactor")).to(dtype)
        optimizer = SETTINGS[name](matrices(name, list(model.parameters())))
        return Side(model, optimizer, mean_square, LambdaLR(optimizer, lambda i: RATES[i]))

    return make


def odd_batches(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=source).to(dtype) for _ in range(count)]
