"""Layers that are traced once: the graph and the guards are those of layers traced one by one, and training follows eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted
from torch import nn

from wholestep.capture.front import dynamo, equal_layers, layer_guards

BATCHES = class_batches(6)
DEPTH = 4


class Block(nn.Module):
    """A layer with all that layers have: submodules, numbers, a buffer, dropout, a function as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.scale, self.act, self.calls = 0.5, F.gelu, 0
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.outer(self.act(self.inner(self.norm(x))))
        return x + self.scale * F.dropout(hidden, 0.0, self.training) * mask + self.shift * pair[0], hidden


class Stack(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.first(x), (x[:, :1] > -9).float()
        for layer in self.layers:
            x, _ = layer(x, mask, pair=(mask * 2, None))
        return self.last(x)


def side(model: nn.Module) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that were copied, by the place that Dynamo writes."""
    found: list[str] = []
    write = equal_layers.Copy.write

    def note(self: Any) -> Any:
        found.append(self.call.source.name)
        return write(self)

    monkeypatch.setattr(equal_layers.Copy, "write", note)
    return found


def test_equal_layers_are_traced_once_and_train_as_eager(copied: list[str]) -> None:
    Twins(lambda: side(Stack()), BATCHES[0], check="off").train(BATCHES[:2])
    assert len(copied) == DEPTH - 1


def test_graph_and_guards_are_those_of_layers_traced_one_by_one(
    monkeypatch: pytest.MonkeyPatch, copied: list[str]
) -> None:
    guards: list[set[str]] = []
    read = dynamo._read_by

    def note(found: Any, *rest: Any) -> Any:
        own = [g for g in found if "'layers'" in g.name and "type(" not in g.name]  # of a class, once is enough
        guards.append({f"{g.create_fn_name()} {g.name}" for g in own})
        return read(found, *rest)

    monkeypatch.setattr(dynamo, "_read_by", note)
    digests = []
    for most in (0, 4):
        monkeypatch.setattr(equal_layers, "_MOST_KINDS", most)
        step = Twins(lambda: side(Stack()), BATCHES[0], check="off").step
        digests.append(step.front.entries[0].graph.digest)
    assert len(copied) == DEPTH - 1
    assert digests[0] == digests[1]
    assert guards[0] == guards[1] and len(guards[0]) > 50


class Doubled(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * 2, mask, pair)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda block: setattr(block, "scale", 0.25),
    "function": lambda block: setattr(block, "act", F.relu),
    "forward": lambda block: setattr(block, "forward", lambda x, mask, pair: (x * 2, x)),
    "hook": lambda block: block.inner.register_forward_hook(lambda module, given, output: output * 2),
    "frozen": lambda block: block.inner.weight.requires_grad_(False),
    "submodule": lambda block: setattr(block, "norm", nn.Identity()),
    "mode": lambda block: block.eval(),
    "number of a submodule": lambda block: setattr(block.norm, "eps", 0.5),
    "missing parameter": lambda block: setattr(block.inner, "bias", None),
    "class": lambda block: setattr(block, "__class__", Doubled),
    "buffer": lambda block: setattr(block, "shift", torch.full((1,), 0.2)),
    "tied": lambda block: setattr(block.inner, "bias", nn.Parameter(torch.zeros(8))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_differs_is_traced(change: Callable[[Any], Any], copied: list[str]) -> None:
    """`tied` does not differ; the others do in what a trace of it sees."""

    def make() -> Side:
        model = Stack()
        change(model.layers[2])
        return side(model)

    Twins(make, BATCHES[0], check="off").train(BATCHES[:2])
    assert any("'1'" in name for name in copied)
    assert any("'2'" in name for name in copied) == (change is CHANGES["tied"])


LATER = ("number", "forward", "hook", "frozen", "number of a submodule", "missing parameter", "class", "buffer", "tied")


@pytest.mark.parametrize("change", [CHANGES[name] for name in LATER], ids=LATER)
def test_a_copied_layer_that_changes_later_is_noticed(change: Callable[[Any], Any]) -> None:
    twins = Twins(lambda: side(Stack()), BATCHES[0], check="off")
    twins.train(BATCHES[:1])
    if change is CHANGES["tied"]:
        twins.both(lambda one: setattr(one.model.layers[2].inner, "bias", one.model.layers[1].inner.bias))
    else:
        twins.both(lambda one: change(one.model.layers[2]))
    twins.train(BATCHES[1:3])


FIRST: list[nn.Module] = []
SCALES: dict[nn.Module, float] = {}


class Itself(Block):
    """Looks at who it is."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * 2 if self is FIRST[0].layers[0] else x, mask, pair)


class Looked(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * SCALES[self], mask, pair)


class Counting(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return super().forward(x, mask, pair)


class InPlace(Block):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, pair: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x, mask.mul_(0.9).clone(), pair)


@pytest.mark.parametrize("block", [Itself, Looked, Counting, InPlace])
def test_layers_that_do_more_than_compute_are_traced(block: type[Block], copied: list[str]) -> None:
    def make() -> Side:
        model = Stack(block)
        FIRST[:] = [model]
        SCALES.update({layer: 1.0 + i for i, layer in enumerate(model.layers)})
        return side(model)

    torch.manual_seed(0)
    with torch.no_grad():
        expected = float(classify(make().model, BATCHES[0]))
    torch.manual_seed(0)
    assert float(interpreted(make(), BATCHES[0], check="off")(BATCHES[0])) == expected
    assert not copied


def test_layers_by_turns_are_two_kinds(copied: list[str]) -> None:
    class Turns(Stack):
        def __init__(self) -> None:
            super().__init__()
            for layer in self.layers[1::2]:
                layer.scale = 0.25

    Twins(lambda: side(Turns()), BATCHES[0], check="off").train(BATCHES[:2])
    assert len(copied) == DEPTH - 2


def test_arguments_count(copied: list[str]) -> None:
    """The same layers, given something else every time."""

    class Numbered(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                x, _ = layer(x, x.detach() if i == 2 else x, pair=(float(i // 2), None))
            return self.last(x)

    Twins(lambda: side(Numbered()), BATCHES[0], check="off").train(BATCHES[:2])
    assert len(copied) == 1


def test_unknown_guards_make_a_layer_one_that_is_traced(monkeypatch: pytest.MonkeyPatch, copied: list[str]) -> None:
    monkeypatch.delitem(layer_guards._READS, "CONSTANT_MATCH")
    Twins(lambda: side(Stack()), BATCHES[0], check="off").train(BATCHES[:2])
    assert not copied
