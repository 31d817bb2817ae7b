"""A convolutional GAN as in PyTorch's examples: two networks with batch norm, two optimizers, D and G in turns.

Both steps are given both networks. D is trained on real and on made images, which are cut off from G; G is trained through D,
whose running statistics move while its parameters stay. The loop logs both losses and D's opinions, draws samples from fixed
noise in eval mode, and its last batch is smaller.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.loops.two_ways import MakeStep, Run, assert_whole, both_ways
from torch import nn

NOISE, WIDTH, CHANNELS, ROWS, EPOCHS = 6, 6, 2, 6, 3
REAL, FAKE = 1.0, 0.0
SAMPLE_EVERY = 3
Modules = dict[str, nn.Module]
Batch = dict[str, torch.Tensor]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NOISE, 2 * WIDTH, 4, 1, 0, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(True),
            nn.ConvTranspose2d(WIDTH, CHANNELS, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(CHANNELS, WIDTH, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * WIDTH, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.main(images).view(-1, 1).squeeze(1)


def weights_init(module: nn.Module) -> None:
    name = module.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


criterion = nn.BCELoss()


def discriminator_loss(nets: Modules, batch: Batch) -> tuple[torch.Tensor, Batch]:
    real = batch["images"]
    labels = torch.full((real.size(0),), REAL, dtype=real.dtype, device=real.device)
    on_real = nets["D"](real)
    error_real = criterion(on_real, labels)
    made = nets["G"](batch["noise"])
    on_made = nets["D"](made.detach())
    error_made = criterion(on_made, torch.full_like(labels, FAKE))
    return error_real + error_made, {"on_real": on_real.mean(), "on_made": on_made.mean()}


def generator_loss(nets: Modules, batch: Batch) -> tuple[torch.Tensor, Batch]:
    on_made = nets["D"](nets["G"](batch["noise"]))
    labels = torch.full_like(on_made, REAL)
    return criterion(on_made, labels), {"on_made": on_made.mean()}


def train(make_step: MakeStep) -> Run:
    torch.manual_seed(999)
    nets: Modules = {"G": Generator(), "D": Discriminator()}
    for net in nets.values():
        net.apply(weights_init)
    images = torch.rand(16, CHANNELS, 16, 16) * 2 - 1
    fixed_noise = torch.randn(3, NOISE, 1, 1)
    optimizers = {name: torch.optim.Adam(nets[name].parameters(), lr=2e-3, betas=(0.5, 0.999)) for name in ("D", "G")}
    loader = torch.utils.data.DataLoader(images, ROWS, shuffle=True, generator=torch.Generator().manual_seed(0))
    steps: dict[str, Any] = {}
    log: list[dict[str, Any]] = []
    for epoch in range(EPOCHS):
        for number, real in enumerate(loader):
            batch = {"images": real, "noise": torch.randn(real.size(0), NOISE, 1, 1)}
            if not steps:
                steps["D"] = make_step(nets, discriminator_loss, optimizers["D"], batch)
                steps["G"] = make_step(nets, generator_loss, optimizers["G"], batch)
            error_d, seen = steps["D"](batch)
            error_g, again = steps["G"](batch)
            log.append({
                "epoch": epoch, "number": number, "loss_D": error_d.item(), "loss_G": error_g.item(),
                "D(x)": seen["on_real"].mean().item(), "D(G(z)) before": seen["on_made"].mean().item(),
                "D(G(z)) after": again["on_made"].mean().item(),
            })  # fmt: skip
            if len(log) % SAMPLE_EVERY == 0:
                nets["G"].eval()
                with torch.no_grad():
                    log[-1]["sample"] = nets["G"](fixed_noise).abs().mean().item()
                nets["G"].train()
    return Run(nets, optimizers, log)


def test_dcgan_trains_as_in_eager() -> None:
    _, makes = both_ways(train)
    assert_whole(makes)
    assert max(step.captures for step in makes.made) <= 2  # the last batch of an epoch has another size
