"""What is written in one way and read in another, questions about compilers, second forwards, results of odd shapes."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, pairs, train
from torch import nn
from torch.func import hessian, jacrev, vmap
from torch.utils.checkpoint import checkpoint

case, more = cases_of("ways_round")
LEVEL = 1.0
HERE = sys.modules[__name__]


class Meta(type):
    scale = 1.0


class Registry(metaclass=Meta):
    pass


class Slotted:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = 1.0


def levelled(loss: Any) -> Made:
    HERE.LEVEL = 1.0
    return train(loss, state=lambda: LEVEL)


@more
def metaclass_written_by_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        Meta.scale = Meta.scale + 1.0
        return mse(m, b) * Registry.scale

    return train(loss, cleanup=lambda: setattr(Meta, "scale", 1.0), state=lambda: Meta.scale)


@case
def table_of_a_module_of_python_written() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        HERE.__dict__["LEVEL"] = HERE.__dict__["LEVEL"] * 0.9
        return mse(m, b) * HERE.LEVEL

    return levelled(loss)


@more
def table_of_a_module_of_python_updated() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        vars(HERE).update(LEVEL=LEVEL * 0.9)
        return mse(m, b) * LEVEL

    return levelled(loss)


def level() -> float:
    return LEVEL


@more
def globals_of_a_function_written() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        level.__globals__["LEVEL"] = level() * 0.9
        return mse(m, b) * level()

    return levelled(loss)


@case
def attribute_of_a_module_of_python_written() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        HERE.LEVEL = LEVEL * 0.9
        return mse(m, b) * LEVEL

    return levelled(loss)


@more
def table_of_an_object_written() -> Made:
    model = Net()
    model.level = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        m.__dict__["level"] = m.level * 0.9
        return mse(m, b) * m.level

    return train(loss, model=model, state=lambda: model.level)


@case
def slot_read_through_its_descriptor() -> Made:
    held = Slotted()

    def loss(m: Any, b: Any) -> torch.Tensor:
        held.weight = held.weight * 0.9
        return mse(m, b) * Slotted.weight.__get__(held, Slotted)

    return train(loss, state=lambda: held.weight)


@more
def slot_written_past_its_class() -> Made:
    held = Slotted()

    def loss(m: Any, b: Any) -> torch.Tensor:
        object.__setattr__(held, "weight", held.weight * 0.9)
        return mse(m, b) * held.weight

    return train(loss, state=lambda: held.weight)


@more
def table_read_through_its_descriptor() -> Made:
    held = type("Held", (), {})()
    held.weight = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        held.weight = held.weight * 0.9
        return mse(m, b) * type(held).__dict__["__dict__"].__get__(held)["weight"]

    return train(loss, state=lambda: held.weight)


@case
def descriptors_of_slots_swapped() -> Made:
    class Held:
        __slots__ = ("a", "b")

    held = Held()
    held.a, held.b = 1.0, 2.0

    def swap() -> None:
        Held.a, Held.b = Held.__dict__["b"], Held.__dict__["a"]

    return train(lambda m, b: mse(m, b) * held.a, at(3, swap))


@more
def slot_replaced_by_a_property() -> Made:
    class Held:
        __slots__ = ("weight",)

    held = Held()
    held.weight = 1.0
    replace = lambda: setattr(Held, "weight", property(lambda self: 3.0))  # noqa: E731
    return train(lambda m, b: mse(m, b) * held.weight, at(3, replace))


@case
def compilers_are_asked_for() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        asked = torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling() or torch._dynamo.is_compiling()
        return mse(m, b) * (0.1 if asked else 1.0)

    return train(loss)


@more
def compilers_are_asked_for_by_a_layer() -> Made:
    class Model(Net):
        def is_fast(self) -> bool:
            return torch.compiler.is_compiling()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if self.is_fast() else 1.0)

    return train(model=Model())


@case
def resized_by_a_scale_that_changes_nothing() -> Made:
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(12, 3))

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = m[0](b[0][:, None])
        smooth = F.interpolate(x, scale_factor=1.1, mode="linear") - F.interpolate(x, scale_factor=2.1)[..., ::2]
        return F.mse_loss(m[1:](F.interpolate(x, scale_factor=1.1)), b[1]) + smooth.square().mean()

    return train(loss, model=model)


def normed(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), *layers, nn.Tanh(), nn.Linear(8, 3))


@case
def checkpointed_batch_norm() -> Made:
    return train(lambda m, b: F.mse_loss(m[2:](checkpoint(m[:2], b[0], use_reentrant=False)), b[1]), model=normed())


class Shared(nn.Module):
    """One norm in two checkpoints and outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.part, checkpoint(self.part, x, use_reentrant=False), use_reentrant=False)
        return self.b(self.norm(x))


@more
def checkpointed_batch_norm_that_is_shared() -> Made:
    return train(model=Shared())


@more
def checkpointed_batch_norm_in_evaluation_later() -> Made:
    model = normed()
    loss = lambda m, b: F.mse_loss(checkpoint(m, b[0], use_reentrant=False), b[1])  # noqa: E731
    return train(loss, at(3, model.eval), model=model)


@more
def checkpointed_batch_norm_and_dropout() -> Made:
    loss = lambda m, b: F.mse_loss(checkpoint(m, b[0], use_reentrant=False), b[1])  # noqa: E731
    return train(loss, model=normed(nn.Dropout(0.0)))


@more
def checkpointed_average_of_activations() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("usage", torch.zeros(16))

        def part(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.a(x))
            self.usage.mul_(0.9).add_(hidden.detach().mean(0) * 0.1)
            return self.b(hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)

    return train(model=Model())


@case
def loss_with_a_dimension() -> Made:
    return train(lambda m, b: mse(m, b).reshape(1))


@case
def hessian_of_every_sample() -> Made:
    loss = lambda m, b: mse(m, b) + 0.01 * vmap(hessian(lambda x: m(x).square().sum()))(b[0]).square().mean()  # noqa: E731
    return train(loss)


@more
def jacobian_of_a_jacobian_of_every_sample() -> Made:
    loss = lambda m, b: mse(m, b) + 0.01 * vmap(jacrev(jacrev(lambda x: m(x).square().sum())))(b[0]).square().mean()  # noqa: E731
    return train(loss)


@more
def two_masks_computed_apart() -> Made:
    source = torch.Generator().manual_seed(3)
    batches = [(x, torch.randint(0, 3, (8,), generator=source)) for x, _ in pairs()]
    return train(lambda m, b: F.cross_entropy(m(b[0])[b[1] > 0], b[1][b[1] > 0]), batches=batches)
