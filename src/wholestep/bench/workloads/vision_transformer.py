"""A plain vision transformer: images in, logits of classes out; and the attention that the diffusion transformer shares.

ViT (Dosovitskiy et al., 2020): an image is cut into patches, which are read as words; a class token collects the answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention in which every patch sees every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, width))


def perceptron(width: int, approximate: str = "none") -> nn.Sequential:
    """Four times as wide inside."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate=approximate), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.perceptron = nn.LayerNorm(width, eps=1e-6), perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class ViT(nn.Module):
    """The whole model."""

    def __init__(self, *, image: int, patch: int, width: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (image // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.cut(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(patches), -1, -1), patches], dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])
