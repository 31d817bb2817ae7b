"""Undo: whatever code does to the Python objects that it can reach is put back, container by container."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wholestep.capture.undo import Undo

COUNT = 0
TABLE: dict[str, Any] = {"a": [1, 2]}


class Slotted:
    """Attributes without a dictionary, a private one among them."""

    __slots__ = ("__hidden", "value")

    def __init__(self) -> None:
        self.value, self.__hidden = 1, [1]

    def change(self) -> None:
        self.value = 2
        self.__hidden.append(2)

    def seen(self) -> Any:
        return self.value, list(self.__hidden)


class Counted:
    """A class attribute, changed through the class."""

    total = 0
    names: list[str] = []


class Both(dict):
    """A container with attributes of its own."""


def bump() -> None:
    global COUNT
    COUNT += 1
    TABLE["a"].append(COUNT)
    TABLE["new"] = 1


def with_cell() -> tuple[Callable[[], None], Callable[[], Any]]:
    count, deep = 0, {"inner": [(1, [2])]}

    def act() -> None:
        nonlocal count
        count += 1
        deep["inner"][0][1].append(count)

    return act, lambda: (count, deep["inner"][0][1][:])


def acts_on(value: Any, act: Callable[[Any], Any], seen: Callable[[Any], Any]) -> tuple[Callable, Callable]:
    """A function that changes an object of its closure, and one that looks at it."""
    return (lambda: act(value)), (lambda: seen(value))


def counted() -> None:
    Counted.total += 1
    Counted.names.append("x")


def with_method() -> tuple[Callable, Callable]:
    class Trainer:
        def __init__(self) -> None:
            self.steps, self.history = 0, []

        def act(self) -> None:
            self.steps += 1
            self.history.append(self.steps)
            self.added = True

    trainer = Trainer()
    return trainer.act, lambda: dict(vars(trainer), history=list(trainer.history))


def with_partial() -> tuple[Callable, Callable]:
    held: list[int] = []
    return functools.partial(lambda kept, more: kept.append(len(more)), held, more=[1]), lambda: list(held)


def with_default() -> tuple[Callable, Callable]:
    kept: list[int] = []

    def act(seen: list[int] = kept, *, also: list[int] = kept) -> None:
        seen.append(1)
        also.append(2)

    return act, lambda: list(kept)


def with_attribute_of_a_function() -> tuple[Callable, Callable]:
    def act() -> None:
        act.calls += 1

    act.calls = 0
    return act, lambda: act.calls


def nested_class() -> tuple[Callable, Callable]:
    return counted, lambda: (Counted.total, list(Counted.names))


def module() -> tuple[Callable, Callable]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))

    def act() -> None:
        model.eval()
        model[1].p = 0.5
        model[0].extra = 3
        model.add_module("late", nn.Linear(2, 2))
        model[0].register_forward_hook(lambda *_: None)

    def seen() -> Any:
        return [*model._modules], model.training, model[1].p, hasattr(model[0], "extra"), len(model[0]._forward_hooks)

    return act, seen


def generator(source: Any, draw: Callable[[Any], Any]) -> tuple[Callable, Callable]:
    """Looked at by drawing, on a copy of its state."""
    import copy

    def seen() -> Any:
        if isinstance(source, torch.Generator):
            return source.get_state().tolist()
        return float(draw(copy.deepcopy(source)))

    return (lambda: draw(source)), seen


KINDS: dict[str, Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]] = {
    "list": lambda: acts_on([1, 2], lambda v: (v.append(3), v.pop(0)), list),
    "list in place": lambda: acts_on([3, 1, 2], lambda v: v.sort(), list),
    "dict": lambda: acts_on({"a": 1, "b": 2}, lambda v: (v.pop("a"), v.update(c=3)), lambda v: list(v.items())),
    "order of a dict": lambda: acts_on({"a": 1, "b": 2}, lambda v: v.update(a=v.pop("a")), lambda v: list(v.items())),
    "ordered dict": lambda: acts_on(collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), lambda v: list(v)),
    "default dict": lambda: acts_on(collections.defaultdict(list), lambda v: v["x"].append(1), dict),
    "counter": lambda: acts_on(collections.Counter("aab"), lambda v: v.update("b"), dict),
    "dict with attributes": lambda: acts_on(
        Both(a=1), lambda v: (v.update(a=2), setattr(v, "x", 1)), lambda v: (dict(v), dict(vars(v)))
    ),
    "set": lambda: acts_on({1, 2}, lambda v: (v.add(3), v.discard(1)), sorted),
    "deque": lambda: acts_on(collections.deque([1, 2], maxlen=2), lambda v: v.append(3), lambda v: (list(v), v.maxlen)),
    "list in a tuple": lambda: acts_on((1, ([2],)), lambda v: v[1][0].append(3), lambda v: list(v[1][0])),
    "named tuple": lambda: acts_on(collections.namedtuple("P", "a")([1]), lambda v: v.a.append(2), lambda v: list(v.a)),
    "slots": lambda: acts_on(Slotted(), Slotted.change, Slotted.seen),
    "array": lambda: acts_on(np.zeros(3), lambda v: v.__setitem__(0, 1.0), lambda v: v.tolist()),
    "cell": with_cell,
    "global": lambda: (bump, lambda: (COUNT, repr(TABLE))),
    "class": nested_class,
    "bound method": with_method,
    "partial": with_partial,
    "defaults": with_default,
    "function's attribute": with_attribute_of_a_function,
    "module": module,
    "random.Random": lambda: generator(random.Random(1), lambda r: r.random()),
    "numpy generator": lambda: generator(np.random.default_rng(1), lambda r: r.random()),
    "numpy state": lambda: generator(np.random.RandomState(1), lambda r: r.rand()),
    "torch generator": lambda: generator(torch.Generator().manual_seed(1), lambda r: torch.rand(1, generator=r)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_put_back(kind: str) -> None:
    act, seen = KINDS[kind]()
    before = seen()
    undo = Undo(act)
    act()
    assert seen() != before, "the change must be one"
    undo.restore()
    assert seen() == before
    act()
    undo.restore()
    assert seen() == before, "and once more"


def test_global_generators_are_put_back() -> None:
    undo = Undo()
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    undo.restore()
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_identity_stays() -> None:
    """The containers themselves are filled again; nobody who holds one is left with another."""
    inner: list[int] = [1]
    outer = {"inner": inner}
    undo = Undo(lambda: outer)
    outer["inner"] = [5]
    inner.append(2)
    undo.restore()
    assert outer["inner"] is inner and inner == [1]


def test_data_of_tensors_is_not_its_business() -> None:
    held = [torch.zeros(2)]
    undo = Undo(lambda: held)
    held[0].add_(1)
    kept = held[0]
    held[0] = torch.ones(1)
    undo.restore()
    assert held[0] is kept and held[0].tolist() == [1.0, 1.0]


def test_a_ring_of_references_ends() -> None:
    ring: list[Any] = []
    ring.append({"back": ring})
    undo = Undo(lambda: ring)
    ring.append(1)
    undo.restore()
    assert len(ring) == 1 and ring[0]["back"] is ring


def test_an_attribute_that_was_added_is_taken_away_from_slots_and_classes() -> None:
    class Empty:
        __slots__ = ("value",)

    class Shared:
        pass

    held = Empty()

    def act() -> None:
        held.value = 1
        Shared.late = 2

    undo = Undo(act)
    act()
    undo.restore()
    assert not hasattr(held, "value") and not hasattr(Shared, "late")
