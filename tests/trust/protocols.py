"""Objects that answer for themselves (checks, conversions, lookups), and numbers, batches and tensors of several kinds."""

from __future__ import annotations

import abc
import collections
import functools
import queue
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, pairs, train
from tests.trust.objects import by
from torch import nn

case, more = cases_of("protocols")


@case
def virtual_subclass_registered_later() -> Made:
    class Small(abc.ABC):  # noqa: B024
        pass

    class Plain:
        pass

    thing = Plain()
    return by(lambda: 0.1 if isinstance(thing, Small) else 1.0, lambda: Small.register(Plain))


@case
def instance_check_of_ones_own() -> Made:
    known: set[str] = set()

    class Meta(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return type(value).__name__ in known

    class Marked(metaclass=Meta):
        pass

    return train(
        lambda m, b: mse(m, b) * (0.1 if isinstance(m, Marked) else 1.0),
        at(3, known.add, "Net"),
        state=lambda: set(known),
    )


@more
def truth_and_length_of_an_object() -> Made:
    class Bag:
        def __init__(self) -> None:
            self.items = [1.0]

        def __len__(self) -> int:
            return len(self.items)

        def __contains__(self, item: float) -> bool:
            return item in self.items

        def __iter__(self) -> Iterator[float]:
            return iter(self.items)

    bag = Bag()
    return by(lambda: (0.3 if 2.0 in bag else 1.0) * len(bag) * sum(bag) if bag else 0.5, lambda: bag.items.append(2.0))


@more
def conversions_of_an_object() -> Made:
    class Number:
        def __init__(self) -> None:
            self.value = 1.0

        def __float__(self) -> float:
            return self.value

        def __index__(self) -> int:
            return int(self.value)

    number = Number()
    return by(lambda: float(number) + range(5)[number], lambda: setattr(number, "value", 3.0))


@more
def comparison_of_ones_own() -> Made:
    class Phase:
        def __init__(self, name: str) -> None:
            self.name = name

        def __eq__(self, other: Any) -> bool:
            return self.name == other.name

        def __hash__(self) -> int:
            return hash(self.name)

    phase, warm = Phase("warm"), Phase("warm")
    table = {Phase("warm"): 1.0, Phase("cold"): 0.5}
    return by(lambda: table[phase] if phase == warm else 0.1, lambda: setattr(phase, "name", "cold"))


@more
def weak_dictionary() -> Made:
    class Key:
        pass

    key = Key()
    table: Any = weakref.WeakKeyDictionary({key: 1.0})
    return by(lambda: table[key], lambda: table.__setitem__(key, 0.1), state=lambda: len(table))


@more
def weak_set() -> Made:
    class Key:
        pass

    keys = [Key(), Key()]
    known: Any = weakref.WeakSet(keys[:1])
    return by(lambda: len(known), lambda: known.add(keys[1]))


@more
def queue_of_weights() -> Made:
    line: queue.SimpleQueue = queue.SimpleQueue()
    line.put(1.0)
    return by(lambda: line.qsize(), lambda: line.put(2.0))


@more
def lambdas_over_a_loop_variable() -> Made:
    held = {}
    for factor in (1.0, 2.0):
        held[factor] = lambda x: x * factor  # noqa: B023

    def change() -> None:
        nonlocal factor
        factor = 0.1

    return train(lambda m, b: held[1.0](mse(m, b)), at(3, change))


@more
def cell_shared_by_two_functions() -> Made:
    def make() -> tuple[Any, Any]:
        weight = 1.0

        def read() -> float:
            return weight

        def write(value: float) -> None:
            nonlocal weight
            weight = value

        return read, write

    read, write = make()
    return by(read, functools.partial(write, 0.1))


@more
def method_found_by_dispatch() -> Made:
    class Reader:
        factor = 1.0

        @functools.singledispatchmethod
        def read(self, value: Any) -> float:
            return 1.0

        @read.register
        def _(self, value: int) -> float:
            return self.factor

    reader = Reader()
    return by(lambda: reader.read(3), lambda: setattr(reader, "factor", 0.1))


@more
def cached_property_set_by_hand() -> Made:
    class Reader:
        base = 1.0

        @functools.cached_property
        def weight(self) -> float:
            return self.base

    reader = Reader()

    def change(i: int) -> None:
        if i == 2:
            reader.base = 0.5  # not seen: cached
        if i == 4:
            reader.__dict__["weight"] = 0.1

    return train(lambda m, b: mse(m, b) * reader.weight, change, state=lambda: vars(reader))


@more
def cache_of_a_class() -> Made:
    """Computed at the first call, kept on the class, and read by all."""

    class Encoder:
        cache: dict[int, float] = {}

        @classmethod
        def weight(cls, n: int) -> float:
            if n not in cls.cache:
                cls.cache[n] = 1.0 / (len(cls.cache) + 1)
            return cls.cache[n]

    return train(
        lambda m, b: mse(m, b) * Encoder.weight(b[0].shape[0]), at(3, lambda: Encoder.cache.update({8: 0.1})),
        state=lambda: Encoder.cache,
    )  # fmt: skip


@case
def number_of_another_kind() -> Made:
    """1, 1.0 and True are equal, and promote tensors differently."""
    model = Net()
    model.unit = 1
    kinds = [1, 1, 1.0, 1.0, True, 1]

    def loss(m: Any, b: Any) -> torch.Tensor:
        steps = torch.arange(8) * m.unit
        m.seen = steps.dtype
        return (((m(b[0]) - b[1]) ** 2).mean(1) * steps).mean() * (0.5 if steps.dtype == torch.float32 else 1.0)

    model.seen = None
    return train(loss, lambda i: setattr(model, "unit", kinds[i]), model=model, state=lambda: str(model.seen))


@more
def number_of_another_kind_in_containers() -> Made:
    held: dict[str, Any] = {"list": [1], "unit": 1}
    kinds = [1, 1, 1.0, 1.0, True, 1]

    def loss(m: Any, b: Any) -> torch.Tensor:
        steps = torch.arange(8) * held["list"][0] * held["unit"]
        return mse(m, b) * (0.5 if steps.dtype == torch.float32 else 1.0)

    def change(i: int) -> None:
        held["list"][0] = held["unit"] = kinds[i]

    return train(loss, change)


@more
def number_of_another_kind_in_the_batch() -> Made:
    kinds = [1, 1, 1.0, 1.0, True, 1]

    def loss(m: Any, b: Any) -> torch.Tensor:
        steps = torch.arange(8) * b["unit"]
        return mse(m, b["pair"]) * (0.5 if steps.dtype == torch.float32 else 1.0)

    return train(loss, batches=[{"pair": pair, "unit": kind} for pair, kind in zip(pairs(), kinds)])


@more
def number_that_is_not_one() -> Made:
    """NaN is not equal to itself; the loss asks."""
    model = Net()
    model.target = float("nan")
    loss = lambda m, b: mse(m, b) * (1.0 if m.target != m.target else m.target)  # noqa: E731
    return train(loss, at(3, setattr, model, "target", 0.1), model=model)


class Forward(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Backward(NamedTuple):
    y: torch.Tensor
    x: torch.Tensor


@more
def batches_of_two_kinds_of_tuple() -> Made:
    batches = [Forward(*pair) if i < 3 else Backward(y=pair[1], x=pair[0]) for i, pair in enumerate(pairs())]
    return train(lambda m, b: F.mse_loss(m(b.x), b.y), batches=batches)


@more
def batch_becomes_a_list() -> Made:
    batches = [pair if i < 3 else list(pair) for i, pair in enumerate(pairs())]
    return train(lambda m, b: mse(m, b) * (0.1 if isinstance(b, list) else 1.0), batches=batches)


@more
def dtypes_and_devices_as_attributes() -> Made:
    model = Net()
    model.compute = torch.float32
    loss = lambda m, b: F.mse_loss(m(b[0]).to(m.compute).float(), b[1].to(m.compute).float())  # noqa: E731
    return train(loss, at(3, setattr, model, "compute", torch.bfloat16), model=model)


class Tagged(torch.Tensor):
    """A subclass that scales what is computed with it."""

    factor = 1.0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * cls.factor if func is F.linear else out


@more
def subclass_of_tensor_with_a_factor() -> Made:
    batches = [(x.as_subclass(Tagged), y) for x, y in pairs()]
    loss = lambda m, b: F.mse_loss(m(b[0]).as_subclass(torch.Tensor), b[1])  # noqa: E731
    return train(
        loss, at(3, setattr, Tagged, "factor", 0.5), batches=batches, cleanup=lambda: setattr(Tagged, "factor", 1.0)
    )


@more
def subclass_of_tensor_comes_later() -> Made:
    Tagged.factor = 0.5
    batches = [(x.as_subclass(Tagged) if i >= 3 else x, y) for i, (x, y) in enumerate(pairs())]
    loss = lambda m, b: F.mse_loss(m(b[0]).as_subclass(torch.Tensor), b[1])  # noqa: E731
    return train(loss, batches=batches, cleanup=lambda: setattr(Tagged, "factor", 1.0))


@more
def module_with_attributes_of_its_own_making() -> Made:
    """`__getattr__` of a module that looks into a table."""

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = {"weight": 1.0}

        def __getattr__(self, name: str) -> Any:
            table = self.__dict__.get("table")
            if table is not None and name in table:
                return table[name]
            return super().__getattr__(name)

    model = Model()
    loss = lambda m, b: mse(m, b) * m.weight  # noqa: E731
    return train(loss, at(3, lambda: model.table.update(weight=0.1)), model=model)


@more
def attribute_lookup_of_ones_own() -> Made:
    class Late:
        def __init__(self) -> None:
            self.weight = 1.0
            self.scale = 1.0

        def __getattribute__(self, name: str) -> Any:
            value = object.__getattribute__(self, name)
            return value * object.__getattribute__(self, "scale") if name == "weight" else value

    late = Late()
    return by(lambda: late.weight, lambda: setattr(late, "scale", 0.1))


@case
def modules_walked_by_kind() -> Made:
    """A penalty on all layers of a kind, found anew in each step."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = [x for x in m.modules() if isinstance(x, nn.Linear) and x.bias is not None]
        return mse(m, b) + sum(x.weight.square().sum() for x in found) + 0.1 * len(dict(m.named_buffers()))

    def change(i: int) -> None:
        if i == 2:
            model[0].bias = None
        if i == 4:
            model[2].register_buffer("extra", torch.ones(1))

    return train(loss, change, model=model)


@more
def names_of_modules_read() -> Made:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 3)})

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0]
        for name, layer in m.items():
            x = layer(x) * (0.5 if name.startswith("b") else 1.0)
        return F.mse_loss(x[:, :3], b[1])

    def change(i: int) -> None:
        if i == 3:
            layer = model.pop("b")
            model["c"] = layer

    return train(loss, change, model=model)


@more
def counter_by_kind_of_error() -> Made:
    tally: collections.Counter = collections.Counter()

    def loss(m: Any, b: Any) -> torch.Tensor:
        tally["calls"] += 1
        tally.update(["even" if tally["calls"] % 2 == 0 else "odd"])
        return mse(m, b) * (1.0 if tally["calls"] < 4 else 0.1)

    return train(loss, state=lambda: dict(tally))


@more
def stack_of_contexts_of_ones_own() -> Made:
    """A context manager with a class-level stack, entered outside of the step."""

    class Scale:
        stack: list[float] = [1.0]

        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __enter__(self) -> None:
            self.stack.append(self.factor)

        def __exit__(self, *_: object) -> None:
            self.stack.pop()

    held: list[Any] = []

    def change(i: int) -> None:
        if i == 2:
            held.append(Scale(0.1))
            held[-1].__enter__()
        if i == 4:
            held.pop().__exit__()

    return train(lambda m, b: mse(m, b) * Scale.stack[-1], change)


@more
def bytes_and_text_of_the_batch() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b["pair"]) * (0.1 if b["tag"] == b"b" else 1.0)

    return train(loss, batches=[{"pair": pair, "tag": b"a" if i < 3 else b"b"} for i, pair in enumerate(pairs())])
