"""Training loops as people write them: teachers, target networks, adversaries, schedules, several modules."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import (
    STEPS,
    Made,
    Net,
    adamw,
    at,
    cases_of,
    cross_entropy,
    labelled,
    momentum,
    mse,
    pairs,
    sgd,
    tokens,
    train,
)
from torch import nn

case, more = cases_of("loops")


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, rate: float = 0.1) -> None:
    for mine, its in zip(teacher.parameters(), student.parameters()):
        mine.lerp_(its, rate)


class TinyGpt(nn.Module):
    """One block, tied output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.attention, self.norm = nn.Linear(8, 24, bias=False), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1]))
        q, k, v = self.attention(self.norm(h)).chunk(3, -1)
        return self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))


def language_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


# ---- teachers and targets ----


@case
def moving_teacher() -> Made:
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    loss = lambda m, b: mse(m, b) + F.mse_loss(m(b[0]), teacher(b[0]))  # noqa: E731
    return train(loss, model=model, after=lambda i: follow(teacher, model), state=lambda: list(teacher.parameters()))


@case
def moving_teacher_in_a_list() -> Made:
    model = Net()
    teachers = [copy.deepcopy(model).requires_grad_(False)]
    loss = lambda m, b: mse(m, b) + F.mse_loss(m(b[0]), teachers[0](b[0]))  # noqa: E731
    return train(loss, model=model, after=lambda i: follow(teachers[0], model))


@more
def teacher_joined_by_a_second() -> Made:
    teachers = [Net().requires_grad_(False)]
    loss = lambda m, b: sum(F.mse_loss(m(b[0]), teacher(b[0])) for teacher in teachers)  # noqa: E731
    return train(loss, at(3, lambda: teachers.append(Net().requires_grad_(False))))


@more
def teacher_replaced_by_a_copy() -> Made:
    model = Net()
    held = {"teacher": copy.deepcopy(model).requires_grad_(False)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = held["teacher"](b[0])
        return mse(m, b) + F.mse_loss(m(b[0]), wanted)

    change = lambda i: held.update(teacher=copy.deepcopy(model).requires_grad_(False)) if i % 2 == 0 else None  # noqa: E731
    return train(loss, change, model=model)


@more
def teacher_with_running_statistics() -> Made:
    """In training mode the teacher's own statistics move in every step."""
    teacher = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).requires_grad_(False)
    loss = lambda m, b: F.mse_loss(m(b[0]), teacher(b[0]))  # noqa: E731
    return train(loss, at(3, teacher.eval), state=lambda: list(teacher.buffers()))


@more
def distillation_temperature() -> Made:
    teacher, temperature = Net().requires_grad_(False), [4.0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        t = temperature[0]
        soft = F.kl_div((m(b[0]) / t).log_softmax(-1), (teacher(b[0]) / t).softmax(-1), reduction="batchmean")
        return cross_entropy(m, b) + t * t * soft

    return train(loss, lambda i: temperature.__setitem__(0, 4.0 - i / 2), batches=labelled())


@case
def target_network_synchronised() -> Made:
    model = Net()
    target = copy.deepcopy(model)

    def loss(m: Any, b: Any) -> torch.Tensor:
        value = m(b[0]).gather(1, b[1][:, None]).squeeze(1)
        with torch.no_grad():
            wanted = b[0].sum(1) + 0.9 * target(b[0].roll(1, 0)).max(1).values
        return F.smooth_l1_loss(value, wanted)

    after = lambda i: target.load_state_dict(model.state_dict()) if i % 2 else None  # noqa: E731
    return train(loss, model=model, batches=labelled(), after=after, optimizer=adamw)


@case
def momentum_contrast() -> Made:
    model = Net()
    key = copy.deepcopy(model).requires_grad_(False)
    queue = F.normalize(torch.randn(16, 3), dim=1)

    def loss(m: Any, b: Any) -> torch.Tensor:
        q, k = F.normalize(m(b[0]), dim=1), F.normalize(key(b[0] + 0.1 * b[1].sum()), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().T], 1) / 0.2
        queue.copy_(torch.cat([k.detach(), queue[:-8]]))
        return F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))

    return train(loss, model=model, after=lambda i: follow(key, model), state=lambda: queue)


@case
def self_distillation_with_a_center() -> Made:
    student = Net()
    teacher = copy.deepcopy(student).requires_grad_(False)
    held = {"center": torch.zeros(3), "temperature": 0.04}

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = teacher(b[0])
        wanted = ((out - held["center"]) / held["temperature"]).softmax(-1).detach()
        held["center"] = 0.9 * held["center"] + 0.1 * out.mean(0).detach()
        return -(wanted * (m(b[0]) / 0.1).log_softmax(-1)).sum(-1).mean()

    change = lambda i: held.update(temperature=0.04 + 0.01 * i)  # noqa: E731
    return train(loss, change, model=student, after=lambda i: follow(teacher, student), state=lambda: dict(held))


