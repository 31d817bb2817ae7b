"""Classes that a function makes: what their methods close over changes, and is written to, though no place leads to the methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.trust.case import STEPS, Made, cases_of, mse, train
from torch import nn

case, more = cases_of("closures")

Use = Callable[[Any], Any]


def reading(make: Callable[[list[Any], dict[str, Any]], Any], use: Use, held: bool = False) -> Made:
    """The loss times use(object); `make` gets a log and the setting that rises, and returns what makes the object."""
    log: list[Any] = []
    setting = {"weight": 1.0}
    build = make(log, setting)
    one = build() if held else None
    loss = lambda m, b: mse(m, b) * use(one if held else build())  # noqa: E731
    return train(loss, lambda i: setting.update(weight=1.0 + i * 2 // STEPS), state=lambda: list(log))


def weighing(log: list[Any], setting: dict[str, Any]) -> type:
    def shared(self: Any, *others: Any) -> Any:
        log.append(len(others))
        return setting["weight"]

    def above(self: Any, other: Any) -> bool:
        return shared(self, other) > 1.5

    names = "__call__ __add__ __getitem__ __float__ __getattr__ plain"
    return type("Weighing", (), {**dict.fromkeys(names.split(), shared), "__lt__": above, "rate": property(shared)})


@case
def method_of_an_object_that_the_loss_makes() -> Made:
    return reading(weighing, lambda one: one.plain())


@more
def operators_of_an_object_that_the_loss_makes() -> Made:
    return reading(weighing, lambda one: one() * (one + 1) * one[0] * float(one) * (2 if one < 1 else 1))


@more
def properties_of_an_object_that_the_loss_makes() -> Made:
    return reading(weighing, lambda one: one.rate * one.missing)


@case
def comparison_of_an_object_that_is_held() -> Made:
    return reading(weighing, lambda one: 2.0 if one < 1 else 1.0, held=True)


@case
def context_that_the_loss_enters_writes_to_a_list() -> Made:
    def make(log: list[Any], setting: dict[str, Any]) -> type:
        class Timed:
            def __enter__(self) -> float:
                log.append("in")
                return setting["weight"]

            def __exit__(self, *error: Any) -> None:
                log.append("out")

        return Timed

    def use(one: Any) -> float:
        with one as weight:
            return weight

    return reading(make, use)


@more
def object_that_logs_when_it_is_made() -> Made:
    def make(log: list[Any], setting: dict[str, Any]) -> type:
        class Term:
            def __init__(self) -> None:
                log.append("made")
                self.weight = setting["weight"]

            def __setattr__(self, name: str, value: Any) -> None:
                log.append(name)
                super().__setattr__(name, value)

        return Term

    return reading(make, lambda one: one.weight)


@more
def defaults_and_attributes_of_a_method() -> Made:
    def make(log: list[Any], setting: dict[str, Any]) -> type:
        class Term:
            def value(self, seen: list[Any] = log, *, now: dict[str, Any] = setting) -> float:
                seen.append("asked")
                return now["weight"]

        Term.value.setting = setting
        return Term

    return reading(make, lambda one: one.value() * one.value.setting["weight"])


@more
def module_that_the_loss_makes() -> Made:
    def make(log: list[Any], setting: dict[str, Any]) -> type:
        class Scales(nn.Module):
            def forward(self, x: Any) -> Any:
                log.append("called")
                return x * setting["weight"]

        return Scales

    return reading(make, lambda one: one(1.0))
