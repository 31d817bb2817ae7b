"""A variational autoencoder as in PyTorch's examples: an epoch of training with summed losses, then a test epoch.

The forward pass draws its noise by `torch.randn_like`. A captured step draws other numbers than eager PyTorch does, from its
own seed, so that variant is compared by `wholestep.verify`, which gives both sides the same ones; and it must learn. In the
second variant the noise comes with the batch, and the whole loop must agree with eager PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from tests.loops.two_ways import MakeStep, Run, WholeSteps, assert_whole, both_ways
from torch import nn

import wholestep

PIXELS, HIDDEN, CODE, ROWS, IMAGES, EPOCHS = 36, 24, 4, 8, 36, 3
"""The last batch of an epoch is half as large."""
Batch = tuple[torch.Tensor, ...]


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(PIXELS, HIDDEN)
        self.fc21, self.fc22 = nn.Linear(HIDDEN, CODE), nn.Linear(HIDDEN, CODE)
        self.fc3, self.fc4 = nn.Linear(CODE, HIDDEN), nn.Linear(HIDDEN, PIXELS)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.fc1(x))
        return self.fc21(hidden), self.fc22(hidden)

    def reparameterize(
        self, mean: torch.Tensor, log_variance: torch.Tensor, noise: torch.Tensor | None
    ) -> torch.Tensor:
        deviation = torch.exp(0.5 * log_variance)
        noise = torch.randn_like(deviation) if noise is None else noise
        return mean + noise * deviation

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code))))

    def forward(
        self, x: torch.Tensor, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(x.view(-1, PIXELS))
        return self.decode(self.reparameterize(mean, log_variance, noise)), mean, log_variance


def loss_function(drawn: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor) -> torch.Tensor:
    """How badly the image is drawn, and how far the code is from a standard normal one; summed over everything."""
    cross_entropy = F.binary_cross_entropy(drawn, x.view(-1, PIXELS), reduction="sum")
    return cross_entropy - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())


def vae_loss(model: VAE, batch: Batch) -> torch.Tensor:
    """`batch`: images, and the noise where the loop draws it."""
    drawn, mean, log_variance = model(*batch)
    return loss_function(drawn, batch[0], mean, log_variance)


def pictures(seed: int) -> torch.Tensor:
    """Bright squares on dark ground, with grey values between 0 and 1."""
    source = torch.Generator().manual_seed(seed)
    found = 0.1 * torch.rand(IMAGES, 1, 6, 6, generator=source)
    for image, (row, column) in zip(found, torch.randint(0, 4, (IMAGES, 2), generator=source).tolist()):
        image[0, row : row + 3, column : column + 3] += 0.8
    return found


def loader(images: torch.Tensor, seed: int) -> Any:
    data = torch.utils.data.TensorDataset(images, torch.zeros(len(images)))
    return torch.utils.data.DataLoader(data, ROWS, shuffle=True, generator=torch.Generator().manual_seed(seed))


def train(make_step: MakeStep, noise_in_batch: bool) -> Run:
    torch.manual_seed(1)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    training, testing, noises = loader(pictures(0), 0), loader(pictures(1), 1), torch.Generator().manual_seed(2)

    def batch_of(images: torch.Tensor) -> Batch:
        return (images, torch.randn(len(images), CODE, generator=noises)) if noise_in_batch else (images,)

    step: Any = None
    log: list[dict[str, Any]] = []
    for epoch in range(1, EPOCHS + 1):
        model.train()
        total = 0.0
        for number, (images, _) in enumerate(training):
            batch = batch_of(images)
            step = step or make_step(model, vae_loss, optimizer, batch)
            loss = step(batch)
            total += loss.item()
            log.append({"epoch": epoch, "number": number, "loss": loss.item() / len(images)})
        model.eval()
        test_loss = 0.0
        with torch.no_grad():
            for images, _ in testing:
                test_loss += vae_loss(model, batch_of(images)).item()
        log.append({"epoch": epoch, "train": total / IMAGES, "test": test_loss / IMAGES})
    return Run({"model": model}, {"optimizer": optimizer}, log)


def test_vae_with_noise_in_the_batch_trains_as_in_eager() -> None:
    run, makes = both_ways(functools.partial(train, noise_in_batch=True))
    assert_whole(makes)
    assert run.log[-1]["test"] < run.log[0]["loss"]


def test_vae_that_draws_in_its_forward_pass_learns() -> None:
    makes = WholeSteps()
    run = train(makes, noise_in_batch=False)
    assert_whole(makes)
    ends = [line["train"] for line in run.log if "train" in line]
    assert ends == sorted(ends, reverse=True), ends


def test_vae_that_draws_in_its_forward_pass_equals_eager_with_the_same_noise() -> None:
    torch.manual_seed(1)
    model = VAE()
    batches = [(images,) for images, _ in loader(pictures(0), 0)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    report = wholestep.verify(model, vae_loss, optimizer, batches, steps=6, backend="interpret")
    assert report.rung == "whole step" and report.ok, str(report)
