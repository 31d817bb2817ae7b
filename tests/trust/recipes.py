"""Recipes of popular repositories, as their training loops write them: averages, mixing, penalties, queues, policies, tasks."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import STEPS, Made, Net, adamw, at, cases_of, labelled, momentum, mse, pairs, sgd, train
from torch import nn

case, more = cases_of("recipes")


class Average:
    """An exponential average with a warm-up of its decay, as diffusion repositories have it."""

    def __init__(self, model: nn.Module, decay: float = 0.9) -> None:
        self.shadow = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @property
    def rate(self) -> float:
        return min(self.decay, (1 + self.updates) / (10 + self.updates))

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.rate).add_(p.detach(), alpha=1 - self.rate)


@case
def average_whose_decay_warms_up() -> Made:
    model = Net()
    average = Average(model)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            target = average.shadow(b[0])
        return mse(m, b) + average.rate * F.mse_loss(m(b[0]), target)

    return train(
        loss, model=model, after=lambda i: average.update(model),
        state=lambda: [average.updates, dict(average.shadow.state_dict())],
    )  # fmt: skip


@more
def average_moved_inside_the_forward() -> Made:
    """BYOL-like: the shadow moves in the forward, by a momentum that a cosine anneals."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.target = copy.deepcopy(self.a).requires_grad_(False)
            self.steps, self.total = 0, 6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tau = 1 - 0.1 * (math.cos(math.pi * self.steps / self.total) + 1) / 2
            with torch.no_grad():
                for p, q in zip(self.a.parameters(), self.target.parameters()):
                    q.data = q.data * tau + p.data * (1 - tau)
            self.steps += 1
            return super().forward(x) + self.target(x)[:, :3].detach()

    model = Model()
    return train(model=model, optimizer=sgd([*model.a.parameters(), *model.b.parameters()]), state=lambda: model.steps)


@more
def mixed_by_numbers_of_the_loop() -> Made:
    """Mixup with everything drawn outside, as attributes."""
    mixing = types.SimpleNamespace(lam=1.0, order=torch.arange(8))

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = mixing.lam * b[0] + (1 - mixing.lam) * b[0][mixing.order]
        out = m(x)
        return mixing.lam * F.mse_loss(out, b[1]) + (1 - mixing.lam) * F.mse_loss(out, b[1][mixing.order])

    def change(i: int) -> None:
        mixing.lam = float(np.random.beta(0.4, 0.4))
        mixing.order = torch.tensor(random.sample(range(8), 8))

    return train(loss, change)


@more
def boxes_cut_and_pasted() -> Made:
    """Cutmix: a box of Python integers that is another one at each step."""
    box = {"x": (0, 2), "y": (0, 2)}
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    source = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, 3, 8, 8, generator=source), torch.randn(4, 3, generator=source)) for _ in range(STEPS)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].clone()
        (x0, x1), (y0, y1) = box["x"], box["y"]
        x[:, :, x0:x1, y0:y1] = b[0].flip(0)[:, :, x0:x1, y0:y1]
        share = 1 - (x1 - x0) * (y1 - y0) / 64
        out = m(x)
        return share * F.mse_loss(out, b[1]) + (1 - share) * F.mse_loss(out, b[1].flip(0))

    corners = [(0, 2), (1, 4), (2, 5), (1, 7), (0, 3), (4, 6)]
    return train(loss, lambda i: box.update(x=corners[i], y=corners[-i]), model=model, batches=batches)