# ---- adversaries ----


@case
def adversarial_networks_in_turns() -> Made:
    models = {"generator": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), "critic": nn.Linear(3, 1)}

    def critic_loss(m: Any, b: Any) -> torch.Tensor:
        fake = m["generator"](b[0]).detach()
        return F.softplus(-m["critic"](b[1])).mean() + F.softplus(m["critic"](fake)).mean()

    generator_loss = lambda m, b: F.softplus(-m["critic"](m["generator"](b[0]))).mean()  # noqa: E731
    partner = train(generator_loss, model=models, optimizer=adamw(models["generator"].parameters()))
    return train(critic_loss, model=models, optimizer=adamw(models["critic"].parameters()), partner=partner)


@case
def critic_with_clipped_weights() -> Made:
    models = {"generator": nn.Linear(6, 3), "critic": nn.Linear(3, 1)}
    critic = models["critic"]

    def critic_loss(m: Any, b: Any) -> torch.Tensor:
        return m["critic"](m["generator"](b[0]).detach()).mean() - m["critic"](b[1]).mean()

    def after(i: int) -> None:
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)

    generator_loss = lambda m, b: -m["critic"](m["generator"](b[0])).mean()  # noqa: E731
    partner = train(generator_loss, model=models, optimizer=sgd(models["generator"].parameters()))
    return train(critic_loss, model=models, optimizer=sgd(critic.parameters()), partner=partner, after=after)


@more
def critic_frozen_for_the_generator() -> Made:
    """The generator's step freezes the critic inside the loss and thaws it again."""
    models = {"generator": nn.Linear(6, 3), "critic": nn.Linear(3, 1)}

    def generator_loss(m: Any, b: Any) -> torch.Tensor:
        for p in m["critic"].parameters():
            p.requires_grad_(False)
        found = -m["critic"](m["generator"](b[0])).mean()
        for p in m["critic"].parameters():
            p.requires_grad_(True)
        return found

    return train(generator_loss, model=models, optimizer=sgd(models["generator"].parameters()))


@more
def domain_adversary_with_a_schedule() -> Made:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return -ctx.strength * gradient, None

    model, progress = Net(), [0.0]
    model.domain = nn.Linear(16, 1)

    def loss(m: Any, b: Any) -> torch.Tensor:
        h = torch.tanh(m.a(b[0]))
        return F.mse_loss(m.b(h), b[1]) + m.domain(Reverse.apply(h, progress[0])).sigmoid().mean()

    return train(loss, lambda i: progress.__setitem__(0, i / STEPS), model=model)


# ---- one loss, its parts and schedules ----


@case
def variational_autoencoder() -> Made:
    model = nn.ModuleDict({"encode": nn.Linear(6, 4), "decode": nn.Linear(2, 6)})
    weight = [0.0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        mean, log_variance = m["encode"](b[0]).chunk(2, -1)
        z = mean + b[1][:, :2] * (0.5 * log_variance).exp()
        kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return F.mse_loss(m["decode"](z), b[0]) + weight[0] * kl

    return train(loss, lambda i: weight.__setitem__(0, min(1.0, i / 3)), model=model, optimizer=adamw)


@case
def proximal_policy() -> Made:
    model, options = nn.ModuleDict({"policy": Net(), "value": nn.Linear(6, 1)}), {"clip": 0.2, "entropy": 0.01}

    def loss(m: Any, b: Any) -> Any:
        policy = torch.distributions.Categorical(logits=m["policy"](b[0]))
        advantage = b[0][:, 0] - m["value"](b[0]).squeeze(-1).detach()
        ratio = (policy.log_prob(b[1]) + 1.1).exp()
        clipped = ratio.clamp(1 - options["clip"], 1 + options["clip"])
        surrogate = torch.min(ratio * advantage, clipped * advantage).mean()
        value = F.mse_loss(m["value"](b[0]).squeeze(-1), b[0][:, 0])
        entropy = policy.entropy().mean()
        return value - surrogate - options["entropy"] * entropy, {"entropy": entropy, "ratio": ratio.mean()}

    change = lambda i: options.update(clip=0.2 * (1 - i / STEPS))  # noqa: E731
    return train(loss, change, model=model, batches=labelled(), optimizer=adamw, options={"clip_norm": 0.5})


@case
def language_model_with_rates_by_hand() -> Made:
    model = TinyGpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)

    def change(i: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (i + 1) / 3)

    return train(language_loss, change, model=model, optimizer=optimizer, batches=tokens(), options={"clip_norm": 1.0})


