"""A chunked loss and its backward become one operator with the same bits, unless the gradient needs the loss first."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, interpreted
from torch import Tensor, nn

from wholestep.graph.check import check
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of
from wholestep.ops import linear_cross_entropy
from wholestep.passes.fuse_loss import fuse_loss
from wholestep.passes.pipeline import Pipeline

WIDTH, CLASSES, ROWS = 6, 19, 300
Combine = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def three_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 128 rows, which is as small as they get."""
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 4 * CLASSES * 128)


class TwoHeads(nn.Module):
    """Two heads over one layer; `combine(first loss, second loss, hidden)` is what is minimised."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.body, self.first, self.second = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
            nn.Linear(WIDTH, CLASSES),
        )
        self.combine = combine

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.combine(
            F.cross_entropy(self.first(hidden), labels), F.cross_entropy(self.second(hidden), labels.flip(0)), hidden
        )


def make(combine: Combine) -> Side:
    torch.manual_seed(0)
    model = TwoHeads(combine)
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), lambda m, b: m(*b))


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=source)
    labels[:7] = -100
    return torch.randn(ROWS, WIDTH, generator=source), labels


def names(graph: TrainingGraph) -> list[str]:
    found = [str(n.target) for n in graph.operations() if "linear_cross_entropy" in str(n.target)]
    return sorted(name.removeprefix("ws.linear_cross_entropy").removesuffix(".default") for name in found)


def steps(combine: Combine, passes: list[Any], **options: Any) -> tuple[Any, list[float], list[Tensor]]:
    side = make(combine)
    step = interpreted(side, batch(), chunked_loss=True, passes=Pipeline(passes), **options)
    losses = [float(step(batch(seed))) for seed in range(3)]
    return step, losses, [p.detach().clone() for p in side.model.parameters()]


COMBINES: dict[str, tuple[Combine, list[str]]] = {
    "sum": (lambda a, b, h: a + b, ["_and_gradients"] * 2),
    "scaled": (lambda a, b, h: 0.5 * a + b / 3, ["_and_gradients"] * 2),
    "weighted by a value made later": (lambda a, b, h: a + b * h.detach().square().mean(), ["_and_gradients"] * 2),
    "a function of the loss": (lambda a, b, h: a.exp() + b, ["", "_and_gradients", "_backward"]),
    "one scales the other": (lambda a, b, h: a * b, ["", "_and_gradients", "_backward"]),
    "over itself": (lambda a, b, h: a / a.detach() + b, ["", "_and_gradients", "_backward"]),
    "not differentiated": (lambda a, b, h: a.detach() + b, ["", "_and_gradients"]),
}


@pytest.mark.parametrize("name", COMBINES)
def test_fused_where_it_may_be_with_the_same_bits(name: str) -> None:
    combine, expected = COMBINES[name]
    plain, losses, parameters = steps(combine, [])
    fused, fused_losses, fused_parameters = steps(combine, [fuse_loss])
    assert names(plain.graph) != expected and names(fused.graph) == expected
    assert losses == fused_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, fused_parameters, strict=True))
    check(fused.graph, strict=True)


def test_facts_and_tables_move_along() -> None:
    step, _, _ = steps(lambda a, b, h: a + b, [fuse_loss])
    graph = step.graph
    found = [n for n in graph.operations() if "and_gradients" in str(n.target)]
    assert [phase_of(n) for n in found] == ["forward", "forward"]
    assert all(len(n.meta["val"]) == 4 and n.args[-2] == 128 for n in found)
    assert any("in 3 chunks of 128 rows, logits never whole" in note for note in step.notes)
    for head, node in zip(("first", "second"), found, strict=True):
        part = graph.node(graph.gradients[f"{head}.weight"])
        assert part.target is operator.getitem and part.args == (node, 2) and phase_of(part) == "backward"
    order = list(graph.graph.nodes)
    assert all(order.index(entry) < order.index(node) for node in found for entry in node.all_input_nodes)
    assert all(module_of(n) in (None, "", "first", "second") for n in found)


def test_accumulation_and_clipping_keep_the_bits() -> None:
    runs = [steps(lambda a, b, h: a + b, passes, accumulate=2, clip_norm=0.1) for passes in ([], [fuse_loss])]
    assert names(runs[1][0].graph) == ["_and_gradients"] * 2
    assert runs[0][1] == runs[1][1]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][2], runs[1][2], strict=True))


def test_a_graph_without_a_chunked_loss_is_left_alone() -> None:
    side = make(lambda a, b, h: a + b)
    step = interpreted(side, batch(), chunked_loss=False, passes=Pipeline([]))
    before = [n.name for n in step.graph.graph.nodes]
    assert [n.name for n in fuse_loss(step.graph).graph.nodes] == before


def test_another_reader_of_the_statistics_keeps_the_two_apart() -> None:
    side = make(lambda a, b, h: a + b)
    graph = interpreted(side, batch(), chunked_loss=True, passes=Pipeline([])).graph
    forward = next(n for n in graph.operations() if n.target is torch.ops.ws.linear_cross_entropy.default)
    lse = next(user for user in forward.users if user.args[1] == 1)
    with graph.graph.inserting_after(lse):
        reader = graph.graph.call_function(torch.ops.aten.neg.default, (lse,))
    reader.meta.update({"val": lse.meta["val"], "custom": dict(lse.meta["custom"])})
    assert names(fuse_loss(graph)) == ["", "_and_gradients", "_backward"]
