"""Python objects of rarer kinds that the loss reads and that change: buffers of bytes, shared numbers, mappings, metaclasses."""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import dataclasses
import decimal
import multiprocessing
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, at, cases_of, mse, train

case, more = cases_of("objects")


def by(read: Any, change: Any, **keywords: Any) -> Made:
    """The loss times what `read()` returns; `change` is called before step 3."""
    return train(lambda m, b: mse(m, b) * read(), at(3, change), **keywords)


@more
def shared_number_of_a_loader() -> Made:
    """What a curriculum shares with the workers of a DataLoader."""
    epoch = multiprocessing.Value("d", 1.0)
    return by(lambda: epoch.value, lambda: setattr(epoch, "value", 0.1))


@more
def number_of_c() -> Made:
    number = ctypes.c_double(1.0)
    return by(lambda: number.value, lambda: setattr(number, "value", 0.1))


@more
def array_of_numbers() -> Made:
    numbers = array.array("d", [1.0, 2.0])
    return by(lambda: numbers[0], lambda: numbers.__setitem__(0, 0.1))


@more
def bytes_that_change() -> Made:
    flags = bytearray(b"\x01\x02")
    return by(lambda: flags[0] / 2, lambda: flags.__setitem__(0, 9))


@more
def decimal_number() -> Made:
    held = {"weight": decimal.Decimal("1.0")}
    return by(lambda: float(held["weight"]), lambda: held.update(weight=decimal.Decimal("0.1")))


@more
def numpy_array_without_dimensions() -> Made:
    weight = np.array(1.0)
    return by(lambda: float(weight), lambda: weight.fill(0.1))


@more
def namespace_of_arguments() -> Made:
    args = argparse.Namespace(weight=1.0, nested=argparse.Namespace(power=2))

    def loss(m: Any, b: Any) -> torch.Tensor:
        return ((m(b[0]) - b[1]).abs() ** args.nested.power).mean() * vars(args)["weight"]

    def change(i: int) -> None:
        if i == 2:
            args.weight = 0.1
        if i == 4:
            args.nested.power = 3

    return train(loss, change)


@more
def attribute_named_by_a_string() -> Made:
    names = {"which": "one"}
    options = types.SimpleNamespace(one=1.0, two=0.1)
    return by(lambda: getattr(options, names["which"]), lambda: names.update(which="two"))


class Settings(Mapping):
    """A mapping of one's own, as configuration libraries have them."""

    def __init__(self, **values: Any) -> None:
        self.values_of = values

    def __getitem__(self, name: str) -> Any:
        return self.values_of[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of)

    def __len__(self) -> int:
        return len(self.values_of)

    def __getattr__(self, name: str) -> Any:
        if name == "values_of":
            raise AttributeError(name)
        return self[name]


@more
def mapping_of_ones_own() -> Made:
    settings = Settings(weight=1.0)
    return by(lambda: settings["weight"] * settings.get("extra", 1.0), lambda: settings.values_of.update(extra=0.1))


@more
def mapping_of_ones_own_by_attribute() -> Made:
    settings = Settings(inner=Settings(weight=1.0))
    return by(lambda: settings.inner.weight, lambda: settings.inner.values_of.update(weight=0.1))