@more
def rates_by_depth_with_decay() -> Made:
    """Layer-wise learning rates, halved when a layer has thawed."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    layers = [m for m in model if isinstance(m, nn.Linear)]
    groups = [{"params": list(m.parameters()), "lr": 0.1 * 0.5 ** (2 - k), "depth": k} for k, m in enumerate(layers)]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for layer in layers[:2]:
        layer.requires_grad_(False)

    def change(i: int) -> None:
        if i in (2, 4):
            layers[2 - i // 2].requires_grad_(True)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    return train(model=model, change=change, optimizer=optimizer)


@more
def perturbed_and_restored_around_the_step() -> Made:
    """SAM in two calls: weights are pushed uphill before the step and put back by the loop after it."""
    model = Net()
    optimizer = sgd(model.parameters())
    held: list[torch.Tensor] = []

    def change(i: int) -> None:
        batch = pairs()[i]
        model.zero_grad()
        mse(model, batch).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        held[:] = []
        with torch.no_grad():
            for p in model.parameters():
                push = 0.05 * p.grad / norm
                p.add_(push)
                held.append(push)

    def after(i: int) -> None:
        with torch.no_grad():
            for p, push in zip(model.parameters(), held):
                p.sub_(push)

    return train(model=model, optimizer=optimizer, change=change, after=after)


@dataclasses.dataclass
class Smoothing:
    start: float = 0.2
    end: float = 0.0
    steps: int = 4

    def at(self, step: int) -> float:
        return self.start + (self.end - self.start) * min(step / self.steps, 1.0)


@more
def smoothing_by_a_schedule_of_a_dataclass() -> Made:
    smoothing, clock = Smoothing(), {"step": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), b[1], label_smoothing=smoothing.at(clock["step"]))

    return train(loss, lambda i: clock.update(step=i), batches=labelled())


@more
def depth_dropped_by_a_schedule() -> Made:
    """Stochastic depth whose rates rise by depth and by time; in this run the draws are given."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.head, self.rates = nn.Linear(6, 3), [0.0, 0.0, 0.0]

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            for k, (block, rate) in enumerate(zip(self.blocks, self.rates)):
                kept = (keep[:, k : k + 1] >= rate).to(x.dtype)
                x = x + torch.tanh(block(x)) * kept / (1 - rate)
            return self.head(x)

    model = Model()
    source = torch.Generator().manual_seed(3)
    batches = [(x, y, torch.rand(8, 3, generator=source)) for x, y in pairs()]

    def change(i: int) -> None:
        model.rates = [0.1 * i * k / 3 for k in range(3)]

    return train(lambda m, b: F.mse_loss(m(b[0], b[2]), b[1]), change, model=model, batches=batches)


