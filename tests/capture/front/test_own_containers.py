"""Containers of classes of one's own: written as Python writes them, or refused by name."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp
from torch import nn

import wholestep
from wholestep.errors import WholestepWarning

BATCHES = class_batches(4)


@pytest.mark.parametrize("last", [True, False])
def test_the_order_of_a_dictionary_is_written(last: bool) -> None:
    def make() -> Side:
        model, names = small_mlp(), OrderedDict(a=1, b=2, c=3)

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            names.move_to_end("b", last=last)
            return classify(model, batch)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, names)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES)
    assert list(twins.ours.extra) == list(twins.theirs.extra)
    assert twins.step.rung == "whole step", twins.step.explain()


class Seen(set):
    def add(self, value: Any) -> None:
        super().add(value)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Keyed:
    """No Mapping, and dict takes it."""

    def __init__(self, **held: Any) -> None:
        self.held = held

    def keys(self) -> Any:
        return self.held.keys()

    def __iter__(self) -> Any:
        return iter(self.held)

    def __getitem__(self, key: str) -> Any:
        return self.held[key]


class Table(dict):
    pass


class Half(Table):
    """Walked over in its own way: dict asks for its keys too."""

    def __iter__(self) -> Any:
        return iter(["scale"])

    def keys(self) -> Any:
        return ["scale"]


class Told(Table):
    """Dictionaries are made of what it holds, whatever it says."""

    def items(self) -> Any:
        return [("ab", 7.0)]


@pytest.mark.parametrize(
    "make_dict", [dict, OrderedDict, Table, lambda x: defaultdict(float, x), lambda x: {"z": 1} | dict(x, y=2)]
)
@pytest.mark.parametrize("what", ["parameters", "modules", "own", "half", "told"])
def test_a_dictionary_of_what_has_keys(make_dict: Callable[[Any], Any], what: str) -> None:
    """Keys of two letters, which would pass for pairs, and longer ones."""

    def make() -> Side:
        model = nn.Module()
        model.net = small_mlp()
        model.parameters_by_name = nn.ParameterDict(
            {"ab": nn.Parameter(torch.full((), 0.5)), "scale": nn.Parameter(torch.ones(()))}
        )
        model.modules_by_name = nn.ModuleDict({"ab": nn.Linear(2, 2), "scale": nn.Linear(2, 2)})
        own, half, told = (kind(ab=0.5, scale=2.0) for kind in (Keyed, Half, Told))

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            tables = {"parameters": model.parameters_by_name, "modules": model.modules_by_name}
            held = make_dict(({**tables, "own": own, "half": half, "told": told})[what])
            first = held.get("ab")
            if what == "modules":
                first = 0.0 if first is None else first.weight.sum()
            return classify(model.net, batch) * (1.0 if first is None else first) + ("scale" in held)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()


SEEN, NAMED = Seen(), {Named("a"): 2.0}


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda: SEEN.add(1), "class Seen is written to"),
        (lambda: NAMED.get(Named("a")), "class Named are keys|Named. with overridden __hash__"),
    ],
)
def test_it_is_refused_by_name(act: Callable[[], Any], told: str) -> None:
    model = small_mlp()

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        act()
        return classify(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, loss_fn, optimizer, BATCHES[0], backend="interpret", cache=False)
    with pytest.warns(WholestepWarning, match=told):
        for batch in BATCHES[:2]:
            step(batch)
    assert step.rung == "eager"


def test_the_same_object_is_a_key_as_ever() -> None:
    """Only keys that are equal and not one object are compared by their class."""
    key = Named("b")
    weights = {key: 0.5}
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(
        model, lambda m, b: classify(m, b) * weights[key], optimizer, BATCHES[0], backend="interpret", cache=False
    )
    step(BATCHES[0])
    told = step.explain()  # torch 2.11 refuses such keys itself
    assert step.rung == "whole step" or "overridden __hash__" in told, told
