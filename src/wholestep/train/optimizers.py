"""The optimizer of a run: matrices are decayed, vectors (norms, biases) are not."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

BETAS = (0.9, 0.95)
MOMENTUM = 0.9


def make_optimizer(kind: str, model: nn.Module, *, lr: float, weight_decay: float) -> Optimizer:
    """AdamW (fused on a GPU) or SGD with Nesterov momentum over two groups of the trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed, plain = [p for p in trainable if p.ndim > 1], [p for p in trainable if p.ndim <= 1]
    groups = [
        {"params": params, "weight_decay": decay} for params, decay in ((decayed, weight_decay), (plain, 0.0)) if params
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=MOMENTUM, nesterov=True)
    on_gpu = any(p.device.type == "cuda" for p in trainable)
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=on_gpu or None)