@more
def norms_frozen_by_an_overridden_train() -> Made:
    """Detection backbones: `train()` keeps batch norms in evaluation mode."""

    class Model(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            for m in self.modules():
                if isinstance(m, nn.BatchNorm1d) and self.frozen:
                    m.eval()
                    m.weight.requires_grad_(False)
            return self

    model = Model(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.frozen = False

    def change(i: int) -> None:
        model.frozen = i >= 2
        model.train()
        if i == 4:
            model.eval()
            with torch.no_grad():
                model(torch.ones(2, 6))
            model.train()

    return train(model=model, change=change)


@case
def penalty_of_gradients_every_third_step() -> Made:
    """R1: a penalty on the gradient for real data, lazily."""
    clock = {"step": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        if clock["step"] % 3 == 0:
            x = b[0].detach().requires_grad_(True)
            (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
            out = out + 3 * slope.square().sum(1).mean()
        return out

    return train(loss, lambda i: clock.update(step=i), optimizer=adamw)


@more
def lengths_of_paths_regularised() -> Made:
    """StyleGAN's: the mean length is a buffer moved by the loss."""
    mean = torch.zeros(())

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].detach().requires_grad_(True)
        out = m(x)
        (slope,) = torch.autograd.grad((out * b[1]).sum(), x, create_graph=True)
        lengths = slope.square().sum(1).sqrt()
        moved = mean + 0.1 * (lengths.mean().detach() - mean)
        mean.copy_(moved)
        return F.mse_loss(out, b[1]) + (lengths - moved).square().mean()

    return train(loss, state=lambda: mean.clone())


class Queue(nn.Module):
    """Keys of earlier batches, with a pointer in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.register_buffer("keys", F.normalize(torch.randn(4, 24), dim=0))
        self.pointer = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder(x.flip(1)), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.keys.clone().detach()], 1) / 0.2
        with torch.no_grad():
            self.keys[:, self.pointer : self.pointer + len(k)] = k.T
            self.pointer = (self.pointer + len(k)) % self.keys.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@more
def queue_of_keys_that_wraps_around() -> Made:
    model = Queue()
    return train(lambda m, b: m(*b), model=model, state=lambda: model.pointer)


@more
def bank_of_memories_by_index() -> Made:
    """Instance discrimination: memories of the samples in the batch are moved, in place."""
    bank = F.normalize(torch.randn(20, 4), dim=1)
    source = torch.Generator().manual_seed(5)
    batches = [(torch.randn(4, 6, generator=source), torch.randperm(20, generator=source)[:4]) for _ in range(STEPS)]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = F.normalize(m(b[0]), dim=1)
        result = F.cross_entropy(out @ bank.clone().T / 0.1, b[1])
        with torch.no_grad():
            bank[b[1]] = F.normalize(0.5 * bank[b[1]] + 0.5 * out, dim=1)
        return result

    return train(loss, model=nn.Linear(6, 4), batches=batches, state=lambda: bank.clone())


@more
def baseline_of_a_policy_gradient() -> Made:
    """REINFORCE with a moving baseline, kept as a Python number of the agent."""
    agent = types.SimpleNamespace(baseline=0.0)
    source = torch.Generator().manual_seed(6)
    batches = [
        {"x": torch.randn(8, 6, generator=source), "a": torch.randint(0, 3, (8,), generator=source),
         "r": torch.rand(8, generator=source)}
        for _ in range(STEPS)
    ]  # fmt: skip

    def loss(m: Any, b: Any) -> torch.Tensor:
        chosen = m(b["x"]).log_softmax(1).gather(1, b["a"][:, None])[:, 0]
        return -((b["r"] - agent.baseline) * chosen).mean()

    def after(i: int) -> None:
        agent.baseline += 0.1 * (float(batches[i]["r"].mean()) - agent.baseline)

    return train(loss, batches=batches, after=after, state=lambda: agent.baseline)


@more
def replay_of_transitions() -> Made:
    """DQN: a deque of transitions, sampled by Python's generator in the loop; a target that is copied now and then."""
    model = Net()
    target = copy.deepcopy(model)
    memory: deque = deque(maxlen=12)
    source = torch.Generator().manual_seed(7)
    for _ in range(12):
        memory.append((torch.randn(6, generator=source), 1, 0.5, torch.randn(6, generator=source)))
    batches: list[Any] = []
    for _ in range(STEPS):
        x, a, r, n = zip(*random.Random(len(batches)).sample(list(memory), 8))
        batches.append((torch.stack(x), torch.tensor(a), torch.tensor(r), torch.stack(n)))

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = b[2] + 0.9 * target(b[3]).max(1).values
        return F.smooth_l1_loss(m(b[0]).gather(1, b[1][:, None])[:, 0], wanted)

    def after(i: int) -> None:
        memory.append((torch.randn(6, generator=source), 2, 0.1, torch.randn(6, generator=source)))
        if i % 2:
            target.load_state_dict(model.state_dict())

    return train(loss, model=model, batches=batches, after=after)


@more
def policy_clipped_by_an_annealed_range() -> Made:
    """PPO: the clip range and the entropy's weight fall with the progress that remains."""
    algorithm = types.SimpleNamespace(progress=1.0, clip_range=lambda p: 0.2 * p, entropy=0.01)
    source = torch.Generator().manual_seed(8)
    batches = [
        (torch.randn(8, 6, generator=source), torch.randint(0, 3, (8,), generator=source),
         torch.randn(8, generator=source), torch.randn(8, generator=source) * 0.1 - 1)
        for _ in range(STEPS)
    ]  # fmt: skip

    def loss(m: Any, b: Any) -> torch.Tensor:
        log = m(b[0]).log_softmax(1)
        ratio = (log.gather(1, b[1][:, None])[:, 0] - b[3]).exp()
        limit = algorithm.clip_range(algorithm.progress)
        advantage = (b[2] - b[2].mean()) / (b[2].std() + 1e-8)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - limit, 1 + limit) * advantage)
        return -surrogate.mean() + algorithm.entropy * (log.exp() * log).sum(1).mean()

    def change(i: int) -> None:
        algorithm.progress = 1 - i / STEPS
        if i == 4:
            algorithm.clip_range = lambda p: 0.5

    return train(loss, change, batches=batches, options={"clip_norm": 0.5})


@more
def temperature_of_several_kinds() -> Made:
    """A temperature that is a float, then a numpy number, a tensor, a parameter that is not trained."""
    model = Net()
    model.temperature = 1.0
    kinds = {1: 0.5, 2: np.float32(0.7), 3: torch.tensor(0.9), 4: np.float64(2.0), 5: 3}
    return train(
        lambda m, b: F.cross_entropy(m(b[0]) / m.temperature, b[1]),
        lambda i: setattr(model, "temperature", kinds[i]) if i in kinds else None, model=model, batches=labelled(),
    )  # fmt: skip


@more
def loss_scaled_by_hand() -> Made:
    """A dynamic scale in the loop: the loss is multiplied, a hook of each parameter divides."""
    model = Net()
    scaler = types.SimpleNamespace(scale=128.0, good=0)
    for p in model.parameters():
        p.register_hook(lambda g: g / scaler.scale)

    def after(i: int) -> None:
        scaler.good += 1
        if scaler.good % 2 == 0:
            scaler.scale *= 2
        if i == 4:
            scaler.scale = 1.0

    return train(
        lambda m, b: mse(m, b) * scaler.scale, model=model, after=after, state=lambda: scaler.scale, optimizer=adamw
    )


@more
def losses_weighed_by_learned_uncertainty_and_a_switch() -> Made:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.logs = Net(), nn.ParameterDict({"a": nn.Parameter(torch.zeros(()))})
            self.tasks = ["a"]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            terms = {"a": F.mse_loss(out, y), "b": F.l1_loss(out, y)}
            return sum(terms[t] * torch.exp(-self.logs[t]) + self.logs[t] for t in self.tasks)

    model = Weighed()
    optimizer = sgd(model.parameters())

    def change(i: int) -> None:
        if i == 3:
            model.logs["b"] = nn.Parameter(torch.zeros(()))
            model.tasks.append("b")
            optimizer.add_param_group({"params": [model.logs["b"]], "lr": 0.5})

    return train(lambda m, b: m(*b), change, model=model, optimizer=optimizer)


@more
def tasks_balanced_by_their_gradients() -> Made:
    """GradNorm-like: the norms of the shared layer's gradients weigh the terms."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        terms = [F.mse_loss(out, b[1]), F.l1_loss(out, b[1])]
        norms = [torch.autograd.grad(t, m.a.weight, retain_graph=True)[0].norm().detach() for t in terms]
        total = sum(norms)
        return sum(t * (total - n) / total for t, n in zip(terms, norms))

    return train(loss)


@more
def gradients_of_tasks_projected() -> Made:
    """PCGrad: conflicting gradients are projected; their inner product with the weights is what is returned."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = list(m.parameters())
        out = m(b[0])
        g1 = torch.autograd.grad(F.mse_loss(out, b[1]), weights, retain_graph=True)
        g2 = torch.autograd.grad(F.l1_loss(out, b[1]), weights)
        dot = sum((x * y).sum() for x, y in zip(g1, g2))
        size = sum(y.square().sum() for y in g2)
        share = torch.clamp(dot / size, max=0.0)
        wanted = [(x - share * y + y).detach() for x, y in zip(g1, g2)]
        return sum((w * p).sum() for w, p in zip(wanted, weights))

    return train(loss)


@more
def terms_that_are_missing_on_some_steps() -> Made:
    """A dictionary of losses by the keys of the batch; some batches lack a target."""
    model = nn.ModuleDict({"trunk": nn.Linear(6, 8), "depth": nn.Linear(8, 3), "normal": nn.Linear(8, 3)})
    batches = [{"x": x, "depth": y, **({"normal": -y} if i % 2 else {})} for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> Any:
        hidden = torch.tanh(m["trunk"](b["x"]))
        losses = {name: F.mse_loss(m[name](hidden), b[name]) for name in ("depth", "normal") if b.get(name) is not None}
        return sum(losses.values()), {name: value.detach() for name, value in losses.items()}

    return train(loss, model=model, batches=batches, optimizer=momentum)


@more
def optimizers_taken_in_turns_on_one_model() -> Made:
    """Adam for the first steps, SGD afterwards: a second step object for the same model."""
    model = Net()
    first, second = adamw(model.parameters()), sgd(model.parameters())
    return train(model=model, optimizer=first, partner=train(model=model, optimizer=second))


@more
def adapters_of_a_frozen_model_reset() -> Made:
    """Low-rank adapters merged into frozen weights and begun anew (ReLoRA), with the optimizer's state pruned."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 3).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(3, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.down.T @ self.up.T

    model = Adapted()
    optimizer = adamw([model.down, model.up])

    @torch.no_grad()
    def merge() -> None:
        model.base.weight += model.up @ model.down
        model.up.zero_()
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.01)
            state["exp_avg_sq"] = state["exp_avg_sq"] * 0.01

    return train(model=model, optimizer=optimizer, change=at(3, merge))


@more
def layers_thawed_by_a_callback() -> Made:
    """Callbacks in a list, called by the trainer that owns the loss."""

    class Trainer:
        def __init__(self) -> None:
            self.model, self.callbacks, self.epoch, self.weight = Net(), [], 0, 1.0
            self.model.a.requires_grad_(False)

        def fire(self, event: str) -> None:
            for callback in self.callbacks:
                callback(self, event)

        def loss(self, m: Any, b: Any) -> torch.Tensor:
            return mse(m, b) * self.weight

    trainer = Trainer()

    def thaw(trainer: Any, event: str) -> None:
        trainer.model.a.requires_grad_(event == "late")

    def anneal(trainer: Any, event: str) -> None:
        trainer.weight *= 0.5

    trainer.callbacks += [thaw]

    def change(i: int) -> None:
        if i == 2:
            trainer.fire("late")
            trainer.callbacks.append(anneal)
        if i == 4:
            trainer.fire("early")

    return train(trainer.loss, change, model=trainer.model, optimizer=momentum)
