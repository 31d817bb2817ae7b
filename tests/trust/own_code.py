"""Code that classes, metaclasses and enums have for operators, functions whose module is not found by its name, and other places
that Dynamo takes for constant."""

from __future__ import annotations

import builtins
import enum
import importlib.util
import os
import sys
import tempfile
import types
import typing
import weakref
from os import getenv as setting_of
from pathlib import Path
from typing import Any

import torch
from tests.trust.case import Made, Net, at, cases_of, mse, pairs, train
from torch import nn

case, more = cases_of("own code")

NOW = {"weight": 1.0}


def rising(weight: Any) -> Made:
    """The loss times weight(), while NOW["weight"] rises."""
    NOW["weight"] = 1.0
    return train(lambda m, b: mse(m, b) * weight(), lambda i: NOW.update(weight=1.0 + i))


class Registry(type):
    def __len__(cls) -> int:
        return int(NOW["weight"])

    def __getitem__(cls, key: str) -> float:
        return NOW[key]

    def __eq__(cls, other: object) -> bool:
        return NOW["weight"] > 3

    __hash__ = type.__hash__


class Known(metaclass=Registry):
    pass


class Table:
    def __class_getitem__(cls, key: str) -> float:
        return NOW[key]


class Mode(enum.Enum):
    SLOW, FAST = 1, 2

    def __lt__(self, other: Mode) -> bool:
        return self.value * NOW["weight"] < other.value

    def __str__(self) -> str:
        return "late" if NOW["weight"] > 3 else "early"

    def __bool__(self) -> bool:
        return NOW["weight"] < 3

    @classmethod
    def _missing_(cls, value: object) -> Mode:
        return cls.SLOW if NOW["weight"] < 3 else cls.FAST


class Count(int):
    def __bool__(self) -> bool:
        return NOW["weight"] < 3


@more
def length_of_a_class() -> Made:
    return rising(lambda: len(Known))


@more
def item_by_a_metaclass() -> Made:
    return rising(lambda: Known["weight"])


@more
def classes_told_apart_by_a_metaclass() -> Made:
    return rising(lambda: 2.0 if Known != 3 else 1.0)


@more
def item_of_a_class() -> Made:
    return rising(lambda: Table["weight"])


@more
def members_of_an_enum_compared() -> Made:
    return rising(lambda: 2.0 if Mode.SLOW < Mode.FAST else 1.0)


@more
def member_of_an_enum_as_text() -> Made:
    return rising(lambda: 2.0 if f"{Mode.SLOW}" == "late" else 1.0)


@more
def truth_of_a_member_of_an_enum() -> Made:
    return rising(lambda: 2.0 if Mode.SLOW else 1.0)


@more
def truth_of_a_number_of_ones_own() -> Made:
    count = Count(1)
    return rising(lambda: 1.0 if not count else 2.0)


@more
def member_of_an_enum_that_is_missing() -> Made:
    return rising(lambda: float(Mode("unknown").value))


@more
def objects_made_by_a_metaclass() -> Made:
    class Scaling(type):
        def __call__(cls, value: float) -> Any:
            made = super().__call__()
            made.value = value * NOW["weight"]
            return made

    class Term(metaclass=Scaling):
        value: float

    return rising(lambda: Term(1.0).value)


@more
def object_that_counts_its_end() -> Made:
    ended = [0]

    class Term:
        def __del__(self) -> None:
            ended[0] += 1

    def loss(m: Any, b: Any) -> torch.Tensor:
        term = Term()
        term.value = mse(m, b)  # type: ignore[attr-defined]
        return term.value * 2  # type: ignore[attr-defined]

    return train(loss, state=lambda: ended[0])


@more
def protocol_that_an_object_comes_to_meet() -> Made:
    @typing.runtime_checkable
    class Weighted(typing.Protocol):
        weight: float

    holder = types.SimpleNamespace()
    return train(
        lambda m, b: mse(m, b) * (3.0 if isinstance(holder, Weighted) else 1.0), at(3, setattr, holder, "weight", 1.0)
    )


@more
def type_of_autocast_read() -> Made:
    kept = torch.get_autocast_dtype("cpu")
    return train(
        lambda m, b: mse(m, b) * (2.0 if torch.get_autocast_dtype("cpu") is torch.float16 else 1.0),
        at(3, torch.set_autocast_dtype, "cpu", torch.float16),
        cleanup=lambda: torch.set_autocast_dtype("cpu", kept),
    )


