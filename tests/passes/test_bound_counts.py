"""Counts: which become sums, which stay, and that they count the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from wholestep.capture.dry import dry_capture
from wholestep.lower import lower_interpret
from wholestep.passes.bound_counts import bound_counts


def top_two(x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(x.topk(2, dim=-1)[1].reshape(-1), minlength=5)


CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "topk": (top_two, True),
    "argmax": (lambda x: torch.bincount(x.argmax(1), minlength=5), True),
    "argmax over all": (lambda x: torch.bincount(x.argmax().reshape(1), minlength=5), False),
    "sort": (lambda x: torch.bincount(x.sort(dim=1)[1].flatten(), minlength=5), True),
    "the first dimension is longer": (lambda x: torch.bincount(x.argmax(0), minlength=5), False),
    "values of a sort": (lambda x: torch.bincount((x > 0).long().sort(dim=1)[0].flatten(), minlength=5), False),
    "weights": (lambda x: torch.bincount(x.argmax(1), x[:, 0].detach(), minlength=5), False),
    "anything": (lambda x: torch.bincount((x[:, 0] > 0).long(), minlength=5), False),
}


def captured(count: Callable[[torch.Tensor], torch.Tensor], device: str = "cuda") -> Any:
    model = nn.Linear(3, 5)

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = m(batch)
        return (scores.softmax(1).sum(0) * (torch.zeros(5) + count(scores).float())).sum()

    return dry_capture(model, loss, torch.optim.SGD(model.parameters(), 0.1), torch.randn(9, 3), device=device).graph


def counts_left(graph: Any) -> int:
    return sum(node.target is torch.ops.aten.bincount.default for node in graph.operations())


@pytest.mark.parametrize("name", CASES)
def test_which_are_rewritten(name: str) -> None:
    count, bounded = CASES[name]
    graph = captured(count)
    assert counts_left(graph) == 1
    assert counts_left(bound_counts(graph)) == (0 if bounded else 1)


def test_on_a_cpu_all_stay() -> None:
    assert counts_left(bound_counts(captured(top_two, "cpu"))) == 1


@pytest.mark.parametrize("name", [name for name, (_, bounded) in CASES.items() if bounded])
def test_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    plain, rewritten = captured(CASES[name][0]), bound_counts(captured(CASES[name][0]))
    given = [torch.randn(node.meta["val"].shape) for node in plain.placeholders]
    results = []
    for graph in (plain, rewritten):
        inputs = [value.clone() for value in given]
        results.append((lower_interpret(graph)(inputs), inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_that_counts_are_as_many_as_are_read_is_certain_then() -> None:
    def required(graph: Any) -> int:
        return sum(node.target is torch.ops.ws.require.default for node in graph.operations())

    graph = captured(top_two)
    assert required(graph) > 0
    assert required(bound_counts(graph)) == 0
    unbounded = captured(CASES["anything"][0])
    assert required(bound_counts(unbounded)) > 0
