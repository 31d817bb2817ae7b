"""What one entry of the zoo is made of: a model, its loss, optimizers, batches, and what capture should make of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn

OptimizerKind = Literal["sgd", "adamw"]
NUM_BATCHES = 6


def optimizer_for(parameters: Iterable[nn.Parameter], kind: OptimizerKind) -> torch.optim.Optimizer:
    """Matrices with weight decay, vectors without: two groups, as most training scripts have them."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3)


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The models of the zoo return their loss, Hugging Face ones in `.loss`."""
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.loss


@dataclasses.dataclass(slots=True)
class Built:
    """A model ready to be trained; fresh at every build, and the same one each time."""

    model: Any
    """A module, or a dict of modules."""
    batches: list[Any]
    """At least five, different, of one shape."""
    loss_fn: Callable[[Any, Any], Any] = default_loss
    edge_batches: list[Any] = dataclasses.field(default_factory=list)
    """Legal batches at the border: repeated tokens, all labels but one ignored, a row that is all padding."""
    trained: Callable[[], Iterable[nn.Parameter]] | None = None
    """What the optimizer is given; all parameters of `model` when None."""
    partner: Built | None = None
    """A second step on shared modules, trained in turns with this one."""
    between_steps: Callable[[], None] | None = None
    """What the training loop does after each step."""

    def make_optimizer(self, kind: OptimizerKind) -> torch.optim.Optimizer:
        return optimizer_for(self.trained() if self.trained else self.model.parameters(), kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row of the zoo."""

    name: str
    build: Callable[[], Built]
    group: Literal["hf", "plain"]
    expect_rung: str = "whole step"
    notes: str = ""
    bitwise: bool = True
    """Whether backend `interpret` gives eager's very bits; if not, `notes` says why."""
