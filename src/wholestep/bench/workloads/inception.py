"""Inception-v3 (Szegedy et al., 2015): images in, logits of classes out, and in training those of a second head.

Every module is a set of towers whose outputs lie side by side; a tower is a row of convolutions, each with BatchNorm and ReLU.
The paper's own channels are the numbers below; `width` scales all of them, so that the same network fits a laptop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = tuple[int, int]
SEVENS = (128, 160, 160, 192)
"""Channels inside the four modules with 7x7 convolutions cut in two."""


class Convolution(nn.Module):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, inside: int, outside: int, kernel: Kernel, stride: int = 1, same: bool = False) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inside, outside, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outside, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class SideBySide(nn.Module):
    """Several towers over one input; their channels are joined."""

    def __init__(self, *towers: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tower(x) for tower in self.towers], dim=1)


def _tower(inside: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions that keep the size, one after the other."""
    made = []
    for outside, kernel in layers:
        made.append(Convolution(inside, outside, kernel, same=True))
        inside = outside
    return nn.Sequential(*made)


def _pooled(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Convolution(inside, outside, (1, 1)))


class _Modules:
    """The five kinds of module, with channels scaled."""

    def __init__(self, width: float) -> None:
        self.width = width

    def of(self, channels: int) -> int:
        return max(int(channels * self.width), 2)

    def fives(self, inside: int, pooled: int) -> SideBySide:
        """1x1, 5x5, two 3x3, pooling: at 35x35."""
        of = self.of
        return SideBySide(
            _tower(inside, (of(64), (1, 1))),
            _tower(inside, (of(48), (1, 1)), (of(64), (5, 5))),
            _tower(inside, (of(64), (1, 1)), (of(96), (3, 3)), (of(96), (3, 3))),
            _pooled(inside, of(pooled)),
        )

    def sevens(self, inside: int, between: int) -> SideBySide:
        """7x7 as 1x7 and 7x1: at 17x17."""
        of, c = self.of, self.of(between)
        return SideBySide(
            _tower(inside, (of(192), (1, 1))),
            _tower(inside, (c, (1, 1)), (c, (1, 7)), (of(192), (7, 1))),
            _tower(inside, (c, (1, 1)), (c, (7, 1)), (c, (1, 7)), (c, (7, 1)), (of(192), (1, 7))),
            _pooled(inside, of(192)),
        )

    def wide(self, inside: int) -> SideBySide:
        """3x3 as 1x3 beside 3x1: at 8x8."""
        of = self.of

        def split(inner: int) -> SideBySide:
            return SideBySide(_tower(inner, (of(384), (1, 3))), _tower(inner, (of(384), (3, 1))))

        return SideBySide(
            _tower(inside, (of(320), (1, 1))),
            nn.Sequential(*_tower(inside, (of(384), (1, 1))), split(of(384))),
            nn.Sequential(*_tower(inside, (of(448), (1, 1)), (of(384), (3, 3))), split(of(384))),
            _pooled(inside, of(192)),
        )

    def halve_to_17(self, inside: int) -> SideBySide:
        of = self.of
        return SideBySide(
            Convolution(inside, of(384), (3, 3), 2),
            nn.Sequential(*_tower(inside, (of(64), (1, 1)), (of(96), (3, 3))), Convolution(of(96), of(96), (3, 3), 2)),
            nn.MaxPool2d(3, 2),
        )

    def halve_to_8(self, inside: int) -> SideBySide:
        of = self.of
        long = _tower(inside, (of(192), (1, 1)), (of(192), (1, 7)), (of(192), (7, 1)))
        return SideBySide(
            nn.Sequential(*_tower(inside, (of(192), (1, 1))), Convolution(of(192), of(320), (3, 3), 2)),
            nn.Sequential(*long, Convolution(of(192), of(192), (3, 3), 2)),
            nn.MaxPool2d(3, 2),
        )


class InceptionV3(nn.Module):
    """The whole model; `repeats` is how many modules of each size there are, (3, 4, 2) in the paper."""

    def __init__(
        self, *, classes: int, width: float = 1.0, repeats: Sequence[int] = (3, 4, 2), second_head: bool = True,
        dropout: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__()
        make = _Modules(width)
        of = make.of
        self.stem = nn.Sequential(
            Convolution(3, of(32), (3, 3), 2), Convolution(of(32), of(32), (3, 3)),
            Convolution(of(32), of(64), (3, 3), same=True), nn.MaxPool2d(3, 2), Convolution(of(64), of(80), (1, 1)),
            Convolution(of(80), of(192), (3, 3)), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        early: list[nn.Module] = []
        inside = of(192)
        for number in range(repeats[0]):
            pooled = 64 if number else 32
            early.append(make.fives(inside, pooled))
            inside = of(64) + of(64) + of(96) + of(pooled)
        early.append(make.halve_to_17(inside))
        inside += of(384) + of(96)
        for between in SEVENS[: repeats[1]]:
            early.append(make.sevens(inside, between))
            inside = 4 * of(192)
        self.early = nn.Sequential(*early)
        self.second = _SecondHead(inside, of(128), of(768), classes) if second_head else None
        late: list[nn.Module] = [make.halve_to_8(inside)]
        inside += of(320) + of(192)
        for _ in range(repeats[2]):
            late.append(make.wide(inside))
            inside = of(320) + 4 * of(384) + of(192)
        self.late = nn.Sequential(*late)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(inside, classes)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.early(self.stem(pixels))
        second = self.second(x) if self.second is not None and self.training else None
        return self.head(self.dropout(self.late(x).mean((2, 3)))), second


class _SecondHead(nn.Module):
    """Reads the 17x17 features, so that early layers get a gradient of their own."""

    def __init__(self, inside: int, narrow: int, wide: int, classes: int) -> None:
        super().__init__()
        self.narrow, self.wide = Convolution(inside, narrow, (1, 1)), Convolution(narrow, wide, (5, 5))
        self.head = nn.Linear(wide, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wide(self.narrow(F.avg_pool2d(x, 5, 3))).mean((2, 3)))


def inception_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of both heads; the second counts 0.3."""
    logits, second = model(batch["pixel_values"])
    loss = F.cross_entropy(logits, batch["labels"])
    return loss if second is None else loss + 0.3 * F.cross_entropy(second, batch["labels"])
