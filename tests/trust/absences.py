"""What was not there when the step was captured, and comes: names, entries, errors of arithmetic."""

from __future__ import annotations

import argparse
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from tests.trust.case import Made, Net, at, cases_of, mse, pairs, train
from torch import nn

case, more = cases_of("absences")


def scaled_by(factor: Callable[[], float], change: Callable[[int], Any], **rest: Any) -> Made:
    return train(lambda m, b: mse(m, b) * factor(), change, **rest)


# ---- names ----


@case
def name_asked_of_the_table_of_an_object() -> Made:
    settings = types.SimpleNamespace(rate=1.0)
    return scaled_by(lambda: vars(settings).get("warm", 1.0), at(3, setattr, settings, "warm", 2.0))


@case
def counter_kept_in_the_table_of_a_module() -> Made:
    class Counts(Net):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "last":
                self.__dict__["written"] = self.__dict__.get("written", 0) + 1
            super().__setattr__(name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.last = out.detach()
            return out * (1 + 0.1 * self.__dict__["written"])

    model = Counts()
    return train(model=model, state=lambda: [vars(model).get("written"), vars(model).get("last")])


@more
def name_looked_for_in_the_table_of_a_module() -> Made:
    class Asks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if "scale" in self.__dict__ else 1)

    model = Asks()
    return train(model=model, change=at(3, setattr, model, "scale", 1))


@case
def attribute_that_a_class_answers_for_is_set() -> Made:
    class Defaults:
        def __getattr__(self, name: str) -> float:
            return 1.0

    settings = Defaults()
    return scaled_by(lambda: settings.rate, at(3, setattr, settings, "rate", 2.0))


@case
def attribute_that_a_model_answers_for_becomes_a_buffer() -> Made:
    class Defaults(Net):
        def __getattr__(self, name: str) -> Any:
            return 1.0 if name == "scale" and name not in self._buffers else super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Defaults()
    return train(model=model, change=at(3, model._buffers.update, scale=torch.tensor(2.0)))


@case
def name_that_a_module_of_python_gains() -> Made:
    module = types.ModuleType("settings_without_a_file")
    return scaled_by(lambda: getattr(module, "rate", 1.0), at(3, setattr, module, "rate", 2.0))


@case
def attribute_that_a_function_gains() -> Made:
    def schedule() -> float:
        return 1.0

    return scaled_by(lambda: getattr(schedule, "rate", schedule()), at(3, setattr, schedule, "rate", 2.0))


def in_the_place_of(one: Any, other: Any, factor: Callable[[Any], float]) -> Made:
    """Another object of the class comes, and the first one stays: no guard can tell by its end."""
    held = {"now": one, "kept": (one, other)}
    return scaled_by(lambda: factor(held["now"]), at(3, held.update, now=other))


class Settings:
    def __init__(self, **values: float) -> None:
        self.__dict__.update(values)


class Answers(Settings):
    def __getattr__(self, name: str) -> float:
        return 1.0


class Listed(dict):
    pass


def rate_or_one(value: Any) -> float:
    try:
        return value.rate
    except AttributeError:
        return 1.0


@case
def object_with_a_name_comes_in_the_place_of_one_without() -> Made:
    return in_the_place_of(Settings(), Settings(rate=2.0), rate_or_one)


@more
def object_with_a_name_in_its_table_comes_in_the_place_of_one_without() -> Made:
    return in_the_place_of(Settings(), Settings(rate=2.0), lambda value: vars(value).get("rate", 1.0))


@case
def object_that_answers_comes_in_the_place_of_another() -> Made:
    return in_the_place_of(Answers(), Answers(rate=2.0), lambda value: value.rate)


@more
def namespace_with_a_name_comes_in_the_place_of_one_without() -> Made:
    one, other = argparse.Namespace(), argparse.Namespace(rate=2.0)
    return in_the_place_of(one, other, lambda value: 2.0 if "rate" in value else 1.0)


@more
def function_with_an_attribute_comes_in_the_place_of_one_without() -> Made:
    def made(**attributes: float) -> Callable[[], float]:
        def one() -> float:
            return 1.0

        one.__dict__.update(attributes)
        return one

    return in_the_place_of(made(), made(rate=2.0), lambda value: value() * getattr(value, "rate", 1.0))


@more
def dictionary_with_an_attribute_comes_in_the_place_of_one_without() -> Made:
    one, other = Listed(a=1), Listed(a=1)
    other.rate = 2.0
    return in_the_place_of(one, other, rate_or_one)


@more
def object_with_a_filled_slot_comes_in_the_place_of_an_empty_one() -> Made:
    class Slotted:
        __slots__ = ("__weakref__", "rate")

    one, other = Slotted(), Slotted()
    other.rate = 2.0
    return in_the_place_of(one, other, rate_or_one)


@more
def module_that_answers_for_what_it_wraps_comes_in_the_place_of_another() -> Made:
    class Wraps(nn.Module):
        def __init__(self, **values: float) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.inner.rate = 1.0
            self.__dict__.update(values)

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    return in_the_place_of(Wraps(), Wraps(rate=2.0), lambda value: value.rate)


@case
def batches_of_which_later_ones_have_a_name() -> Made:
    batches = [Settings(x=x, y=y, **({"rate": 2.0} if i > 2 else {})) for i, (x, y) in enumerate(pairs())]
    return train(lambda m, b: mse(m, (b.x, b.y)) * rate_or_one(b), batches=batches)


# ---- entries ----


@case
def empty_containers_of_modules_that_fill() -> Made:
    class Grows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.named, self.listed, self.chain = nn.ModuleDict(), nn.ModuleList(), nn.Sequential()
            self.scales = nn.ParameterDict()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.chain(super().forward(x))
            for layer in (*self.named.values(), *self.listed):
                out = layer(out)
            for name in self.scales:
                out = out * self.scales[name]
            return out

    model = Grows()
    changes: dict[int, Callable[[], Any]] = {
        1: lambda: model.named.update({"squash": nn.Sigmoid()}),
        2: lambda: model.listed.append(nn.Tanh()),
        3: lambda: model.chain.append(nn.ReLU()),
        4: lambda: model.scales.update({"all": nn.Parameter(torch.tensor(2.0), requires_grad=False)}),
        5: model.named.clear,
    }
    return train(model=model, change=lambda i: changes.get(i, lambda: None)())


# ---- errors of arithmetic ----


def _numbers(function: Callable[[float], float], values: list[float], caught: bool, **rest: Any) -> Made:
    now = {"x": values[0]}

    def factor() -> float:
        try:
            return function(now["x"])
        except (ArithmeticError, ValueError):
            if not caught:
                raise
            return 3.0

    return scaled_by(factor, lambda i: now.update(x=values[i]), **rest)


@case
def division_by_zero_that_is_caught() -> Made:
    return _numbers(lambda x: 1.0 / x, [1.0, 0.5, 2.0, 0.0, 3.0, 0.0], caught=True)


@more
def division_by_zero_that_is_not_caught() -> Made:
    wanted = {3: ZeroDivisionError, 5: ZeroDivisionError}
    return _numbers(lambda x: 6 // x, [1, 2, 3, 0, 4, 0], caught=False, raises=wanted)


@more
def root_of_a_negative_number_that_is_caught() -> Made:
    return _numbers(math.sqrt, [1.0, 0.5, 2.0, -1.0, 3.0, -1.0], caught=True)
