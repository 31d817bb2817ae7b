"""A run of equal layers that is traced by four of them: the program is the one that tracing all of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify
from torch import nn

import wholestep
from wholestep import compat
from wholestep.capture import repeats, trace
from wholestep.graph.equality import describe_value

BATCHES = class_batches(2)
DEPTH = 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.outer(F.dropout(F.gelu(self.inner(self.norm(x))), 0.2, self.training))
        return x + F.dropout(hidden, 0.1, self.training) * mask + self.shift


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.first(x), (x[:, :1] > 0).float()
        for layer in self.layers:
            x = layer(x, mask)
        return self.last(F.dropout(x, 0.1, self.training))


class Skipping(Stack):
    """The output of every layer is read at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, total = self.first(x), 0.0
        for layer in self.layers:
            x = layer(x, x[:, :1].detach())
            total = total + x
        return self.last(total)


class Scaled(Stack):
    """A parameter that all layers share gets a gradient from each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, self.scale)
        return self.last(x)


class Counting(Stack):
    """A buffer that is written outside of the layers: the record is traced once more, to remove the write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def decayed_apart(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}, {"params": matrices}], lr=0.01
    )


def halves(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups that meet within a layer that is left out."""
    parameters = list(model.parameters())
    return torch.optim.AdamW([{"params": parameters[:26]}, {"params": parameters[26:], "lr": 0.1}], lr=0.01)


def group_per_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": list(part.parameters())} for part in (model.first, *model.layers, model.last)])


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def nothing(model: nn.Module) -> None:
    """Gradients are handed over."""


def backwards(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(reversed(list(model.parameters())), lr=0.01, momentum=0.9)


def side(model: nn.Module, optimizer: Callable[[nn.Module], torch.optim.Optimizer | None] = adamw) -> Side:
    return Side(model, optimizer(model), classify)


def program(capture: Any) -> list[Any]:
    """All there is to a captured step."""
    graph = capture.graph
    nodes = [
        (
            n.op,
            n.name,
            str(n.target),
            str(n.args),
            str(n.kwargs),
            n.meta.get("custom"),
            describe_value(n.meta.get("val")),
        )
        for n in graph.module.graph.nodes
    ]
    tables = (list(graph.gradients.items()), list(graph.boundaries.items()))
    return [nodes, graph.inputs, graph.outputs, *tables, capture.num_sites, capture.used]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers were left out of a trace, per capture."""
    found: list[int] = []
    write = trace.write_out

    def note(recorded: Any, watch: Any, *rest: Any) -> Any:
        made = write(recorded, watch, *rest)
        found.append(len(watch.run.left_out))
        return made

    monkeypatch.setattr(trace, "write_out", note)
    return found


def freeze(model: Stack) -> None:
    model.first.requires_grad_(False)


def freeze_all_biases(model: Stack) -> None:
    for layer in model.layers:
        layer.inner.bias.requires_grad_(False)


ALIKE: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "plain": (lambda model: None, {}),
    "bf16, clipped": (lambda model: None, {"precision": "bf16", "clip_norm": 1.0}),
    "accumulated": (lambda model: None, {"accumulate": 2}),
    "input without a gradient": (freeze, {}),
    "frozen biases": (freeze_all_biases, {}),
    "losses that scale": (lambda model: None, {"precision": "fp16"}),
    "steps left out": (lambda model: None, {"nonfinite": "skip"}),
}


@pytest.mark.parametrize(("change", "options"), ALIKE.values(), ids=ALIKE)
def test_the_program_is_that_of_a_full_trace(
    change: Callable[[Any], None], options: dict[str, Any], written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Side:
        model = Stack()
        change(model)
        return side(model)

    assert_alike(make, written, monkeypatch, **options)


def compiled(made: Side, **options: Any) -> Any:
    torch.manual_seed(0)
    return wholestep.compile(
        made.model, made.loss_fn, made.optimizer, BATCHES[0], check="off", backend="interpret", verbose=False, cache=False,
        **options,
    )  # fmt: skip


def assert_alike(make: Callable[[], Side], written: list[int], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    found = []
    for least in (99, 6):
        monkeypatch.setattr(repeats, "LEAST", least)
        found.append(program(compiled(make(), **options)._latest.capture))
    assert written == [DEPTH - repeats.KEPT - 1]
    for full, ours in zip(*found, strict=True):
        assert full == ours


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        (Stack, decayed_apart),
        (Stack, halves),
        (Stack, group_per_layer),
        (Counting, backwards),
        (Stack, adafactor),
        (Stack, nothing),
    ],
    ids=lambda f: f.__name__,
)
def test_whatever_updates_the_parameters(
    kind: type[Stack], optimizer: Any, written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_alike(lambda: side(kind(), optimizer), written, monkeypatch)


def test_parameters_of_layers_that_are_left_out_are_no_inputs_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    plain = compat.trace
    monkeypatch.setattr(
        compat, "trace", lambda f, fakes, **more: (given.append(len(fakes)), plain(f, fakes, **more))[1]
    )
    for least in (99, 6):
        monkeypatch.setattr(repeats, "LEAST", least)
        compiled(side(Stack()))
    assert given[0] - given[1] == 3 * 6 * (DEPTH - repeats.KEPT - 1)  # weight and moments


def freeze_one(model: Stack) -> None:
    model.layers[4].inner.bias.requires_grad_(False)


def tie(model: Stack) -> None:
    model.layers[4].inner.weight = model.layers[1].inner.weight


@pytest.mark.parametrize(
    ("kind", "change"),
    [(Skipping, None), (Scaled, None), (Stack, freeze_one), (Stack, tie)],
    ids=["skips", "shared parameter", "one frozen", "tied"],
)
def test_layers_that_gradients_leave_are_traced(kind: type[Stack], change: Any, written: list[int]) -> None:
    def make() -> Side:
        model = kind().eval()  # no dropout: eager draws other numbers
        if change is not None:
            change(model)
        return side(model)

    Twins(make, BATCHES[0], check="off").train(BATCHES, tolerance=1e-6)
    assert not written


def test_training_follows_eager(written: list[int]) -> None:
    Twins(lambda: side(Stack().eval()), BATCHES[0], check="off").train(BATCHES)
    assert written


def test_layers_whose_traces_differ_are_all_traced(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's record is given another operator than the third's: nothing may be copied then."""
    write = trace.write_out

    def changed(recorded: Any, watch: Any, *rest: Any) -> Any:
        node = next(n for n in recorded.graph.nodes if n.target is torch.ops.aten.gelu.default and n.name == "gelu_1")
        node.target = torch.ops.aten.relu.default
        return write(recorded, watch, *rest)

    monkeypatch.setattr(trace, "write_out", changed)
    Twins(lambda: side(Stack().eval()), BATCHES[0], check="off").train(BATCHES[:1])
    assert not written
