"""A plain GPT: token ids in, logits of the next token out.

Norm before attention and perceptron, one matrix for query, key and value, learned positions, weights drawn as GPT-2 draws
them: narrow, and narrower still where a layer adds to the residual stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.train.models.configs import GPTConfig


class Block(nn.Module):
    """A transformer layer: attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.dropout) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.token.weight
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, Block):  # visited after its children: 2 additions per layer keep the stream's scale
            for last in (module.out, module.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * self.config.layers) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of every token given those before it."""
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
