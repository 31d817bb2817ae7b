"""Small trainings to verify: dropout and GELU, batch norm, attention; each names its modules plainly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = 4


class Mlp(nn.Module):
    """Two linear layers with two dropouts around a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.drop_one = nn.Dropout(0.3)
        self.second = nn.Linear(16, 16)
        self.drop_two = nn.Dropout(0.3)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop_one(self.act(self.first(x)))
        return self.head(self.drop_two(self.second(hidden)))


class Normed(nn.Module):
    """A batch norm whose statistics are buffers, then a scale reached without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.body(x)))) * self.scale


class Attention(nn.Module):
    """One causal attention block with dropout inside the attention; the key bias has a true-zero gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.unsqueeze(1) + torch.arange(5, dtype=x.dtype).sin().view(1, 5, 1)
        q, k, v = (part(tokens).view(-1, 5, 2, 4).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.head(self.norm(mixed.transpose(1, 2).flatten(2)).mean(1))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["y"]), {"correct": (logits.argmax(-1) == batch["y"]).sum()}


def batches(count: int, rows: int = 6) -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(7)
    return [
        {
            "x": torch.randn(rows, 8, generator=source),
            "y": torch.randint(0, CLASSES, (rows,), generator=source),
        }
        for _ in range(count)
    ]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """All values a verification must leave alone, copied."""
    state = {f"model.{n}": t.clone() for n, t in model.state_dict().items()}
    state |= {f"grad.{n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    state |= {f"training.{n}": m.training for n, m in model.named_modules()}
    if optimizer is not None:
        for i, (_, table) in enumerate(optimizer.state.items()):
            state |= {f"state.{i}.{k}": v.clone() if isinstance(v, torch.Tensor) else v for k, v in table.items()}
        state["attributes"] = sorted(optimizer.__dict__)
        state["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return state | {"random": torch.get_rng_state()}
