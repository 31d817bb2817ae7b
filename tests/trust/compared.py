"""Objects that a loss tells apart by who they are, or finds as keys, and containers of classes of the user's own."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from tests.trust.case import Made, Net, at, cases_of, mse, nothing, train
from torch import nn

case, more = cases_of("compared")


class Part:
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


def told_apart(first: Any, second: Any, same: Callable[[Any, Any], Any]) -> Made:
    """Two entries of a list, the second of which is the first one at some steps."""
    held = [first, second]

    def change(i: int) -> None:
        held[1] = first if i in (3, 5) else second

    return train(lambda m, b: mse(m, b) * (1.0 if same(held[0], held[1]) else 0.3), change)


@case
def object_that_becomes_another_one() -> Made:
    return told_apart(Part(), Part(), lambda a, b: a is b)


@more
def objects_compared_without_an_equality() -> Made:
    return told_apart(Part(), Part(), lambda a, b: a == b)


@case
def object_looked_for_in_a_list() -> Made:
    return told_apart(Part(), Part(), lambda a, b: b in [a])


@case
def layer_that_becomes_the_head() -> Made:
    """`if layer is self.head`: the last layer is another one from some step on."""
    model = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)])
    stops = {"at": nn.Linear(6, 6)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0]
        for layer in m:
            x = layer(x.detach() if layer is stops["at"] else x)
        return (x - b[1]).square().mean()

    return train(loss, at(3, lambda: stops.update(at=model[1])), model=model)


@more
def dictionaries_that_become_one() -> Made:
    return told_apart({}, {}, lambda a, b: a is not b)


@more
def lists_that_become_one() -> Made:
    return told_apart([], [], lambda a, b: any(held is b for held in [a]))


@more
def classes_that_become_one() -> Made:
    return told_apart(type("One", (), {}), type("Two", (), {}), lambda a, b: a is b)


@case
def partial_functions_that_become_one() -> Made:
    return told_apart(functools.partial(int), functools.partial(int), lambda a, b: a == b)


@more
def tuples_that_become_one() -> Made:
    return told_apart(tuple([1, 2]), tuple([1, 2]), lambda a, b: a is b)


class Named:
    """Equal to others of its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@case
def key_that_is_equal_to_another() -> Made:
    weights = {Named("a"): 0.7}
    return train(lambda m, b: mse(m, b) * weights.get(Named("a"), 0.1), at(3, weights.update, {Named("b"): 1.0}))


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    seen: int = dataclasses.field(default=0, compare=False)


@more
def key_with_a_field_that_is_not_compared() -> Made:
    weights = {Task("a"): 0.7}
    return train(lambda m, b: mse(m, b) * weights.get(Task("a", 5), 0.1))


@case
def order_of_a_dictionary_by_its_last_use() -> Made:
    """A cache that puts what it gave to its end."""
    recent = OrderedDict(a=1.0, b=0.5, c=0.2)

    def loss(m: Any, b: Any) -> torch.Tensor:
        name = next(iter(recent))
        recent.move_to_end(name)
        return mse(m, b) * recent[name]

    return train(loss, state=lambda: list(recent))


class Seen(set):
    """Counts what is added."""

    times = 0

    def add(self, value: Any) -> None:
        self.times += 1
        super().add(value)


@case
def set_of_ones_own_that_is_written_to() -> Made:
    seen = Seen()

    def loss(m: Any, b: Any) -> torch.Tensor:
        seen.add("first")
        return mse(m, b)

    return train(loss, state=lambda: [set(seen), seen.times])


class Full(set):
    def __bool__(self) -> bool:
        return False


class Doubled(tuple):
    __slots__ = ()

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(place) * 2


class First(int):
    def __index__(self) -> int:
        return 0


@more
def truth_of_a_set_of_ones_own() -> Made:
    held = Full([1])
    return train(lambda m, b: mse(m, b) * (1.0 if held else 0.3))


@case
def tuple_with_a_subscript_of_its_own() -> Made:
    held = [Doubled((0.5, 1.0))]

    def change(i: int) -> None:
        held[0] = Doubled((0.1 * i, 1.0))

    return train(lambda m, b: mse(m, b) * (1.0 + held[0][0]), change)


@more
def number_that_names_another_place() -> Made:
    place, weights = First(2), [0.1, 0.5, 0.9]
    return train(lambda m, b: mse(m, b) * weights[place])


class Shared:
    """All of them have the same attributes."""

    common: dict[str, Any] = {}

    def __init__(self) -> None:
        self.__dict__ = Shared.common


@case
def objects_that_share_their_attributes() -> Made:
    first, second = Part(), Part()
    second.__dict__ = first.__dict__

    def loss(m: Any, b: Any) -> torch.Tensor:
        first.weight *= 0.9
        return mse(m, b) * second.weight

    return train(loss, state=lambda: first.weight)


@more
def object_made_with_shared_attributes() -> Made:
    Shared.common.clear()
    Shared.common["weight"] = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        made = Shared()
        made.weight *= 0.9
        return mse(m, b) * Shared().weight

    return train(loss, state=lambda: dict(Shared.common))


def typed(text: str, filename: str, **variables: Any) -> Any:
    """The `loss` of a program that was typed at a prompt, or given to `python -c`."""
    module = types.ModuleType("typed")
    vars(module).update(variables, mse=mse)
    exec(compile(text, filename, "exec"), vars(module))
    return module.loss  # type: ignore[attr-defined]


@case
def loss_typed_at_a_prompt() -> Made:
    """There is no file of it: `python -`, `python -c`, `exec`."""
    text = "def loss(m, b):\n    weight = 1.0 if 'late' in vars(held) else 0.3\n    held.late = 1\n    return mse(m, b) * weight"
    held = types.SimpleNamespace()
    return train(
        typed(text, "<stdin>", held=held), at(3, lambda: held.__dict__.clear()), state=lambda: dict(vars(held))
    )


@more
def loss_given_as_text() -> Made:
    model = Net()
    text = (
        "def loss(m, b):\n    try:\n        return mse(m, b) * m.weight\n    except AttributeError:\n"
        "        return mse(m, b)"
    )
    return train(typed(text, "<string>"), at(3, setattr, model, "weight", 0.3), model=model, state=nothing)


@more
def tuple_that_is_equal_to_another() -> Made:
    """(1, 2), (1.0, 2) and (True, 2) are equal, and written otherwise."""
    held: dict[str, Any] = {"shape": (1, 2)}
    values = [(1, 2), (1.0, 2), (1, 2), (True, 2), (1.0, 2), (1, 2)]
    return train(lambda m, b: mse(m, b) * len(str(held["shape"])), lambda i: held.update(shape=values[i]))


@case
def set_that_is_equal_to_another() -> Made:
    """8 and 0 share a place in the table of a set, so the order in which they came is that in which they are read."""
    held = {"now": {8, 0}, "kept": [{8, 0}, {0, 8}, {True, 8}, frozenset({1, 8})]}
    loss = lambda m, b: mse(m, b) * sum((i + 1) * (2 * k + (k is True)) for i, k in enumerate(held["now"]))  # noqa: E731
    return train(loss, lambda i: held.update(now=held["kept"][i // 2]))


@more
def zero_that_changes_its_sign() -> Made:
    held = {"offset": 0.0}
    loss = lambda m, b: mse(m, b) * (2.0 if str(held["offset"]) == "0.0" else 3.0)  # noqa: E731
    return train(loss, lambda i: held.update(offset=-0.0 if i in (2, 3) else 0.0))
