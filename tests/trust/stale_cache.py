"""A training like an earlier one but for a value in its Python: the earlier one's program must not come from the cache.

`build(True)` is the earlier one, compiled and run first in the same cache.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, cases_of, labelled, mse, train
from torch import nn

case, more = cases_of("stale cache")

NAME = "WHOLESTEP_TRUST_CACHED"


class Options:
    weight = 1.0


def weight_of(earlier: bool) -> float:
    return 1.0 if earlier else 0.1


@case
def cached_config_class(earlier: bool) -> Made:
    Options.weight = weight_of(earlier)
    return train(lambda m, b: mse(m, b) * Options.weight)


@case
def cached_environment(earlier: bool) -> Made:
    os.environ[NAME] = str(weight_of(earlier))
    return train(lambda m, b: mse(m, b) * float(os.environ[NAME]), cleanup=functools.partial(os.environ.pop, NAME))


@case
def cached_environment_by_getenv(earlier: bool) -> Made:
    os.environ[NAME] = str(weight_of(earlier))
    return train(lambda m, b: mse(m, b) * float(os.getenv(NAME, "3")), cleanup=functools.partial(os.environ.pop, NAME))


@more
def cached_module_level_number(earlier: bool) -> Made:
    config = types.ModuleType("config")
    config.weight = weight_of(earlier)
    return train(lambda m, b: mse(m, b) * config.weight)


@case
def cached_hook_body(earlier: bool) -> Made:
    model = Net()
    if earlier:
        model.a.register_forward_hook(lambda module, args, out: out * 1.0)
    else:
        model.a.register_forward_hook(lambda module, args, out: out * 0.1)
    return train(model=model)


@case
def cached_gradient_hook_body(earlier: bool) -> Made:
    model = Net()
    factor = weight_of(earlier)
    model.a.weight.register_hook(lambda gradient: gradient * factor)
    return train(model=model)


@case
def cached_helper_method(earlier: bool) -> Made:
    class Annealing:
        def __init__(self, start: float) -> None:
            self.start = start

        def weight(self) -> float:
            return self.start * 0.5

    kl = Annealing(weight_of(earlier))
    return train(lambda m, b: mse(m, b) * kl.weight())


@more
def cached_default_argument(earlier: bool) -> Made:
    def scaled(x: torch.Tensor, factor: float = weight_of(earlier)) -> torch.Tensor:
        return x * factor

    return train(lambda m, b: scaled(mse(m, b)))


@more
def cached_activation(earlier: bool) -> Made:
    class Model(Net):
        activation: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.activation(self.a(x)))

    model = Model()
    model.activation = torch.tanh if earlier else torch.relu
    return train(model=model)


@case
def cached_option_of_a_layer(earlier: bool) -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.LeakyReLU(0.5 if earlier else 0.01), nn.Linear(8, 3))
    model[1].eps = 1e-5 if earlier else 1.0
    return train(model=model)


@more
def cached_frozen_layer(earlier: bool) -> Made:
    model = Net()
    model.a.requires_grad_(earlier)
    return train(model=model, optimizer=adamw)


@case
def cached_optimizer_options(earlier: bool) -> Made:
    return train(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=earlier, maximize=not earlier))


@more
def cached_dataclass_config(earlier: bool) -> Made:
    @dataclasses.dataclass
    class Config:
        smoothing: float
        reduction: str = "mean"

    config = Config(0.0 if earlier else 0.4)
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=config.smoothing)  # noqa: E731
    return train(loss, batches=labelled())


@more
def cached_number_in_a_closure_tensor(earlier: bool) -> Made:
    weights = torch.tensor([1.0, 1.0, 1.0] if earlier else [0.1, 1.0, 2.0])
    return train(lambda m, b: ((m(b[0]) - b[1]) ** 2 * weights).mean())


@case
def cached_batch_text(earlier: bool) -> Made:
    kind = "square" if earlier else "absolute"
    batches = [{"x": x, "y": y, "kind": kind} for x, y in train().batches]
    measure = {"square": F.mse_loss, "absolute": F.l1_loss}
    return train(lambda m, b: measure[b["kind"]](m(b["x"]), b["y"]), batches=batches)
