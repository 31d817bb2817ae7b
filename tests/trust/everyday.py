"""What training code of every day does: adapters, teachers, functions with state, configs, callbacks, chunks, powers, tasks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import itertools
import threading
import types
import warnings
import weakref
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, at, cases_of, labelled, momentum, mse, pairs, train
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import default_collate

case, more = cases_of("everyday")


@case
def sign_by_a_power_of_a_count() -> Made:
    """`(-1) ** n`, which torch writes into code as `-1 ** n`."""
    held = {"n": 0}
    return train(lambda m, b: mse(m, b) + 0.1 * (-1) ** held["n"] * m(b[0]).mean(), lambda i: held.update(n=i))


@more
def powers_of_numbers_with_signs() -> Made:
    held = {"n": 0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        n = held["n"]
        return mse(m, b) * (2 - 5) ** n + (-0.5) ** -n + (n - 5) ** n + -(n**2)

    return train(loss, lambda i: held.update(n=(1, 2, 3, 2, 1, 0)[i]))


@case
def samples_mapped_in_chunks_of_a_size_that_varies() -> Made:
    held = {"size": 2}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return torch.vmap(lambda x, y: F.mse_loss(m(x), y), chunk_size=held["size"])(*b).mean()

    return train(loss, lambda i: held.update(size=2 + i % 3))


@case
def function_marked_as_constant_for_compilers() -> Made:
    held = {"weight": 1.0}

    @torch.compiler.assume_constant_result
    def weight() -> float:
        return held["weight"]

    return train(lambda m, b: mse(m, b) * weight(), lambda i: held.update(weight=1.0 + i))


@more
def filters_of_warnings_counted() -> Made:
    return train(lambda m, b: mse(m, b) * (1.0 + 0.01 * len(warnings.filters)))


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.scale = base, 2.0
        self.down = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale


@case
def adapter_injected_with_a_group_of_its_own() -> Made:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def inject() -> None:
        model.requires_grad_(False)
        model.a = Adapter(model.a)
        optimizer.add_param_group({"params": [model.a.down, model.a.up], "lr": 5e-2})

    return train(model=model, optimizer=optimizer, change=at(3, inject))


@more
def teacher_in_training_mode_counts_too() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(b[0] * 1.1)
        return mse(m, b) + F.mse_loss(m(b[0]), target)

    def follow(i: int) -> None:
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), model.parameters()):
                ours.lerp_(theirs, 0.1)

    return train(loss, model=model, after=follow, state=lambda: [*teacher.parameters(), *teacher.buffers()])


@more
def critic_with_a_penalty_whose_weight_falls() -> Made:
    models = {"g": nn.Linear(6, 3), "d": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))}
    held = {"weight": 10.0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        fake = m["g"](b[0]).detach()
        mixed = ((b[1] + fake) / 2).requires_grad_(True)
        (slope,) = torch.autograd.grad(m["d"](mixed).sum(), mixed, create_graph=True)
        return m["d"](fake).mean() - m["d"](b[1]).mean() + held["weight"] * (slope.norm(2, 1) - 1).square().mean()

    optimizer = torch.optim.RMSprop(models["d"].parameters(), lr=1e-2)
    return train(loss, lambda i: held.update(weight=10.0 - i), model=models, optimizer=optimizer)


@more
def generator_and_critic_with_adam() -> Made:
    models = {"g": nn.Linear(6, 3), "d": nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))}

    def of_the_critic(m: Any, b: Any) -> torch.Tensor:
        return F.softplus(m["d"](m["g"](b[0]).detach())).mean() + F.softplus(-m["d"](b[1])).mean()

    def of_the_generator(m: Any, b: Any) -> torch.Tensor:
        return F.softplus(-m["d"](m["g"](b[0]))).mean()

    adam = lambda name: torch.optim.Adam(models[name].parameters(), lr=1e-2, betas=(0.5, 0.9))  # noqa: E731
    other = train(of_the_generator, model=models, optimizer=adam("g"))
    return dataclasses.replace(train(of_the_critic, model=models, optimizer=adam("d")), partner=other)


@more
def gradients_of_outputs_projected() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        first, second = F.mse_loss(out[:, 0], b[1][:, 0]), F.l1_loss(out[:, 1:], b[1][:, 1:])
        g, h = (torch.autograd.grad(part, out, retain_graph=True)[0] for part in (first, second))
        dot = (g * h).sum()
        return first + torch.where(dot < 0, 1 - dot / h.square().sum(), torch.ones(())).detach() * second

    return train(loss)


@more
def weights_perturbed_against_their_gradients() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = dict(m.named_parameters())
        gradients = torch.autograd.grad(mse(m, b), list(weights.values()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        moved = {name: p + 0.05 * g / norm for (name, p), g in zip(weights.items(), gradients)}
        return F.mse_loss(torch.func.functional_call(m, moved, (b[0],)), b[1])

    return train(loss)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, config: Any) -> torch.Tensor:
        ctx.config = config
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.config.alpha * gradient, None


@case
def function_with_a_config_object() -> Made:
    config = types.SimpleNamespace(alpha=0.1)
    loss = lambda m, b: F.mse_loss(m.b(Reversed.apply(torch.tanh(m.a(b[0])), config)), b[1])  # noqa: E731
    return train(loss, lambda i: setattr(config, "alpha", 0.1 * (i + 1)))


class Remembered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(memory)
        return x * memory.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0].sum(), None


@more
def function_with_a_memory_that_fades() -> Made:
    memory = torch.ones(3)
    loss = lambda m, b: F.mse_loss(Remembered.apply(m(b[0]), memory), b[1])  # noqa: E731
    return train(loss, after=lambda i: memory.mul_(0.9), state=lambda: memory)


class Config(dict):
    """Keys are attributes, at any depth."""

    def __getattr__(self, key: str) -> Any:
        try:
            value = self[key]
        except KeyError:
            raise AttributeError(key) from None
        return Config(value) if isinstance(value, dict) else value


@case
def config_that_wraps_what_it_holds() -> Made:
    config = Config(loss={"name": "mse", "weight": 1.0}, decay={"l2": 0.0})

    def loss(m: Any, b: Any) -> torch.Tensor:
        distance = {"mse": F.mse_loss, "l1": F.l1_loss}[config.loss.name]
        return distance(m(b[0]), b[1]) * config.loss.weight + config.decay.l2 * sum(
            p.square().sum() for p in m.parameters()
        )

    def change(i: int) -> None:
        where, key, value = [("loss", "weight", 2.0), ("decay", "l2", 0.01), ("loss", "name", "l1")][i % 3]
        config[where][key] = value

    return train(loss, change)


class Resolved:
    """`${name}` stands for another entry."""

    def __init__(self, entries: dict) -> None:
        self.entries = entries

    def __getattr__(self, key: str) -> Any:
        value = self.__dict__["entries"][key]
        while isinstance(value, str) and value.startswith("${"):
            value = self.__dict__["entries"][value[2:-1]]
        return value


@more
def config_with_entries_that_name_others() -> Made:
    entries = {"rate": 0.5, "weight": "${rate}"}
    config = Resolved(entries)
    return train(lambda m, b: mse(m, b) * config.weight, lambda i: entries.update(rate=0.5 + i))


@more
def descriptor_that_keeps_values_by_object() -> Made:
    class Kept:
        def __init__(self) -> None:
            self.values: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

        def __get__(self, owner: Any, kind: Any = None) -> Any:
            return self if owner is None else self.values.get(owner, 1.0)

        def __set__(self, owner: Any, value: float) -> None:
            self.values[owner] = value

    class Holder:
        weight = Kept()

    holder = Holder()
    return train(lambda m, b: mse(m, b) * holder.weight, lambda i: setattr(holder, "weight", 1.0 + i))


@more
def scale_that_a_context_sets_and_resets() -> Made:
    state = types.SimpleNamespace(scale=1.0, entered=0)
    held = {"inside": 2.0}

    @contextlib.contextmanager
    def scaled(value: float) -> Any:
        before, state.scale = state.scale, value
        state.entered += 1
        try:
            yield
        finally:
            state.scale = before

    def loss(m: Any, b: Any) -> torch.Tensor:
        with scaled(held["inside"]):
            inside = mse(m, b) * state.scale
        return inside + state.scale * 0.1 * m(b[0]).mean()

    return train(loss, lambda i: held.update(inside=2.0 + i), state=lambda: (state.scale, state.entered))


class Warming:
    def on_loss(self, loss: torch.Tensor, state: dict) -> torch.Tensor:
        return loss * min(1.0, state["step"] / 3)


class Limiting:
    def on_loss(self, loss: torch.Tensor, state: dict) -> torch.Tensor:
        return loss.clamp(max=state["most"])


@case
def callbacks_that_come_and_go() -> Made:
    state, callbacks = {"step": 1, "most": 10.0}, [Warming(), Limiting()]

    def loss(m: Any, b: Any) -> torch.Tensor:
        value = mse(m, b)
        for callback in callbacks:
            value = callback.on_loss(value, state)
        return value

    def change(i: int) -> None:
        state["step"] = i + 1
        if i == 3:
            callbacks.pop()
        if i == 4:
            callbacks.insert(0, Limiting())
            state["most"] = 0.5

    return train(loss, change)


class Terms(enum.Flag):
    NORM = 1
    DOUBLE = 2


@more
def terms_by_flags() -> Made:
    held = {"terms": Terms.NORM}

    def loss(m: Any, b: Any) -> torch.Tensor:
        value = mse(m, b)
        if Terms.NORM in held["terms"]:
            value = value + 0.1 * m(b[0]).abs().mean()
        return value * 2 if held["terms"] & Terms.DOUBLE else value

    return train(loss, lambda i: held.update(terms=Terms(i % 4)))


@more
def term_for_what_a_batch_may_lack() -> Made:
    batches = [{"x": x, "y": y, **({"z": y * 2} if i % 2 else {})} for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        value = F.mse_loss(m(b["x"]), b["y"])
        with contextlib.suppress(KeyError):
            value = value + F.l1_loss(m(b["x"]), b["z"])
        return value

    return train(loss, batches=batches)


@case
def head_chosen_by_the_task_of_a_batch() -> Made:
    model = nn.ModuleDict({"trunk": nn.Linear(6, 8), "classes": nn.Linear(8, 3), "numbers": nn.Linear(8, 3)})
    tasks = itertools.cycle(["classes", "numbers"])
    batches = [{"task": task, "x": x, "y": y} for task, (x, y) in zip(tasks, pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m[b["task"]](torch.tanh(m["trunk"](b["x"])))
        return F.cross_entropy(out, b["y"].argmax(1)) if b["task"] == "classes" else F.mse_loss(out, b["y"])

    return train(loss, model=model, batches=batches, optimizer=momentum)


@more
def samples_collated_with_names() -> Made:
    batches = [default_collate([{"x": x[k], "y": y[k], "name": str(k)} for k in range(8)]) for x, y in pairs()]
    return train(lambda m, b: F.mse_loss(m(b["x"]), b["y"]) * len(b["name"]), batches=batches)


@more
def mask_that_comes_and_goes() -> Made:
    batches = [(x, y, y[:, 0] > 0 if i % 2 else None) for i, (x, y) in enumerate(pairs())]

    def loss(m: Any, b: Any) -> torch.Tensor:
        rows = F.mse_loss(m(b[0]), b[1], reduction="none").mean(1)
        return rows.mean() if b[2] is None else (rows * b[2]).sum() / b[2].sum().clamp(min=1)

    return train(loss, batches=batches)


@more
def labels_flipped_by_noise_drawn_outside() -> Made:
    source, held = np.random.default_rng(0), {"flipped": [False] * 8}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b[0]), torch.where(torch.tensor(held["flipped"]), (b[1] + 1) % 3, b[1]))

    return train(loss, lambda i: held.update(flipped=(source.random(8) < 0.3).tolist()), batches=labelled())


@more
def weights_normed_twice_in_a_cache() -> Made:
    model = Net()
    parametrizations.weight_norm(model.a)

    def loss(m: Any, b: Any) -> torch.Tensor:
        with parametrize.cached():
            return mse(m, b) + F.mse_loss(m(b[0] * 0.5), b[1])

    return train(loss, model=model)


@more
def groups_of_the_optimizer_in_another_order() -> Made:
    model = Net()
    groups = [{"params": model.a.parameters(), "lr": 0.1}, {"params": model.b.parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    change = lambda i: optimizer.param_groups.reverse() if i in (2, 4) else None  # noqa: E731
    return train(model=model, optimizer=optimizer, change=change)


@more
def layers_set_to_constants_midway() -> Made:
    model = Net()

    def reset(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            nn.init.constant_(layer.weight, 0.1)

    return train(model=model, change=at(3, lambda: model.apply(reset)), optimizer=adamw)


@more
def table_of_modules_edited() -> Made:
    model, other = Net(), nn.Linear(6, 16)
    return train(model=model, change=at(3, lambda: model._modules.__setitem__("a", other)))


@more
def setting_changed_by_another_thread() -> Made:
    held = {"weight": 1.0}

    def change(i: int) -> None:
        thread = threading.Thread(target=lambda: held.update(weight=1.0 + i))
        thread.start()
        thread.join()

    return train(lambda m, b: mse(m, b) * held["weight"], change)


@more
def bad_batches_left_out() -> Made:
    held = {"bad": False}

    def loss(m: Any, b: Any) -> torch.Tensor:
        value = mse(m, b)
        if held["bad"]:
            raise ValueError("a bad batch")
        return value

    return train(loss, lambda i: held.update(bad=i % 2 == 1), raises=dict.fromkeys((1, 3, 5), ValueError))
