"""RetinaNet (Lin et al., 2017): pictures in; for every anchor, logits of classes and four numbers that move it onto an object.

A ResNet sees, a pyramid of features joins what is fine with what is meaningful, and two small networks look at every place of
every level. Which anchor is to find which object is decided in the loss, by overlap, with shapes that never change.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.data.windows import Batch
from wholestep.train.models.resnet import LAYERS, ResNet, ResNetConfig

LEVELS = (3, 4, 5, 6, 7)
"""Level n has one place per 2**n pixels."""
SCALES, RATIOS = (1.0, 2 ** (1 / 3), 2 ** (2 / 3)), (0.5, 1.0, 2.0)
SHAPES = len(SCALES) * len(RATIOS)
FOREGROUND, BACKGROUND = 0.5, 0.4
"""Overlap from which an anchor is to find an object, and up to which it is to find nothing; between, it is not judged."""
PRIOR = 0.01
"""Nearly all anchors see background: they start by saying so."""


def make_anchors(image: int) -> Tensor:
    """[anchors, 4] as centre x, centre y, width, height in pixels, in the order of the network's outputs."""
    levels, side = [], image
    for level in range(1, LEVELS[-1] + 1):
        side = -(-side // 2)
        if level not in LEVELS:
            continue
        stride = 2**level
        centres = (torch.arange(side) + 0.5) * stride
        y, x = torch.meshgrid(centres, centres, indexing="ij")
        shapes = [
            (4 * stride * scale / math.sqrt(ratio), 4 * stride * scale * math.sqrt(ratio))
            for scale, ratio in itertools.product(SCALES, RATIOS)
        ]
        sizes = torch.tensor(shapes)
        places = torch.stack([x, y], dim=2).view(-1, 1, 2).expand(-1, SHAPES, 2)
        levels.append(torch.cat([places, sizes.expand(len(places), SHAPES, 2)], dim=2).flatten(0, 1))
    return torch.cat(levels)


class Look(nn.Module):
    """A few convolutions (four in the paper) and an answer, the same at every place and level."""

    def __init__(self, width: int, layers_inside: int, answers: int, bias: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(layers_inside):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.body, self.last = nn.Sequential(*layers), nn.Conv2d(width, SHAPES * answers, 3, padding=1)
        self.answers = answers
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)
        nn.init.constant_(self.last.bias, bias)

    def forward(self, level: Tensor) -> Tensor:
        """[rows, places * shapes, answers]"""
        return self.last(self.body(level)).permute(0, 2, 3, 1).reshape(len(level), -1, self.answers)


class RetinaNet(nn.Module):
    """The whole model."""

    def __init__(self, *, depth: int, backbone_width: int, image: int, width: int, looks: int, classes: int) -> None:
        super().__init__()
        self.eyes = ResNet(ResNetConfig(depth=depth, width=backbone_width, image_size=image, channels=3, stem="large"))
        self.eyes.head = nn.Identity()
        growth = 4 if depth == 50 else 1
        seen = [backbone_width * 2**stage * growth for stage in (1, 2, 3)]
        self.across = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in seen)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in seen)
        self.sixth = nn.Conv2d(seen[-1], width, 3, 2, padding=1)
        self.seventh = nn.Conv2d(width, width, 3, 2, padding=1)
        self.what = Look(width, looks, classes, -math.log((1 - PRIOR) / PRIOR))
        self.where = Look(width, looks, 4, 0.0)
        self.register_buffer("anchors", make_anchors(image), persistent=False)
        self.stage_ends = tuple(itertools.accumulate(LAYERS[depth]))[1:]

    def pyramid(self, pixels: Tensor) -> list[Tensor]:
        """Levels 3 to 7."""
        x, stages = self.eyes.stem(pixels), []
        for number, block in enumerate(self.eyes.blocks, start=1):
            x = block(x)
            if number in self.stage_ends:
                stages.append(x)
        level = self.across[2](stages[2])
        levels: list[Tensor] = []
        for index in (2, 1, 0):
            if index < 2:
                level = self.across[index](stages[index]) + F.interpolate(level, size=stages[index].shape[2:])
            levels.insert(0, self.smooth[index](level))
        sixth = self.sixth(stages[2])
        return [*levels, sixth, self.seventh(F.relu(sixth))]

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.pyramid(pixels)
        return torch.cat([self.what(v) for v in levels], dim=1), torch.cat([self.where(v) for v in levels], dim=1)


def overlaps(anchors: Tensor, boxes: Tensor) -> Tensor:
    """Intersection over union, [rows, anchors, boxes], of boxes given by centre and size."""
    a, b = anchors[None, :, None], boxes[:, None]
    low = torch.maximum(a[..., :2] - a[..., 2:] / 2, b[..., :2] - b[..., 2:] / 2)
    high = torch.minimum(a[..., :2] + a[..., 2:] / 2, b[..., :2] + b[..., 2:] / 2)
    shared = (high - low).clamp(min=0).prod(dim=3)
    return shared / (a[..., 2:].prod(dim=3) + b[..., 2:].prod(dim=3) - shared)


@torch.no_grad()
def assign(anchors: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(which box each anchor is nearest to, is it to find it, is it judged at all), each [rows, anchors].

    Every object is found by at least the anchor that overlaps it most. Rows with few objects are filled up with boxes of no
    size, which overlap nothing.
    """
    shared = overlaps(anchors, boxes)
    best, nearest = shared.max(dim=2)
    exists = boxes[..., 2] > 0
    ideal = torch.where(exists, shared.argmax(dim=1), len(anchors))
    chosen = torch.zeros(len(boxes), len(anchors) + 1, dtype=torch.bool, device=boxes.device).scatter(1, ideal, True)
    finds = (best >= FOREGROUND) | chosen[:, :-1]
    return nearest, finds, finds | (best < BACKGROUND)


def detection_loss(model: Any, batch: Batch) -> Tensor:
    """Focal loss of the classes and the absolute error of the boxes, per anchor that has something to find."""
    logits, moves = model(batch["pixel_values"])
    logits, moves = logits.float(), moves.float()
    anchors, boxes = model.anchors, batch["boxes"]
    nearest, finds, judged = assign(anchors, boxes)
    count = finds.sum().clamp(min=1)
    labels = batch["labels"].gather(1, nearest)
    target = F.one_hot(labels, logits.shape[2]).to(logits.dtype) * finds[..., None]
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    chance = logits.sigmoid()
    wrong = chance + target - 2 * chance * target
    weight = torch.where(target > 0, 0.25, 0.75) * wrong.square()
    focal = (weight * entropy * judged[..., None]).sum()
    box = boxes.gather(1, nearest[..., None].expand(-1, -1, 4))
    offset, growth = (
        (box[..., :2] - anchors[:, :2]) / anchors[:, 2:],
        (box[..., 2:].clamp(min=1) / anchors[:, 2:]).log(),
    )
    error = (moves - torch.cat([offset, growth], dim=2)).abs().sum(dim=2)
    return (focal + (error * finds).sum()) / count