@more
def sequences_that_grow() -> Made:
    """A curriculum: the loop cuts longer pieces as it goes."""
    return train(language_loss, model=TinyGpt(), batches=[b[:, : 4 + i // 2] for i, b in enumerate(tokens())])


@more
def curriculum_inside_the_loss() -> Made:
    length = [3]
    return train(
        lambda m, b: language_loss(m, b[:, : length[0]]), lambda i: length.__setitem__(0, 3 + i // 2),
        model=TinyGpt(), batches=tokens(),
    )  # fmt: skip


@more
def scheduled_sampling() -> Made:
    share = [1.0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[:, :-1]
        guessed = m(x).argmax(-1).roll(1, 1)
        forced = torch.arange(x.shape[1]) < share[0] * x.shape[1]
        return F.cross_entropy(m(torch.where(forced, x, guessed)).flatten(0, 1), b[:, 1:].flatten())

    return train(loss, lambda i: share.__setitem__(0, 1.0 - i / 10), model=TinyGpt(), batches=tokens())


@more
def uncertainty_weights_of_two_tasks() -> Made:
    model, tasks = Net(), ["square", "absolute"]
    model.uncertainty = nn.ParameterDict({name: nn.Parameter(torch.zeros(())) for name in tasks})

    def loss(m: Any, b: Any) -> torch.Tensor:
        error = m(b[0]) - b[1]
        found = {"square": error.square().mean(), "absolute": error.abs().mean()}
        return sum((-m.uncertainty[task]).exp() * found[task] + m.uncertainty[task] for task in tasks)

    return train(loss, at(3, tasks.remove, "absolute"), model=model, optimizer=adamw)


@case
def two_losses_on_one_model_in_turns() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    partner = train(lambda m, b: m(b[0]).abs().mean(), model=model, optimizer=optimizer)
    return train(model=model, optimizer=optimizer, partner=partner)


@more
def one_loss_function_for_two_models() -> Made:
    partner = train(mse, model=nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    return train(mse, partner=partner)


@case
def one_stateful_loss_for_two_models() -> Made:
    calls = [0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls[0] += 1
        return mse(m, b) / calls[0]

    return train(loss, partner=train(loss, model=nn.Linear(6, 3)), state=lambda: calls[0])


@more
def phases_in_turn() -> Made:
    model, step = Net(), [0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        phase = ("reconstruct", "regress", "both")[step[0] % 3]
        found = torch.zeros(())
        if phase in ("reconstruct", "both"):
            found = found + (torch.tanh(m.a(b[0])) @ m.a.weight - b[0]).square().mean()
        if phase in ("regress", "both"):
            found = found + mse(m, b)
        return found

    return train(loss, lambda i: step.__setitem__(0, i), model=model)


@case
def modules_in_a_tuple() -> Made:
    models = (nn.Linear(6, 8), nn.Linear(8, 3))
    return train(lambda m, b: F.mse_loss(m[1](torch.tanh(m[0](b[0]))), b[1]), model=models)


@more
def one_of_two_modules_trained() -> Made:
    models = {"encoder": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
    loss = lambda m, b: F.mse_loss(m["head"](torch.tanh(m["encoder"](b[0]))), b[1])  # noqa: E731
    return train(loss, model=models, optimizer=adamw(models["head"].parameters()))


@more
def contrastive_pairs_with_a_learned_temperature() -> Made:
    model = Net()
    model.scale = nn.Parameter(torch.tensor(2.0))

    def loss(m: Any, b: Any) -> torch.Tensor:
        one, two = F.normalize(m(b[0]), dim=1), F.normalize(m(b[0] + 0.1), dim=1)
        logits, labels = m.scale.exp() * one @ two.T, torch.arange(len(one))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return train(loss, model=model, after=lambda i: model.scale.data.clamp_(0, 2.01), optimizer=adamw)


@more
def hardest_triplets() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        distance = torch.cdist(out, out)
        same = b[1][:, None] == b[1][None]
        far = distance.masked_fill(~same, 0.0).max(1).values
        near = distance.masked_fill(same, 1e6).min(1).values
        return F.relu(far - near + 0.5).mean()

    return train(loss, batches=labelled())


@more
def pseudo_labels_made_between_steps() -> Made:
    model, held = Net(), {"labels": None}

    def change(i: int) -> None:
        with torch.no_grad():
            held["labels"] = model(pairs()[i][0]).argmax(1) if i > 1 else None

    def loss(m: Any, b: Any) -> torch.Tensor:
        extra = 0.0 if held["labels"] is None else F.cross_entropy(m(b[0]), held["labels"])
        return mse(m, b) + 0.1 * extra

    return train(loss, change, model=model)


@more
def task_switch_with_consolidation() -> Made:
    model = Net()
    anchor: dict[str, torch.Tensor] = {}

    def loss(m: Any, b: Any) -> torch.Tensor:
        drift = sum((p - anchor[name]).square().sum() for name, p in m.named_parameters() if name in anchor)
        return mse(m, b) + 0.5 * drift

    remember = lambda: anchor.update({n: p.detach().clone() for n, p in model.named_parameters()})  # noqa: E731
    return train(loss, at(3, remember), model=model)


@more
def normalising_flow() -> Made:
    model = nn.ModuleList(nn.Linear(3, 6) for _ in range(2))

    def loss(m: Any, b: Any) -> torch.Tensor:
        x, volume = b[0], torch.zeros(len(b[0]))
        for layer in m:
            keep, move = x.chunk(2, 1)
            scale, shift = layer(keep).chunk(2, 1)
            x, volume = torch.cat([move * torch.tanh(scale).exp() + shift, keep], 1), volume + torch.tanh(scale).sum(1)
        return (0.5 * x.square().sum(1) - volume).mean()

    return train(loss, model=model)


@more
def differential_equation_with_more_steps() -> Made:
    model, steps = nn.ModuleDict({"field": nn.Linear(6, 6), "out": nn.Linear(6, 3)}), [2]

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0]
        for _ in range(steps[0]):
            x = x + torch.tanh(m["field"](x)) / steps[0]
        return F.mse_loss(m["out"](x), b[1])

    return train(loss, at(3, steps.__setitem__, 0, 5), model=model)


@more
def diffusion_step() -> Made:
    model, betas = nn.Linear(7, 6), torch.linspace(0.01, 0.2, 10)
    kept = (1 - betas).cumprod(0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        time = b[1][:, 0].abs().mul(3).long().clamp(max=9)
        share, noise = kept[time][:, None], b[0].roll(1, 0)
        noisy = share.sqrt() * b[0] + (1 - share).sqrt() * noise
        return F.mse_loss(m(torch.cat([noisy, time[:, None] / 10], 1)), noise)

    return train(loss, model=model, optimizer=adamw)


@more
def quantisation_with_observers() -> Made:
    class Observed(Net):
        observing = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("largest", torch.tensor(0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            if self.observing:
                self.largest.copy_(torch.maximum(self.largest, h.detach().abs().max()))
            scale = self.largest / 7
            return self.b(h + ((h / scale).round() * scale - h).detach())

    model = Observed()
    return train(model=model, change=at(3, setattr, model, "observing", False))


@more
def hyper_network() -> Made:
    model, main = nn.Linear(2, 21), nn.Linear(6, 3).requires_grad_(False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        made = m(b[1].mean(0)[:2])
        weights = {"weight": made[:18].view(3, 6), "bias": made[18:]}
        return F.mse_loss(torch.func.functional_call(main, weights, (b[0],)), b[1])

    return train(loss, model=model)


@more
def outputs_of_several_depths() -> Made:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            outputs = []
            for layer, head in zip(self.layers, self.heads):
                x = torch.tanh(layer(x))
                outputs.append(head(x))
            return outputs

    weights = [1.0, 1.0, 1.0]
    loss = lambda m, b: sum(w * F.mse_loss(out, b[1]) for w, out in zip(weights, m(b[0])))  # noqa: E731
    return train(loss, at(3, weights.__setitem__, slice(None), [0.0, 0.5, 1.0]), model=Deep())


@more
def regularised_by_all_parameters() -> Made:
    strength = {"l1": 0.0}
    loss = lambda m, b: mse(m, b) + strength["l1"] * sum(p.abs().sum() for p in m.parameters())  # noqa: E731
    return train(loss, at(3, strength.update, l1=0.01))


@more
def engine_with_events() -> Made:
    """Handlers run inside the step, as in event-driven trainers."""

    class Engine:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"iteration": 0, "scale": 1.0}
            self.handlers: list[Any] = []

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            self.state["iteration"] += 1
            for handler in self.handlers:
                handler(self)
            return mse(model, batch) * self.state["scale"]

    engine = Engine()
    engine.handlers.append(lambda e: e.state.update(scale=1.0 / e.state["iteration"]))
    halve = lambda e: e.state.update(scale=e.state["scale"] * 0.5)  # noqa: E731
    return train(engine.loss, at(3, engine.handlers.append, halve), state=lambda: dict(engine.state))
