"""Zoo entries whose loss reads more than one module: a GAN with a gradient penalty, a student with an EMA teacher."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.case import NUM_BATCHES, Built
from tests.zoo.plain import _vector_batches
from torch import nn

NOISE, WIDTH, ROWS = 6, 10, 5


def critic_loss(models: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Wasserstein loss with the gradient penalty: the backward of this step is a second derivative."""
    critic, real = models["critic"], batch["real"]
    fake = models["generator"](batch["noise"]).detach()
    mixed = (real + batch["mix"] * (fake - real)).requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return critic(fake).mean() - critic(real).mean() + 10.0 * penalty


def generator_loss(models: dict[str, nn.Module], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return -models["critic"](models["generator"](batch["noise"])).mean()


def wgan_gp() -> Built:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH))
    critic = nn.Sequential(nn.Linear(WIDTH, 16), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(16, 1))
    models = {"generator": generator, "critic": critic}
    batches: list[Any] = []
    for index in range(NUM_BATCHES):
        source = torch.Generator().manual_seed(index)
        real, noise = (torch.randn(ROWS, width, generator=source) for width in (WIDTH, NOISE))
        batches.append({"real": real, "noise": noise, "mix": torch.rand(ROWS, 1, generator=source)})
    edges = [batches[0] | {"mix": torch.zeros(ROWS, 1)}, batches[0] | {"noise": batches[0]["noise"] * 100}]
    partner = Built(models, batches, generator_loss, edges, trained=generator.parameters)
    return Built(models, batches, critic_loss, edges, trained=critic.parameters, partner=partner)


def teacher_student() -> Built:
    """The teacher is in no argument: the loss reaches it through its closure, the loop moves it between steps."""
    torch.manual_seed(0)
    student = nn.Sequential(nn.Linear(20, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 10))
    teacher = copy.deepcopy(student).eval().requires_grad_(False)

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(batch["x"])
        with torch.no_grad():
            target = teacher(batch["x"]).softmax(-1)
        return F.cross_entropy(logits, batch["y"]) + F.kl_div(logits.log_softmax(-1), target, reduction="batchmean")

    @torch.no_grad()
    def follow() -> None:
        for mine, its in zip(teacher.parameters(), student.parameters()):
            mine.lerp_(its, 0.2)

    batches, edges = _vector_batches(20, 10)
    return Built(student, batches, loss_fn, edges, between_steps=follow)
