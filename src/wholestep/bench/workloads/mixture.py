"""A language model with a mixture of experts: every second layer sends each token to two of several perceptrons.

In: sizes. Out: a Training on Shakespeare's plays. Every expert has room for a fixed number of tokens (Lepikhin et al., 2020), so
no shape depends on where tokens go; a token that finds both its experts full passes by on the residual.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import drawn, next_token_batches
from wholestep.bench.workloads.vision_transformer import perceptron
from wholestep.data.windows import Batch
from wholestep.train.optimizers import make_optimizer

CHOICES = 2
ROOM = 1.25
"""Places per expert, over what an even spread would need."""
EVENNESS = 0.01
"""Weight of the loss that keeps experts equally busy."""


class Experts(nn.Module):
    """Perceptrons behind a router; returns the mixture and how unevenly tokens were spread."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens, width = x.shape
        chances = self.router(x).float().softmax(dim=1)
        gates, chosen = chances.topk(CHOICES, dim=1)
        gates = gates / gates.sum(dim=1, keepdim=True)
        # First choices of all tokens come before second ones: who comes too late for an expert is left out there.
        order = chosen.t().flatten()
        one_hot = F.one_hot(order, self.experts)
        place = (one_hot.cumsum(dim=0) * one_hot).sum(dim=1) - 1
        room = math.ceil(ROOM * CHOICES * tokens / self.experts)
        overflow = self.experts * room
        slot = torch.where(place < room, order * room + place, overflow)
        inbox = x.new_zeros(overflow + 1, width).index_add(0, slot, x.repeat(CHOICES, 1))
        worked = F.gelu(inbox[:-1].view(self.experts, room, width) @ self.up) @ self.down
        outbox = torch.cat([worked.flatten(0, 1), worked.new_zeros(1, width)])
        weights = gates.t().reshape(CHOICES, tokens, 1).to(worked.dtype)
        mixed = (outbox[slot].view(CHOICES, tokens, width) * weights).sum(dim=0)
        busy = F.one_hot(chosen[:, 0], self.experts).float().mean(dim=0)
        return mixed, self.experts * (busy * chances.mean(dim=0)).sum()


class Block(nn.Module):
    """Causal attention, then a perceptron or experts."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width, experts) if experts else None
        self.perceptron = None if experts else perceptron(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        if self.experts is None:
            assert self.perceptron is not None
            return x + self.perceptron(self.norm2(x)), None
        mixed, unevenness = self.experts(self.norm2(x).flatten(0, 1))
        return x + mixed.view(rows, length, width), unevenness


class MixtureGPT(nn.Module):
    """Token ids in; logits of the next token and the mean unevenness out."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, experts: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts if number % 2 else 0) for number in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        uneven = []
        for block in self.blocks:
            x, unevenness = block(x)
            if unevenness is not None:
                uneven.append(unevenness)
        return self.head(self.norm(x)), torch.stack(uneven).mean()


def mixture_loss(model: Any, batch: Batch) -> Tensor:
    """Cross-entropy of the next token, and a little for unevenness."""
    logits, uneven = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + EVENNESS * uneven


def build_mixture(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The mixture with AdamW."""
    rows, seq = sizes["batch"], sizes["seq"]
    batches = next_token_batches(sizes, device, seed)
    model = drawn(
        seed, device,
        lambda: MixtureGPT(
            vocabulary=sizes["vocabulary"], width=sizes["width"], layers=sizes["layers"], heads=sizes["heads"],
            experts=sizes["experts"], context=seq,
        ),
    )  # fmt: skip
    optimizer = make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=0.1)
    part = Part(
        name="model", model=model, loss_fn=mixture_loss, optimizer=optimizer, example_batch=batches(0), clip_norm=1.0
    )
    return one_part(part, batches, units=rows * seq, precision=sizes["precision"])
