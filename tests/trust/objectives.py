"""Objectives that change as repositories change them: noise levels, masks, margins, classes, heads, schedules in the loss."""

from __future__ import annotations

import copy
import math
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, labelled, momentum, mse, pairs, sgd, tokens, train
from torch import nn

case, more = cases_of("objectives")


@more
def inner_loop_by_functional_calls() -> Made:
    """MAML over two tasks of the batch, as many inner steps as a number says."""
    held = {"inner": 1, "rate": 0.1}

    def loss(m: Any, b: Any) -> torch.Tensor:
        total = 0.0
        for x, y in zip(b[0].chunk(2), b[1].chunk(2)):
            weights = dict(m.named_parameters())
            for _ in range(held["inner"]):
                inner = F.mse_loss(torch.func.functional_call(m, weights, (x,)), y)
                slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {k: w - held["rate"] * g for (k, w), g in zip(weights.items(), slopes)}
            total = total + F.mse_loss(torch.func.functional_call(m, weights, (x,)), y)
        return total

    def change(i: int) -> None:
        held["inner"] = 1 + i // 3
        held["rate"] = 0.1 / (1 + i)

    return train(loss, change)


@more
def noise_level_by_a_table_of_betas() -> Made:
    """DDPM: tables are buffers, the offset of times moves, the parametrisation switches."""

    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.objective = Net(), "noise"
            self.register_buffer("alphas", torch.linspace(0.99, 0.5, 10).cumprod(0), persistent=False)

        def forward(self, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            a = self.alphas[t][:, None]
            noisy = a.sqrt() * x + (1 - a).sqrt() * noise
            wanted = {"noise": noise, "velocity": a.sqrt() * noise - (1 - a).sqrt() * x}[self.objective]
            return F.mse_loss(self.net(noisy), wanted[:, :3])

    model = Diffusion()
    source = torch.Generator().manual_seed(9)
    batches = [
        (x, torch.randn(8, 6, generator=source), torch.randint(0, 10, (8,), generator=source)) for x, _ in pairs()
    ]

    def change(i: int) -> None:
        if i == 2:
            model.objective = "velocity"
        if i == 4:
            model.alphas = torch.linspace(0.9, 0.1, 10)

    return train(lambda m, b: m(*b), change, model=model, batches=batches)


@more
def tokens_masked_by_a_rising_share() -> Made:
    """MaskGIT-like: how many of a given order are masked is a number of the trainer."""
    clock = types.SimpleNamespace(share=0.2, token=10)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    orders = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(k)) for k in range(4)])

    def loss(m: Any, b: Any) -> torch.Tensor:
        masked = orders < int(clock.share * 7)
        out = m(torch.where(masked, clock.token, b))
        per_token = F.cross_entropy(out.flatten(0, 1), b.flatten(), reduction="none")
        return (per_token * masked.flatten()).sum() / masked.sum().clamp(min=1)

    return train(loss, lambda i: setattr(clock, "share", 0.2 + 0.13 * i), model=model, batches=tokens())


@more
def consistency_with_a_ramp() -> Made:
    """Mean teacher with a sigmoid ramp that the loss computes from its own epoch."""
    student, epochs = Net(), {"now": 0}
    teacher = copy.deepcopy(student)

    def ramp(now: float, length: float) -> float:
        return math.exp(-5 * (1 - np.clip(now, 0.0, length) / length) ** 2)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(b[0] + 0.01)
        return mse(m, b) + ramp(epochs["now"], 4) * F.mse_loss(m(b[0]), wanted)

    def after(i: int) -> None:
        epochs["now"] += 1
        with torch.no_grad():
            for p, q in zip(student.parameters(), teacher.parameters()):
                q.mul_(0.9).add_(p, alpha=0.1)

    return train(loss, model=student, after=after)


