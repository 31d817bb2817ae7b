"""A Wasserstein GAN with gradient penalty: two optimizers over shared modules are two Steps.

Each Step is given all modules its loss reads, and trains exactly the parameters of its optimizer. The critic's loss
holds a gradient (the penalty on the critic's slope), so its backward is a second derivative. Noise is drawn inside
the losses; it is part of the step and repeats with its seed.

    python examples/gan.py --steps 500
"""

from __future__ import annotations

import argparse
import math
import sys
import time

import torch
from torch import nn

import wholestep

NOISE, WIDTH, ROWS, MODES = 8, 64, 128, 8
CRITIC_STEPS = 3
"""Critic steps per generator step."""
PENALTY = 1.0

Modules = dict[str, nn.Module]


def perceptron(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


def modes() -> torch.Tensor:
    """The centres of the data: points on a circle of radius 2."""
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return 2 * torch.stack([angles.cos(), angles.sin()], dim=1)


def critic_loss(models: Modules, real: torch.Tensor) -> torch.Tensor:
    """The critic tells real points from made ones; its slope between them is held near 1."""
    critic = models["critic"]
    made = models["generator"](torch.randn(real.shape[0], NOISE)).detach()
    between = (real + torch.rand(real.shape[0], 1) * (made - real)).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return critic(made).mean() - critic(real).mean() + PENALTY * penalty


def generator_loss(models: Modules, real: torch.Tensor) -> torch.Tensor:
    """The generator raises the critic's opinion of what it makes."""
    return -models["critic"](models["generator"](torch.randn(real.shape[0], NOISE))).mean()


@torch.no_grad()
def distance_to_data(generator: nn.Module) -> tuple[float, int]:
    """How far made points lie from the nearest mode on average, and how many modes are hit."""
    points = generator(torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(5)))
    nearest = torch.cdist(points, modes()).min(dim=1)
    hit = nearest.indices[nearest.values < 0.5]
    return float(nearest.values.mean()), len(hit.unique())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="generator steps")
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    torch.manual_seed(0)
    models: Modules = {"generator": perceptron(NOISE, 2), "critic": perceptron(2, 1)}
    source = torch.Generator().manual_seed(1)

    def real_points() -> torch.Tensor:
        chosen = modes()[torch.randint(0, MODES, (ROWS,), generator=source)]
        return chosen + 0.1 * torch.randn(ROWS, 2, generator=source)

    optimizers = {name: torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.9)) for name, m in models.items()}
    train_critic = wholestep.compile(models, critic_loss, optimizers["critic"], real_points(), backend=given.backend)
    train_generator = wholestep.compile(
        models, generator_loss, optimizers["generator"], real_points(), backend=given.backend
    )
    print(f"captured: {train_critic.rung} of the critic, {train_generator.rung} of the generator")
    before, _ = distance_to_data(models["generator"])
    began = time.perf_counter()
    for number in range(1, given.steps + 1):
        for _ in range(CRITIC_STEPS):
            gap = -train_critic(real_points())
        train_generator(real_points())
        if number % max(given.steps // 5, 1) == 0:
            mean, hit = distance_to_data(models["generator"])
            print(
                f"step {number:4d}  critic sees a gap of {float(gap):6.3f}  distance to data {mean:.3f}  modes {hit}/{MODES}"
            )
    after, hit = distance_to_data(models["generator"])
    print(f"distance of made points to the data: {before:.3f} -> {after:.3f} in {time.perf_counter() - began:.1f} s")
    return 0 if after < before else 1


if __name__ == "__main__":
    sys.exit(main())
