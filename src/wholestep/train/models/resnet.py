"""ResNet-18 and ResNet-50: images in, logits of classes out.

The last norm of every block starts at zero, so each block starts as the identity. The `small` stem (one 3x3 convolution, no
pooling) is for images of up to 64 pixels, which the usual stem would shrink by four before the first block.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.train.models.configs import LAYERS, ResNetConfig


def _convolution(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


class Basic(nn.Module):
    """Two 3x3 convolutions around a residual: ResNet-18."""

    growth = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(inside, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _convolution(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inside, width, stride)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 around a residual: ResNet-50. The 3x3 has the stride."""

    growth = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * self.growth
        self.conv1, self.norm1 = _convolution(inside, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _convolution(width, outside, 1), nn.BatchNorm2d(outside)
        self.shortcut = _shortcut(inside, outside, stride)
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    if inside == outside and stride == 1:
        return nn.Identity()
    return nn.Sequential(_convolution(inside, outside, 1, stride), nn.BatchNorm2d(outside))


class ResNet(nn.Module):
    """The whole model."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        kind = Basic if config.depth == 18 else Bottleneck
        if config.stem == "small":
            self.stem = nn.Sequential(
                _convolution(config.channels, config.width, 3), nn.BatchNorm2d(config.width), nn.ReLU()
            )
        else:
            self.stem = nn.Sequential(
                _convolution(config.channels, config.width, 7, 2), nn.BatchNorm2d(config.width), nn.ReLU(),
                nn.MaxPool2d(3, 2, padding=1),
            )  # fmt: skip
        stages, inside = [], config.width
        for stage, count in enumerate(LAYERS[config.depth]):
            width = config.width * 2**stage
            for number in range(count):
                stages.append(kind(inside, width, 2 if stage and not number else 1))
                inside = width * kind.growth
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(inside, config.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixels)).mean((2, 3)))


def class_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the right class."""
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])
