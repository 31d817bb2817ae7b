"""Image generation by diffusion: a transformer (DiT) and a U-Net that learn which noise was added to a digit.

In: sizes. Out: a Training. A batch holds the noised images, the noise, the times and the classes: all that is random is drawn
with the data, so two systems that train on the same batches can be compared number by number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, Training, one_part
from wholestep.bench.workloads.making import cycled, drawn, moved
from wholestep.bench.workloads.unet import FREQUENCIES, UNet
from wholestep.bench.workloads.vision_transformer import Attention, perceptron
from wholestep.data.digits import CLASSES, DigitBatches
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch

TIMES = 1000
UNCONDITIONED = 0.1
"""How often the class is withheld, so that the model also learns to draw any digit."""


def time_features(times: Tensor) -> Tensor:
    """Sines and cosines of the time at many frequencies."""
    half = FREQUENCIES // 2
    rates = torch.exp(torch.arange(half, device=times.device) * (-math.log(10_000.0) / half))
    angles = times[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class Block(nn.Module):
    """A transformer layer whose norms are scaled and shifted by the condition, and whose residuals start closed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention, self.perceptron = Attention(width, heads), perceptron(width, "tanh")
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.condition[1].weight)
        nn.init.zeros_(self.condition[1].bias)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(about).unsqueeze(1).chunk(6, dim=2)
        x = x + gate1 * self.attention(self.norm(x) * (1 + scale1) + shift1)
        return x + gate2 * self.perceptron(self.norm(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """Peebles and Xie, 2022: noised images, times and classes in; the noise out."""

    def __init__(self, *, image: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patch, self.side = patch, image // patch
        self.cut = nn.Conv2d(1, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, self.side**2, width))
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch)
        for layer in (self.condition[1], self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, noised: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.cut(noised).flatten(2).transpose(1, 2) + self.position
        about = self.time(time_features(times)) + self.label(labels)
        for block in self.blocks:
            x = block(x, about)
        shift, scale = self.condition(about).unsqueeze(1).chunk(2, dim=2)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.view(len(x), self.side, self.side, self.patch, self.patch, 1).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(noised.shape)


def dit_loss(model: Any, batch: Batch) -> Tensor:
    """Mean square of what was guessed wrong."""
    return F.mse_loss(model(batch["noised"], batch["times"], batch["labels"]), batch["noise"])


def unet_loss(model: Any, batch: Batch) -> Tensor:
    """The same, without classes."""
    return F.mse_loss(model(batch["noised"], time_features(batch["times"])), batch["noise"])


def build_dit(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """DiT with AdamW, no decay, as in the paper."""
    model = drawn(
        seed, device,
        lambda: DiT(
            image=sizes["image"], patch=sizes["patch"], width=sizes["width"], layers=sizes["layers"], heads=sizes["heads"]
        ),
    )  # fmt: skip
    return _training(model, dit_loss, sizes, device, seed, clip_norm=None)


def build_unet(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """The U-Net, clipped."""
    model = drawn(
        seed, device,
        lambda: UNet(
            width=sizes["width"], growth=sizes["growth"], blocks=sizes["blocks"], looks=sizes["looks"],
            groups=sizes["groups"], dropout=sizes["dropout"],
        ),
    )  # fmt: skip
    return _training(model, unet_loss, sizes, device, seed, clip_norm=1.0)


def _training(
    model: nn.Module, loss_fn: Any, sizes: dict[str, Any], device: torch.device, seed: int, clip_norm: float | None
) -> Training:
    image, rows = sizes["image"], sizes["batch"]
    digits = DigitBatches(image=image, channels=1, batch=rows, seed=seed, device=device)
    # The schedule of Ho et al.: variances rise in a straight line from 1e-4 to 0.02.
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), dim=0)

    def make(number: int) -> Batch:
        generator = generator_for(seed, number, "noise")
        times = torch.randint(0, TIMES, (rows,), generator=generator)
        noise = torch.randn(rows, 1, image, image, generator=generator)
        withheld = torch.rand(rows, generator=generator) < UNCONDITIONED
        signal = kept[times].view(-1, 1, 1, 1)
        batch = moved({"noise": noise, "times": times, "withheld": withheld, "signal": signal}, device)
        clean = digits.batch(number)
        labels = torch.where(batch.pop("withheld"), CLASSES, clean["labels"])
        signal = batch.pop("signal")
        noised = signal.sqrt() * clean["pixel_values"] + (1 - signal).sqrt() * batch["noise"]
        return batch | {"noised": noised, "labels": labels}

    batches = cycled(make, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=sizes["lr"], weight_decay=0.0, fused=device.type == "cuda" or None
    )
    part = Part(
        name="model", model=model, loss_fn=loss_fn, optimizer=optimizer, example_batch=batches(0), clip_norm=clip_norm
    )
    return one_part(part, batches, units=rows, precision=sizes["precision"])
