"""Adversarial training: a Wasserstein GAN with gradient penalty (Gulrajani et al., 2017) that draws digits.

In: sizes. Out: a Training of two parts over the same two modules. An iteration is five steps of the critic and one of the
generator. The penalty is on the critic's slope, so the critic's backward holds a second derivative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep.bench.workload import Part, StepCall, Training
from wholestep.bench.workloads.making import DIFFERENT, cycled, drawn, moved
from wholestep.data.digits import DigitBatches
from wholestep.data.draws import generator_for
from wholestep.data.windows import Batch

NOISE = 128
PENALTY = 10.0
CRITIC_STEPS = 5

Modules = dict[str, nn.Module]


class Growing(nn.Module):
    """A residual block of the generator: twice the size, half the channels."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inside), nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.interpolate(F.relu(self.norm1(x)), scale_factor=2.0))
        return self.conv2(F.relu(self.norm2(y))) + self.shortcut(F.interpolate(x, scale_factor=2.0))


class Shrinking(nn.Module):
    """A residual block of the critic: half the size. Its norm is per image, for the penalty is per image."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(1, inside), nn.Conv2d(inside, inside, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.GroupNorm(1, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.shortcut = nn.Conv2d(inside, outside, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return F.avg_pool2d(y, 2) + self.shortcut(F.avg_pool2d(x, 2))


class Generator(nn.Module):
    """Noise in, images out."""

    def __init__(self, *, image: int, width: int, blocks: int) -> None:
        super().__init__()
        self.side, self.most = image // 2**blocks, width * 2 ** (blocks - 1)
        self.first = nn.Linear(NOISE, self.most * self.side**2)
        channels = [self.most, *(max(self.most >> (n + 1), width) for n in range(blocks))]
        self.blocks = nn.Sequential(*(Growing(a, b) for a, b in itertools.pairwise(channels)))
        self.norm, self.last = nn.BatchNorm2d(channels[-1]), nn.Conv2d(channels[-1], 1, 3, padding=1)

    def forward(self, noise: Tensor) -> Tensor:
        x = self.first(noise).view(-1, self.most, self.side, self.side)
        return torch.tanh(self.last(F.relu(self.norm(self.blocks(x)))))


class Critic(nn.Module):
    """Images in, one opinion each out."""

    def __init__(self, *, image: int, width: int, blocks: int) -> None:
        super().__init__()
        side, channels = image // 2**blocks, [width, *(width * 2 ** min(n + 1, blocks - 1) for n in range(blocks))]
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Shrinking(a, b) for a, b in itertools.pairwise(channels)))
        self.last = nn.Linear(channels[-1] * side**2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(images)).flatten(1)).squeeze(1)


def critic_loss(models: Modules, batch: Batch) -> Tensor:
    """The critic tells real images from made ones; its slope between them is held near 1."""
    critic, real = models["critic"], batch["real"]
    made = models["generator"](batch["noise"]).detach()
    between = (real + batch["share"] * (made - real)).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    return critic(made).mean() - critic(real).mean() + PENALTY * penalty


def generator_loss(models: Modules, batch: Batch) -> Tensor:
    """The generator raises the critic's opinion of what it makes."""
    return -models["critic"](models["generator"](batch["noise"])).mean()


def build_wgan(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """Both parts, with the paper's Adam."""
    image, rows = sizes["image"], sizes["batch"]
    shape = {"image": image, "width": sizes["width"], "blocks": sizes["blocks"]}
    models: Modules = drawn(seed, device, lambda: {"generator": Generator(**shape), "critic": Critic(**shape)})
    digits = DigitBatches(image=image, channels=1, batch=rows, seed=seed, device=device)

    def make(number: int) -> Batch:
        generator = generator_for(seed, number, "noise")
        noise, share = torch.randn(rows, NOISE, generator=generator), torch.rand(rows, 1, 1, 1, generator=generator)
        real = digits.batch(number)["pixel_values"].clamp(-1, 1)  # where tanh can reach
        return {"real": real} | moved({"noise": noise, "share": share}, device)

    batches = cycled(make, device, count=2 * DIFFERENT)
    parts = [
        Part(
            name=name, model=models, loss_fn=loss_fn, example_batch=example,
            optimizer=torch.optim.Adam(
                models[name].parameters(), lr=sizes["lr"], betas=(0.0, 0.9), fused=device.type == "cuda" or None
            ),
        )
        for name, loss_fn, example in (
            ("critic", critic_loss, batches(0)), ("generator", generator_loss, {"noise": batches(0)["noise"]})
        )
    ]  # fmt: skip

    def iterate(calls: Sequence[StepCall], number: int) -> Tensor:
        """Five steps of the critic, one of the generator; the critic's last loss is reported."""
        train_critic, train_generator = calls
        for turn in range(CRITIC_STEPS):
            loss = train_critic(batches(number * (CRITIC_STEPS + 1) + turn))
        train_generator({"noise": batches(number * (CRITIC_STEPS + 1) + CRITIC_STEPS)["noise"]})
        return loss

    return Training(parts=parts, iterate=iterate, units=rows * CRITIC_STEPS, precision=sizes["precision"])