class EasyDict(dict):
    """Keys are attributes."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        super().__setitem__(name, value)


@more
def dictionary_whose_keys_are_attributes() -> Made:
    settings = EasyDict(weight=1.0)
    return by(lambda: settings.weight, lambda: setattr(settings, "weight", 0.1))


@more
def dictionary_with_attributes_beside_its_keys() -> Made:
    settings = EasyDict(weight=1.0)
    return by(lambda: settings["weight"], lambda: dict.__setitem__(settings, "weight", 0.1))


@more
def frozen_dataclass_replaced() -> Made:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Config:
        weight: float = 1.0
        kind: str = "square"

    trainer = types.SimpleNamespace(config=Config())

    def loss(m: Any, b: Any) -> torch.Tensor:
        measure = F.mse_loss if trainer.config.kind == "square" else F.l1_loss
        return measure(m(b[0]), b[1]) * trainer.config.weight

    def change(i: int) -> None:
        if i == 2:
            trainer.config = dataclasses.replace(trainer.config, weight=0.1)
        if i == 4:
            trainer.config = dataclasses.replace(trainer.config, kind="absolute")

    return train(loss, change)


@more
def class_with_a_metaclass() -> Made:
    class Meta(type):
        @property
        def weight(cls) -> float:
            return cls.numbers["weight"]

    class Config(metaclass=Meta):
        numbers = {"weight": 1.0}

    return by(lambda: Config.weight, lambda: Config.numbers.update(weight=0.1))


@case
def metaclass_attribute() -> Made:
    class Meta(type):
        weight = 1.0

    class Config(metaclass=Meta):
        pass

    return by(lambda: Config.weight, lambda: setattr(Meta, "weight", 0.1))


@case
def class_of_the_closure_replaced() -> Made:
    class Config:
        weight = 1.0

    def change() -> None:
        nonlocal Config

        class Other:
            weight = 0.1

        Config = Other

    return train(lambda m, b: mse(m, b) * Config.weight, at(3, change))


@case
def empty_containers_that_fill() -> Made:
    """Nothing in them at first: the loops over them do nothing."""
    terms: dict[str, float] = {}
    factors: list[float] = []
    tags: set[str] = set()
    more: collections.OrderedDict = collections.OrderedDict()

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        for value in terms.values():
            out = out * value
        for factor in factors:
            out = out * factor
        for _ in tags:
            out = out * 0.7
        for _, value in more.items():
            out = out * value
        return out

    changes = {
        1: lambda: terms.update(a=0.5),
        2: lambda: factors.append(0.3),
        3: lambda: tags.add("x"),
        4: lambda: more.update(b=2.0),
    }
    return train(loss, lambda i: changes.get(i, lambda: None)())


@more
def annotations_of_a_function_read() -> Made:
    def field(x: float = 1.0) -> None: ...

    field.__annotations__["gain"] = 1.0
    return train(
        lambda m, b: mse(m, b) * field.__annotations__["gain"], at(3, field.__annotations__.__setitem__, "gain", 0.25)
    )


@case
def property_of_a_metaclass() -> Made:
    class Meta(type):
        held = 1.0

        @property
        def gain(cls) -> float:
            return cls.held

    class Config(metaclass=Meta): ...

    return train(lambda m, b: mse(m, b) * Config.gain, at(3, setattr, Meta, "held", 0.25))


@more
def property_of_a_metaclass_that_counts() -> Made:
    asked: list[int] = []

    class Meta(type):
        @property
        def gain(cls) -> float:
            asked.append(1)
            return 1.0 / len(asked)

    class Config(metaclass=Meta): ...

    return train(lambda m, b: mse(m, b) * Config.gain, state=lambda: len(asked))


@more
def descriptor_of_a_metaclass() -> Made:
    class Field:
        held = 1.0

        def __get__(self, owner: Any, kind: Any = None) -> float:
            return self.held

        def __set__(self, owner: Any, value: float) -> None:
            self.held = value

    class Meta(type):
        gain = Field()

    class Config(metaclass=Meta): ...

    return train(lambda m, b: mse(m, b) * Config.gain, at(3, setattr, Config, "gain", 0.25))


class ByKey(dict):
    """A config of `easydict`'s kind."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@case
def keys_as_attributes_by_methods_of_dict() -> Made:
    config = ByKey(loss=ByKey(weight=1.0), name="l2")

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b) * config.loss.weight
        return out * 0.5 if config.name == "half" else out

    def change(i: int) -> None:
        config.loss.weight = 1.0 / (1 + i)
        if i == 4:
            config.name = "half"

    return train(loss, change)


class ByGet(dict):
    """None for what is missing."""

    __getattr__ = dict.get


@more
def key_as_an_attribute_that_is_missing_at_first() -> Made:
    config = ByGet(weight=1.0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b) * config.weight
        return out if config.scale is None else out * config.scale

    return train(loss, at(3, config.update, scale=0.25))


@more
def key_as_an_attribute_that_is_shadowed() -> Made:
    config = ByGet(weight=1.0)
    return train(lambda m, b: mse(m, b) * config.weight, at(3, setattr, config, "weight", 0.25))


@more
def key_as_an_attribute_written_by_the_loss() -> Made:
    config = ByKey(weight=1.0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        config.weight = config.weight * 0.5
        return mse(m, b) * config.weight

    return train(loss, state=lambda: config["weight"])
