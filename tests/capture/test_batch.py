"""Batches of every shape people use: flattened and put back, cut into micro-batches, captured anew."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, interpreted, small_mlp
from torch import nn

from wholestep.capture.batch import flatten, split_batch, unflatten
from wholestep.errors import BadBatch

X, Y = torch.randn(6, 4), torch.randint(0, 3, (6,))


@dataclasses.dataclass
class Example:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "a"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.x))


Pair = collections.namedtuple("Pair", "x y")
BATCHES: dict[str, Any] = {
    "tensor": X,
    "tuple": (X, Y),
    "list": [X, Y],
    "named tuple": Pair(X, Y),
    "dict": {"x": X, "y": Y},
    "ordered dict": collections.OrderedDict(x=X, y=Y),
    "nested": {"a": [X, {"b": (Y, None)}], "flag": True, "name": "train", "scale": 0.5},
    "dataclass": Example(X, Y),
    "frozen dataclass": Frozen(X),
    "no tensor": {"a": 1},
}


def leaves_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if dataclasses.is_dataclass(a):
        return all(leaves_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(leaves_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(leaves_equal, a, b))
    return a == b


@pytest.mark.parametrize("name", BATCHES)
def test_there_and_back(name: str) -> None:
    batch = BATCHES[name]
    tensors, spec = flatten(batch)
    again = unflatten(tensors, spec)
    assert type(again) is type(batch) and leaves_equal(batch, again)
    assert hash(spec) == hash(flatten(again)[1]) and spec == flatten(again)[1]


def test_names_say_where_a_tensor_is() -> None:
    assert flatten(BATCHES["nested"])[1].names == ("a.0", "a.1.b.0") and flatten(X)[1].names == ("batch",)


def test_another_plain_value_is_another_spec() -> None:
    assert flatten({"x": X, "n": 1})[1] != flatten({"x": X, "n": 2})[1]
    assert flatten({"x": X, "n": 1})[1] != flatten({"x": X, "n": True})[1], "1 and True are read differently by Python"
    assert flatten([X])[1] != flatten((X,))[1]


def test_what_is_no_batch_is_named() -> None:
    with pytest.raises(BadBatch, match=r"the batch holds a Linear at a\.b.*use tensors, numbers"):
        flatten({"a": {"b": nn.Linear(1, 1)}})
    with pytest.raises(BadBatch, match="a set at its top"):
        flatten({1, 2})


def test_splitting() -> None:
    parts = split_batch({"x": X, "scale": torch.tensor(2.0), "n": 3}, 3)
    assert len(parts) == 3 and torch.equal(torch.cat([p["x"] for p in parts]), X)
    assert all(p["n"] == 3 and p["scale"].dim() == 0 for p in parts)
    for wrong in ({"x": X, "y": Y[:4]}, {"x": X[:5]}, {"n": 3}):
        with pytest.raises(BadBatch, match=r"cannot be cut into accumulate=2.*multiple of accumulate"):
            split_batch(wrong, 2)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        x, y, scale = batch["x"], batch["y"], batch.get("scale", 1.0)
    elif isinstance(batch, Example):
        x, y, scale = batch.x, batch.y, 2.0 if batch.name == "b" else 1.0
    else:
        (x, y), scale = batch, 1.0
    return F.cross_entropy(model(x), y) * scale


def make() -> Side:
    model = small_mlp()
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of)


@pytest.mark.parametrize("name", ["tuple", "list", "named tuple", "dict", "ordered dict", "dataclass"])
def test_every_kind_of_batch_trains(name: str) -> None:
    Twins(make, BATCHES[name], check="off").train([BATCHES[name]] * 2)


def test_a_plain_value_of_the_batch_that_changes_is_captured_anew() -> None:
    """A number that was seen to change is an input from then on; a tensor in its place is another graph."""
    twins = Twins(make, {"x": X, "y": Y, "scale": 1.0}, check="off")
    twins.train([{"x": X, "y": Y, "scale": s} for s in (1.0, 3.0, 1.0, 3.0)])
    assert twins.step.captures == 2
    twins.train([{"x": X, "y": Y, "scale": torch.tensor(s)} for s in (0.5, 2.0, 4.0)])
    assert twins.step.captures == 3


def test_hugging_face_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"x": X, "y": Y})

    def make_hf() -> Side:
        side = make()
        side.loss_fn = lambda m, b: F.cross_entropy(m(b.x), b["y"])
        return side

    twins = Twins(make_hf, batch, check="off")
    twins.train([batch, batch])
    tensors, spec = flatten(batch)
    assert type(unflatten(tensors, spec)) is transformers.BatchEncoding


def test_a_batch_of_another_structure_says_how_it_differs() -> None:
    """Where the user's own code fails with it; eager's error is told."""
    step = interpreted(make(), {"x": X, "y": Y})
    with pytest.raises(BadBatch, match=r"the batch lacks 'y' and adds 'z'.*KeyError: 'y'"):
        step({"x": X, "z": Y})
    assert step.count == 0


def test_an_error_with_a_wrong_batch_is_eagers() -> None:
    step = interpreted(make(), (X, Y))
    with pytest.raises(TypeError, match="cross_entropy"):
        step((X, nn.Linear(1, 1)))


class Own:
    """A batch of a class that nobody knows."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def test_an_object_of_the_users_own_is_a_batch_too() -> None:
    def make_own() -> Side:
        side = make()
        side.loss_fn = lambda m, b: F.cross_entropy(m(b.x), b.y)
        return side

    twins = Twins(make_own, Own(X, Y))
    twins.train([Own(X, Y), Own(X.flip(0), Y), Own(X * 2, Y)])
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1)


def test_the_batch_itself_is_not_written() -> None:
    def writes(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0]
        x.mul_(0.5)
        return F.cross_entropy(model(x), batch[1])

    side, other = make(), make()
    side.loss_fn = other.loss_fn = writes
    step = interpreted(side, (X.clone(), Y))
    ours, theirs = X.clone(), X.clone()
    step((ours, Y))
    writes(other.model, (theirs, Y))
    assert torch.equal(ours, theirs), "what eager writes into the batch, the step writes too"
