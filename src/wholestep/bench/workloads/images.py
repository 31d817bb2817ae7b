"""Image classification: ResNet-50, Inception-v3 and a vision transformer on handwritten digits.

In: sizes. Out: a Training. The digits are enlarged to what the model expects; a head of 1,000 classes uses ten of them, so the
work is that of ImageNet while the data are real and on every machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.inception import InceptionV3, inception_loss
from wholestep.bench.workloads.making import cycled, drawn
from wholestep.bench.workloads.vision_transformer import ViT
from wholestep.data.digits import DigitBatches
from wholestep.train.models.resnet import ResNet, ResNetConfig, class_loss
from wholestep.train.optimizers import make_optimizer


def build_resnet(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """ResNet with momentum, as it has always been trained."""
    config = ResNetConfig(
        depth=sizes["depth"], width=sizes["width"], image_size=sizes["image"], channels=3, classes=sizes["classes"],
        stem=sizes["stem"],
    )  # fmt: skip
    model = drawn(seed, device, lambda: ResNet(config))
    optimizer = make_optimizer("sgd", model, lr=sizes["lr"], weight_decay=5e-5)
    return _training(model, class_loss, optimizer, sizes, device, seed)


def build_inception(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """Inception-v3 with its second head, which is there for training alone."""
    model = drawn(
        seed, device,
        lambda: InceptionV3(
            classes=sizes["classes"], width=sizes["width"], repeats=sizes["repeats"], second_head=sizes["second_head"],
            dropout=sizes["dropout"],
        ),
    )  # fmt: skip
    optimizer = make_optimizer("sgd", model, lr=sizes["lr"], weight_decay=4e-5)
    return _training(model, inception_loss, optimizer, sizes, device, seed)


def build_vit(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """A vision transformer with AdamW and clipping."""
    model = drawn(
        seed, device,
        lambda: ViT(
            image=sizes["image"], patch=sizes["patch"], width=sizes["width"], layers=sizes["layers"], heads=sizes["heads"],
            classes=sizes["classes"],
        ),
    )  # fmt: skip
    optimizer = make_optimizer("adamw", model, lr=sizes["lr"], weight_decay=0.05)
    return _training(model, class_loss, optimizer, sizes, device, seed, clip_norm=1.0)


def _training(
    model: nn.Module, loss_fn: Any, optimizer: Optimizer, sizes: dict[str, Any], device: torch.device, seed: int,
    clip_norm: float | None = None,
) -> Training:  # fmt: skip
    digits = DigitBatches(image=sizes["image"], channels=3, batch=sizes["batch"], seed=seed, device=device)
    batches = cycled(digits.batch, device)
    part = Part(
        name="model", model=model, loss_fn=loss_fn, optimizer=optimizer, example_batch=batches(0), clip_norm=clip_norm
    )
    return one_part(part, batches, units=sizes["batch"], precision=sizes["precision"])