@more
def focal_loss_with_counted_classes() -> Made:
    """Weights by how often each class was seen so far, counted by the loss."""
    counts = torch.ones(3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        counts.add_(torch.bincount(b[1], minlength=3))
        weight = counts.sum() / counts
        plain = F.cross_entropy(m(b[0]), b[1], weight=weight / weight.sum(), reduction="none")
        return ((1 - (-plain).exp()) ** 2 * plain).mean()

    return train(loss, batches=labelled(), state=lambda: counts.clone())


@more
def margins_that_follow_the_epoch() -> Made:
    """ArcFace: the margin is set on the head by the loop; its cosine is precomputed by a setter."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 6))
            self.margin = 0.1

        @property
        def margin(self) -> float:
            return self._margin

        @margin.setter
        def margin(self, value: float) -> None:
            self._margin, self.cos_m, self.sin_m = value, math.cos(value), math.sin(value)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            cosine = F.linear(F.normalize(x), F.normalize(self.weight))
            sine = (1 - cosine.square()).clamp(min=1e-6).sqrt()
            hot = F.one_hot(y, 3)
            return F.cross_entropy(4 * torch.where(hot.bool(), cosine * self.cos_m - sine * self.sin_m, cosine), y)

    model = Head()
    return train(
        lambda m, b: m(*b), lambda i: setattr(model, "margin", 0.1 + 0.05 * i), model=model, batches=labelled()
    )


@more
def sequence_length_by_a_curriculum_of_stages() -> Made:
    stages = [(0, 3), (2, 5), (4, 7)]
    clock = {"step": 0}
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))

    def loss(m: Any, b: Any) -> torch.Tensor:
        length = [n for first, n in stages if clock["step"] >= first][-1]
        ids = b[:, :length]
        return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return train(loss, lambda i: clock.update(step=i), model=model, batches=tokens())


@more
def experts_with_a_balance_that_moves() -> Made:
    """Biases of the router that no gradient moves: the loop raises those of idle experts (DeepSeek)."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 3) for _ in range(3))
            self.register_buffer("bias", torch.zeros(3))
            self.register_buffer("load", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.router(x).softmax(1)
            chosen = (scores + self.bias).argmax(1)
            if self.training:
                self.load += F.one_hot(chosen, 3).sum(0)
            picked = F.one_hot(chosen, 3) * scores
            return sum(picked[:, k : k + 1] * expert(x) for k, expert in enumerate(self.experts))

    model = Mixture()

    def after(i: int) -> None:
        with torch.no_grad():
            model.bias += 0.05 * torch.sign(model.load.mean() - model.load)
            model.load.zero_()

    return train(model=model, after=after)


@more
def loss_with_history_for_plateaus() -> Made:
    """The loop keeps losses of its own evaluation and lowers a weight when they stall."""
    model = Net()
    history: list[float] = []
    held = {"weight": 1.0}

    def after(i: int) -> None:
        model.eval()
        with torch.no_grad():
            history.append(mse(model, pairs()[0]).item())
        model.train()
        if len(history) > 1 and history[-1] > 0.9 * history[-2]:
            held["weight"] *= 0.5

    return train(lambda m, b: mse(m, b) * held["weight"], model=model, after=after, state=lambda: [history, held])


@more
def labels_relabelled_by_the_model() -> Made:
    """Noisy labels: from step 3 on the model's own answers replace them, kept per sample in a dictionary of the dataset."""
    model = Net()
    batches = labelled()
    corrected: dict[int, torch.Tensor] = {}
    data = [(x, y, i) for i, (x, y) in enumerate(batches)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), corrected.get(b[2], b[1]))

    def change(i: int) -> None:
        if i >= 3:
            with torch.no_grad():
                corrected[i] = model(batches[i][0]).argmax(1)

    return train(loss, change, model=model, batches=data)


@more
def gradients_centralised_by_hooks_that_switch() -> Made:
    model = Net()
    flags = {"central": False}

    def centralise(g: torch.Tensor) -> torch.Tensor:
        return g - g.mean(1, keepdim=True) if flags["central"] else g

    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(centralise)
    return train(model=model, change=lambda i: flags.update(central=i in (2, 3, 4)), optimizer=momentum)


@more
def cross_entropy_with_a_prior_that_is_estimated() -> Made:
    """Logit adjustment: a prior from numpy counts, remade each epoch."""
    prior = {"counts": np.array([1.0, 2.0, 3.0])}

    def loss(m: Any, b: Any) -> torch.Tensor:
        share = prior["counts"] / prior["counts"].sum()
        return F.cross_entropy(m(b[0]) + torch.from_numpy(np.log(share)).float(), b[1])

    def change(i: int) -> None:
        if i == 2:
            prior["counts"] = np.array([5.0, 1.0, 1.0])
        if i == 4:
            prior["counts"][2] = 50.0

    return train(loss, change, batches=labelled())


@more
def dictionary_of_criteria_with_weights_by_epoch() -> Made:
    criteria = {"ce": nn.CrossEntropyLoss(), "margin": nn.MultiMarginLoss()}
    weights = {"ce": lambda e: 1.0, "margin": lambda e: 0.0 if e < 2 else 0.1 * e}
    clock = {"epoch": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        total = torch.zeros(())
        for name, criterion in criteria.items():
            w = weights[name](clock["epoch"])
            if w > 0:
                total = total + w * criterion(out, b[1])
        return total

    return train(loss, lambda i: clock.update(epoch=i), batches=labelled())


@more
def swapped_between_two_heads_by_the_batch() -> Made:
    """Multi-dataset training: the batch names its head."""
    model = nn.ModuleDict({"trunk": nn.Linear(6, 8), "one": nn.Linear(8, 3), "two": nn.Linear(8, 3)})
    batches = [{"x": x, "y": y, "task": ("one", "two")[i % 2]} for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: F.mse_loss(m[b["task"]](m["trunk"](b["x"])), b["y"])  # noqa: E731
    return train(loss, model=model, batches=batches, optimizer=adamw)


@more
def cosine_schedule_computed_in_the_loss_of_a_closure() -> Made:
    """The trainer's global_step is a property of the optimizer's own count."""
    model = Net()
    optimizer = adamw(model.parameters())
    trainer = types.SimpleNamespace(done=0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) * 0.5 * (1 + math.cos(math.pi * trainer.done / STEPS))

    return train(loss, model=model, optimizer=optimizer, after=lambda i: setattr(trainer, "done", i + 1))


@more
def criterion_of_labels_that_are_ignored_later() -> Made:
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "ignore_index", 1), batches=labelled())


@more
def cross_entropy_of_a_changing_subset_of_classes() -> Made:
    """Continual learning: logits of unseen classes are masked by a list that grows."""
    seen = [0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        masked = torch.full_like(out, -1e4)
        masked[:, seen] = out[:, seen]
        return F.cross_entropy(masked, b[1].clamp(max=len(seen) - 1))

    def change(i: int) -> None:
        if i in (2, 4):
            seen.append(len(seen))

    return train(loss, change, batches=labelled())


@more
def spectral_norm_of_hooks_switched_off_for_a_while() -> Made:
    """The norm of older repositories: a hook that writes its vectors in training mode only."""
    model = Net()
    nn.utils.spectral_norm(model.a)

    def change(i: int) -> None:
        model.a.train(i not in (2, 3))
        if i == 4:
            nn.utils.remove_spectral_norm(model.a)

    return train(model=model, change=change, optimizer=sgd([model.b.weight, model.b.bias, model.a.weight_orig]))
