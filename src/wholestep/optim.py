"""Optimizers that torch does not have: plain `torch.optim.Optimizer`s, whose update a compiled step captures like torch's own.

optimizer = wholestep.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Every weight moves by the learning rate, in the direction of a sign (Chen et al., 2023, "Symbolic Discovery of Optimization
    Algorithms"). Weight decay is decoupled, as AdamW's is; one momentum is all the state there is."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if lr < 0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}")
        if weight_decay < 0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            for p in members:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            averages = [self.state[p]["exp_avg"] for p in members]
            beta1, beta2 = group["betas"]
            lion(
                members, [p.grad for p in members], averages,
                lr=float(group["lr"]), beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], maximize=group["maximize"],
            )  # fmt: skip
        return loss


def lion(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """One step, in place: the sign is of a fresher average (beta1) than the one that is kept (beta2)."""
    for param, grad, average in zip(params, grads, exp_avgs, strict=True):
        pull = -grad if maximize else grad
        direction = average.lerp(pull, 1 - beta1).sign_()
        param.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
        average.lerp_(pull, 1 - beta2)


__all__ = ["Lion"]
