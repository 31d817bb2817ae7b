"""Models of a few layers for schedules, and replacements that can be found by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 11
WIDTH = 8


class MLP(nn.Module):
    """Its activation is an argument of the constructor, and its forward has an argument with a default."""

    def __init__(self, act: str = "relu") -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 16)
        self.fc2 = nn.Linear(16, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.fc2(getattr(F, self.act)(self.fc1(x))) * scale


class FastMLP(nn.Module):
    """The same under other names."""

    def __init__(self, act: str = "relu") -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        hidden = getattr(F, self.act)(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(hidden, self.down.weight, self.down.bias) * scale


CARRIED = {
    "up.weight": "fc1.weight",
    "up.bias": "fc1.bias",
    "down.weight": "fc2.weight",
    "down.bias": "fc2.bias",
}


class Block(nn.Module):
    def __init__(self, act: str = "relu", dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = MLP(act)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 3, act: str = "relu", dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(act, dropout) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(layers: int = 3, **options: Any) -> tuple[Net, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Net(layers, **options)
    batch = {name: torch.randint(0, VOCABULARY, (4, 5)) for name in ("ids", "labels")}
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batch


def loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


# ---- by name, for recipe files ----


def linear_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A pattern."""
    return F.relu(F.linear(x, w, b))


def linear_clamp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What may take its place."""
    return F.linear(x, w, b).clamp(min=0)


def wrong_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What may not: its bias counts a little more."""
    return F.relu(F.linear(x, w, b * 1.01))


def make_fast(path: str, module: MLP) -> FastMLP:
    return FastMLP(module.act)
