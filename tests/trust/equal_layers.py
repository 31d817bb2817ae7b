"""Eight layers that look equal: one differs from the start, or later, in something that the trace of another has not shown."""

from __future__ import annotations

import dataclasses
import io
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, at, cases_of, mse, nothing, pairs, train
from torch import nn
from torch.overrides import TorchFunctionMode

case, more = cases_of("equal layers")
DEPTH, OTHER, LATER = 8, 3, 5


class Layer(nn.Module):
    value: Any
    norm: nn.LayerNorm
    inner: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(layer() for _ in range(DEPTH)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def gained(gain: Callable[[Any], Any], of: Callable[[bool], Any] | None = None, **more: Any) -> Made:
    """Layers times `gain(layer)`; `of(False)` is the `value` of most, `of(True)` that of one, and of another one later."""

    class Gained(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(x) * gain(self)

    model, change = Stack(Gained), nothing
    if of is not None:
        for i, layer in enumerate(model.layers):
            layer.value = of(i == OTHER)
        change = at(3, lambda: setattr(model.layers[LATER], "value", of(True)))
    return train(model=model, change=change, **more)


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)


SHARED, LIST, TENSOR = Config(0.5), [0.5], torch.full((1,), 0.5)


@case
def key_that_only_one_layer_has() -> Made:
    def gain(layer: Any) -> float:
        try:
            return layer.value["scale"]
        except KeyError:
            return 1.0

    return gained(gain, lambda other: {"scale": 0.5} if other else {})


@case
def attribute_that_only_one_layer_has() -> Made:
    def gain(layer: Any) -> float:
        try:
            return layer.value.extra
        except AttributeError:
            return 1.0

    def of(other: bool) -> Config:
        made = Config(0.5)
        vars(made).update({"extra": 0.5} if other else {})
        return made

    return gained(gain, of)


@more
def slot_that_only_one_layer_fills() -> Made:
    def gain(layer: Any) -> float:
        try:
            return layer.value.scale
        except AttributeError:
            return 1.0

    def of(other: bool) -> Slotted:
        made = Slotted()
        if other:
            made.scale = 0.5
        return made

    made = gained(gain, of)
    return dataclasses.replace(made, change=nothing)  # later is not guarded


@case
def submodule_that_only_one_layer_has() -> Made:
    class Adapted(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x + self.adapter(x)
            except AttributeError:
                return x + self.body(x)

    model = Stack(Adapted)
    model.layers[OTHER].adapter = nn.Linear(6, 6)
    return train(model=model)


@more
def sets_of_a_number_and_a_truth() -> Made:
    return gained(lambda layer: 0.5 if next(iter(layer.value)) is True else 1.0, lambda other: {True} if other else {1})


@case
def config_that_is_also_a_global() -> Made:
    return gained(lambda layer: SHARED.scale * layer.value.scale, lambda other: Config(0.25) if other else SHARED)


@more
def list_that_is_also_a_global() -> Made:
    return gained(lambda layer: LIST[0] * layer.value[0], lambda other: [0.25] if other else LIST)


@more
def tensor_that_is_also_a_global() -> Made:
    return gained(lambda layer: TENSOR * layer.value, lambda other: torch.full((1,), 0.25) if other else TENSOR)


@case
def tensor_compared_with_a_global() -> Made:
    def gain(layer: Any) -> torch.Tensor:
        return TENSOR * (0.5 if layer.value is TENSOR else 1.0)

    return gained(gain, lambda other: TENSOR if other else torch.full((1,), 0.5))


@case
def object_compared_by_a_function() -> Made:
    def gain(layer: Any) -> float:
        return 0.5 if operator.is_(layer.value, SHARED) else 1.0

    return gained(gain, lambda other: SHARED if other else Config(0.5))


@more
def object_known_by_its_id() -> Made:
    def gain(layer: Any) -> float:
        return 0.5 if id(layer.value) == id(SHARED) else 1.0

    return gained(gain, lambda other: SHARED if other else Config(0.5))


@more
def weight_as_a_key() -> Made:
    gains: dict[Any, float] = {}
    made = gained(lambda layer: gains.get(layer.inner.weight, 1.0))
    gains[made.model.layers[OTHER].inner.weight] = 0.5
    return made


@case
def weights_tied_inside_of_one_layer() -> Made:
    class Tied(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.a(torch.tanh(self.b(x))) * (0.5 if self.a.weight is self.b.weight else 1.0)

    model = Stack(Tied)
    model.layers[OTHER].a.weight = model.layers[OTHER].b.weight
    return train(model=model)


class Scaled(TorchFunctionMode):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is torch.tanh else result


@case
def function_modes_of_their_own() -> Made:
    class Moded(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                with Scaled(0.1 * i):
                    x = layer(x)
            return self.last(x)

    return train(model=Moded())


@more
def deterministic_for_one_layer() -> Made:
    class Switched(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                torch.use_deterministic_algorithms(i == OTHER)
                x = layer(x)
            torch.use_deterministic_algorithms(False)
            return self.last(x)

    made = gained(lambda layer: 0.5 if torch.are_deterministic_algorithms_enabled() else 1.0)
    made.model.__class__ = Switched
    return made


@case
def line_printed_by_every_layer() -> Made:
    class Talking(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("layer")
            return x + self.body(x)

    out, sys.stdout = sys.stdout, io.StringIO()
    written = sys.stdout
    return train(
        model=Stack(Talking),
        state=lambda: written.getvalue().count("layer"),
        cleanup=lambda: setattr(sys, "stdout", out),
    )


@case
def results_that_are_not_dense() -> Made:
    class Sparse(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            return x + self.body(x), self.inner.bias[:1].expand(6)

    class Asking(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x, bias = layer(x)
                x = x + bias if bias.stride(0) == 0 else x * bias
            return self.last(x)

    return train(model=Asking(Sparse))


@case
def layer_replaced_by_a_new_one() -> Made:
    model = Stack()

    def replace() -> None:
        torch.manual_seed(5)
        model.layers[LATER] = Layer()

    return train(model=model, change=at(3, replace))


@case
def layers_swapped() -> Made:
    model = Stack()

    def swap() -> None:
        model.layers[OTHER], model.layers[LATER] = model.layers[LATER], model.layers[OTHER]

    return train(model=model, change=at(3, swap))


@case
def teacher_of_equal_layers() -> Made:
    teacher = Stack().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return mse(model, batch) + F.mse_loss(model(batch[0]), wanted)

    return train(loss, model=Stack())


@more
def statistics_of_every_layer_accumulated() -> Made:
    class Normed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.body(self.batch_norm(x))

    given = pairs()
    batches = [[given[i], given[i - 1]] for i in range(len(given))]
    return train(model=Stack(Normed), options={"accumulate": 2}, batches=batches)


@more
def rates_and_skips_by_position() -> Made:
    class Positioned(Stack):
        skipped = {1}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = x if i in self.skipped else x + layer(x) / (i + 1)
            return self.last(x)

    model = Positioned()
    # a rate at which rounding is not multiplied
    slow = torch.optim.SGD(model.parameters(), lr=1e-3)
    return train(model=model, optimizer=slow, change=at(3, lambda: setattr(model, "skipped", {6})))
