"""Random small models with random cuts, legal and not: layers as people write them, each with the lines that cut it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, IDS, LENGTH = 24, 24, 4
Line = tuple[str, str, int]
"""Of a module of the layer, a parameter, and the dimension that is cut."""


class Layer(nn.Module):
    """A residual layer; `lines` cut it in the way that it is made for."""

    lines: tuple[Line, ...] = ()

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.pick = {"bias": pick.random() < 0.5, "p": pick.choice((0.0, 0.25)), "way": pick.randrange(3)}
        self.norm = pick.choice((nn.LayerNorm, nn.RMSNorm))(WIDTH) if pick.random() < 0.7 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.pick["p"], self.training)


class Mlp(Layer):
    lines = (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1))

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.up = nn.Linear(WIDTH, 48, bias=self.pick["bias"])
        self.down = nn.Linear(48, WIDTH, bias=pick.random() < 0.5)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        if self.pick["way"] == 1 and self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        return self.dropped(self.down(self.dropped(F.gelu(hidden) if self.pick["way"] else hidden.softmax(-1))))


class Gated(Layer):
    """Two halves of one weight."""

    lines = (("up", "weight", 0), ("up", "bias", 0), ("down", "weight", 1))

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.up = nn.Linear(WIDTH, 48, bias=self.pick["bias"])
        self.down = nn.Linear(WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.pick["way"] == 0:
            return self.down(self.dropped(F.glu(self.up(x))))
        one, other = self.up(x).chunk(2, -1)
        return self.down(self.dropped(F.silu(one) * other))


class Attention(Layer):
    """Queries, keys and values by three weights, with fewer heads of keys at times."""

    lines = (("q", "weight", 0), ("q", "bias", 0), ("k", "weight", 0), ("v", "weight", 0), ("o", "weight", 1))

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.heads = pick.choice((4, 6, 12))
        self.groups = pick.choice([n for n in (1, 2, self.heads) if self.heads % n == 0])
        width = WIDTH // self.heads * self.groups
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=self.pick["bias"]), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, width, bias=False) for _ in range(2))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        p = self.pick["p"] if self.training else 0.0
        grouped, causal = self.groups < self.heads, self.pick["way"] > 0
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal, enable_gqa=grouped)
        return self.o(found.transpose(1, 2).flatten(2))


class Fused(Layer):
    """One weight for queries, keys and values, and attention written out."""

    lines = (("qkv", "weight", 0), ("qkv", "bias", 0), ("o", "weight", 1))

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.heads = pick.choice((4, 6, 12))
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=self.pick["bias"]), nn.Linear(WIDTH, WIDTH)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.pick["way"] == 0:
            q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).split(WIDTH, -1))
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), float("-inf"))
        return self.o((self.dropped(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class Convolved(Layer):
    """Channels: one for all, each by itself, all for one."""

    lines = (("up", "weight", 0), ("each", "weight", 0), ("each", "bias", 0), ("down", "weight", 1))

    def __init__(self, pick: random.Random) -> None:
        super().__init__(pick)
        self.up, self.down = nn.Conv1d(WIDTH, 48, 1, bias=self.pick["bias"]), nn.Conv1d(48, WIDTH, 1)
        self.each = nn.Conv1d(48, 48, 3, padding=1, groups=48)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropped(F.silu(self.each(self.up(x.transpose(1, 2)))))).transpose(1, 2)


LAYERS: tuple[Callable[[random.Random], Layer], ...] = (Mlp, Gated, Attention, Fused, Convolved)


class Net(nn.Module):
    """Ids to logits, or to numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.embed = nn.Embedding(IDS, WIDTH, padding_idx=pick.choice((None, 0, IDS - 1)))
        self.layers = nn.ModuleList(pick.choice(LAYERS)(pick) for _ in range(pick.randint(1, 3)))
        if pick.random() < 0.25:
            self.layers.append(self.layers[0])  # the same layer twice
        self.head = nn.Linear(WIDTH, IDS, bias=pick.random() < 0.5)
        if pick.random() < 0.4:
            self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.loss = {
            "ignore_index": pick.choice((-100, 0, 3)), "label_smoothing": pick.choice((0.0, 0.1)),
            "reduction": pick.choice(("mean", "sum")), "squares": pick.random() < 0.2, "norms": pick.random() < 0.3,
        }  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return self.head(x - self.mean)

    def lines(self) -> list[Line]:
        """How it is cut: mostly as layers are made for, at times in part, or along another dimension."""
        pick, every = self.random, [("embed", "weight", 0), ("head", "weight", 0), ("head", "bias", 0)]
        for i, layer in enumerate(self.layers):
            every += [(f"layers.{i}.{at}", name, axis) for at, name, axis in layer.lines]
        found: dict[int, Line] = {}
        least = pick.choice((0.0, 0.0, 0.2))
        for at, name, axis in every:
            parameter = getattr(self.get_submodule(at), name)
            if parameter is None or pick.random() < least or id(parameter) in found:
                continue
            wrong = pick.random() < 0.04
            found[id(parameter)] = (at, name, pick.randrange(parameter.dim()) if wrong else axis)
        return list(found.values())


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy with its options, or squares; and the squares of parameters at times."""
    how, logits = dict(model.loss), model(batch["ids"])
    squares, norms = how.pop("squares"), how.pop("norms")
    if squares:
        found = F.mse_loss(logits, batch["wanted"])
    else:
        labels = torch.where(batch["labels"] < 0, how["ignore_index"], batch["labels"])
        found = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **how)
    return found + 1e-3 * sum(p.square().sum() for p in model.parameters()) if norms else found


def batch_of(seed: int, rows: int) -> dict[str, torch.Tensor]:
    """First and last ids, and labels that are ignored, are in it."""
    torch.manual_seed(seed)
    ids, labels = torch.randint(0, IDS, (rows, LENGTH)), torch.randint(0, IDS, (rows, LENGTH))
    ids[0, 0], ids[-1, -1], labels[-1, 0], labels[0, -1] = 0, IDS - 1, IDS - 1, 0
    labels[0, 1] = -100
    return {"ids": ids, "labels": labels, "wanted": torch.randn(rows, LENGTH, IDS, dtype=torch.float64)}
