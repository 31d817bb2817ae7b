"""A U-Net that learns which noise was added to an image (Ho et al., 2020): noised images and times in, the noise out.

Residual blocks on the way down and up, the features of the way down handed across to the way up, attention at one size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workloads.vision_transformer import Attention

FREQUENCIES = 256


class Residual(nn.Module):
    """Two convolutions behind norms; the time is added between them."""

    def __init__(self, inside: int, outside: int, about: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.about, self.dropout = nn.Linear(about, outside), nn.Dropout(dropout)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Identity() if inside == outside else nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.about(F.silu(about))[:, :, None, None]
        return self.conv2(self.dropout(F.silu(self.norm2(y)))) + self.shortcut(x)


class Looking(nn.Module):
    """Every place of the image attends to every other."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(groups, channels), Attention(channels, heads=1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Stage(nn.Module):
    """A residual block, with attention where asked for."""

    def __init__(self, inside: int, outside: int, about: int, groups: int, dropout: float, looks: bool) -> None:
        super().__init__()
        self.block = Residual(inside, outside, about, groups, dropout)
        self.look = Looking(outside, groups) if looks else nn.Identity()

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        return self.look(self.block(x, about))


class UNet(nn.Module):
    """The whole model. `growth`: channels of each size over `width`; `looks`: the one with attention, counted from 0."""

    def __init__(
        self, *, width: int, growth: Sequence[int], blocks: int, looks: int, groups: int, dropout: float
    ) -> None:  # fmt: skip
        super().__init__()
        about = 4 * width
        common = (about, groups, dropout)
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, about), nn.SiLU(), nn.Linear(about, about))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.up, across, inside = nn.ModuleList(), nn.ModuleList(), [width], width
        for size, factor in enumerate(growth):
            for _ in range(blocks):
                self.down.append(Stage(inside, width * factor, *common, size == looks))
                inside = width * factor
                across.append(inside)
            if size < len(growth) - 1:
                self.down.append(nn.Conv2d(inside, inside, 3, 2, padding=1))
                across.append(inside)
        self.middle = nn.ModuleList([Stage(inside, inside, *common, True), Stage(inside, inside, *common, False)])
        for size, factor in reversed(list(enumerate(growth))):
            for _ in range(blocks + 1):
                self.up.append(Stage(inside + across.pop(), width * factor, *common, size == looks))
                inside = width * factor
            if size:
                self.up.append(nn.Conv2d(inside, inside, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(groups, inside), nn.Conv2d(inside, 1, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, noised: Tensor, times: Tensor) -> Tensor:
        """times: [rows, FREQUENCIES], as sines and cosines."""
        about = self.time(times)
        x = self.first(noised)
        across = [x]
        for layer in self.down:
            x = layer(x, about) if isinstance(layer, Stage) else layer(x)
            across.append(x)
        for layer in self.middle:
            x = layer(x, about)
        for layer in self.up:
            if isinstance(layer, Stage):
                x = layer(torch.cat([x, across.pop()], dim=1), about)
            else:
                x = layer(F.interpolate(x, scale_factor=2.0))
        return self.last(F.silu(self.norm(x)))