@more
def weak_dictionary_asked_for_a_missing_object() -> Made:
    weights: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
    model = Net()

    def change(i: int) -> None:
        if i in (1, 3):
            weights[model.a] = float(i)
        if i == 4:
            del weights[model.a]
        if i == 5:
            weights[model.b] = 3.0

    return train(lambda m, b: mse(m, b) * weights.get(m.a, 2.0) * (2.0 if m.b in weights else 1.0), change, model=model)


@more
def name_added_to_the_builtins() -> Made:
    builtins.ADDED = 1.0  # type: ignore[attr-defined]
    return train(
        lambda m, b: mse(m, b) * ADDED,  # type: ignore[name-defined]  # noqa: F821
        lambda i: setattr(builtins, "ADDED", 1.0 + i),
        cleanup=lambda: delattr(builtins, "ADDED"),
    )


@more
def environment_read_by_another_name() -> Made:
    name = "WHOLESTEP_TESTS_WEIGHT"
    return train(
        lambda m, b: mse(m, b) * float(setting_of("WHOLESTEP_TESTS_WEIGHT", "1")),
        lambda i: os.environ.update({name: str(1.0 + i // 3)}),
        cleanup=lambda: os.environ.pop(name),
    )


def loaded(name: str, *, known: bool) -> Any:
    """A module from a file: its function multiplies by a variable of it."""
    file = Path(tempfile.mkdtemp()) / "settings.py"
    file.write_text("WEIGHT = 1.0\n\n\ndef weigh(x):\n    return x * WEIGHT\n")
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    if known:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@more
def function_of_a_file_loaded_twice() -> Made:
    name = "wholestep_tests_settings"
    first = loaded(name, known=True)
    loaded(name, known=True).WEIGHT = 10.0
    return train(
        lambda m, b: first.weigh(mse(m, b)),
        lambda i: setattr(first, "WEIGHT", 1.0 + i),
        cleanup=lambda: sys.modules.pop(name),
    )


@more
def function_of_a_module_that_python_does_not_know() -> Made:
    module = loaded("wholestep_tests_unknown", known=False)
    return train(lambda m, b: module.weigh(mse(m, b)), lambda i: setattr(module, "WEIGHT", 1.0 + i))


@more
def function_with_variables_of_its_own() -> Made:
    """As functions are that were pickled by value."""
    plain = loaded("wholestep_tests_plain", known=False).weigh
    table = {"WEIGHT": 1.0, "__name__": __name__, "__builtins__": builtins}
    weigh = types.FunctionType(plain.__code__, table)
    return train(lambda m, b: weigh(mse(m, b)), lambda i: table.update(WEIGHT=1.0 + i))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


@more
def graph_module_edited() -> Made:
    model = torch.fx.symbolic_trace(Plain())

    def change(i: int) -> None:
        if i == 2:
            for node in model.graph.find_nodes(op="call_method", target="tanh"):
                node.target = "relu"
            model.recompile()
        if i == 4:
            torch.manual_seed(1)
            model.b = nn.Linear(16, 3, bias=False)

    return train(model=model, change=change)


@more
def queue_written_at_a_place_that_data_tells() -> Made:
    """It cannot be captured, and is found out inside of `no_grad`."""
    queue = torch.zeros(8, 3)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0])
        with torch.no_grad():
            place = int(b[2])
            queue[place : place + 2] = out[:2]
        return out.square().mean() + (out * queue).mean()

    batches = [(*batch, torch.tensor(3 + i % 3)) for i, batch in enumerate(pairs())]
    return train(loss, batches=batches, state=lambda: queue)


@more
def autocast_left_by_an_error() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(b[0])[: int(b[2])].float()
        return out.square().mean()

    return train(loss, batches=[(*batch, torch.tensor(3 + i % 3)) for i, batch in enumerate(pairs())])


@more
def namespace_written_by_the_loss() -> Made:
    state = types.SimpleNamespace(steps=0, last=None)

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        state.steps += 1
        state.last = found.detach()
        return found * (2.0 if state.steps > 3 else 1.0)

    return train(loss, state=lambda: [state.steps, state.last])


@more
def nearest_of_a_list_by_a_key() -> Made:
    wanted, known = {"now": 0.0}, [3.0, 1.0, 2.0]
    return train(
        lambda m, b: mse(m, b) * min(known, key=lambda x: abs(x - wanted["now"])) * max(known, key=lambda x: -x),
        lambda i: wanted.update(now=float(i)),
    )
