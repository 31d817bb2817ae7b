"""What cannot be traced is refused with its line; what a trace would lose without a word is refused too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import made
from torch import Tensor

from wholestep import relational as rel
from wholestep.errors import UnsupportedModel
from wholestep.relational.trace import PRIMES

HERE = torch.ones(6, dtype=torch.float64)


class Straight(torch.autograd.Function):
    """The sign forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def turned(e: Any, p: Any) -> Tensor:
    return (e.src.x.t() @ e.dst.x).sum() * e.src.x


def without_gradient(e: Any, p: Any) -> Tensor:
    with torch.no_grad():
        scale = e.src.x * 2
    return scale * e.dst.x


def by_value(e: Any, p: Any) -> Tensor:
    return e.src.x if e.src.x.sum() > 0 else -e.src.x


def before_a_softmax(e: Any, p: Any) -> Tensor:
    return rel.edge_softmax(Straight.apply(e.src.x)) * e.dst.x


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (lambda e, p: e.src.x.mul_(2), "writes in place.*test_trace.py.*make a new tensor"),
        (lambda e, p: F.softmax(e.src.x, dim=0), "does not work edge by edge"),
        (turned, "does not work edge by edge.*test_trace.py.*keep edges in dimension 0"),
        (lambda e, p: e.src.x.sort(0)[0], "aten.sort.default.*does not work edge by edge.*test_trace.py"),
        (lambda e, p: e.src.x.sum(0), "does not work edge by edge"),
        (lambda e, p: p.A, "does not return a tensor with a row per edge"),
        (lambda e, p: e.type, "returns torch.int64"),
        (lambda e, p: e.src.x * HERE, "reads a tensor from outside: .*HERE.*test_trace.py.*give it as a parameter"),
        (without_gradient, "switches gradients off.*test_trace.py"),
        (by_value, "depends on values.*test_trace.py.*torch.where"),
        (lambda e, p: e.src.x[e.src.x[:, 0] > 0], "depends on values"),
        (lambda e, p: Straight.apply(e.src.x), "calls a torch.autograd.Function.*test_trace.py"),
        (before_a_softmax, "calls a torch.autograd.Function.*test_trace.py"),
        (lambda e, p: e.src.x / e.src.x.shape[0], "computes with the number of edges.*test_trace.py"),
        (lambda e, p: e.src.x / (e.src.x.shape[0] + 1), "depends on the number of edges.*test_trace.py"),
        (lambda e, p: e.src.x * e.src.x.shape[0] ** -0.5, "depends on the number of edges.*test_trace.py"),
        (lambda e, p: e.src.x * torch.rand(e.src.x.shape[0], 1), "computes with the number of edges"),
        (lambda e, p: e.src.x * torch.native_dropout(e.src.x, 0.5, True)[1], "keeps what was dropped to itself"),
    ],
)  # fmt: skip
def test_refused_with_its_line(message: Any, told: str) -> None:
    graph = made("plain")
    x = torch.randn(graph.num_nodes, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedModel, match=told):
        rel.layer(message)(graph, {"x": x}, {"A": torch.randn(6, 4, dtype=torch.float64)})


def test_sizes_may_be_any_number() -> None:
    """The number of edges of the trace is one that no tensor has."""
    graph = made("plain")
    x = torch.randn(graph.num_nodes, PRIMES[0], dtype=torch.float64)
    tables = torch.randn(PRIMES[1], 3, dtype=torch.float64)
    layer = rel.layer(lambda e, p: e.src.x.sum(-1, keepdim=True) * p.T[e.src.id])
    given = graph, {"x": x, "id": torch.arange(graph.num_nodes)}, {"T": tables}
    assert torch.allclose(layer(*given), layer.reference(*given))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_first_call_without_gradients_makes_the_same_program(mode: Any) -> None:
    graph = made("plain")
    x = torch.randn(graph.num_nodes, 6, dtype=torch.float64, requires_grad=True)
    layer = rel.layer(lambda e, p: F.linear(torch.tanh(e.src.x), p.A))
    params = {"A": torch.randn(4, 6, dtype=torch.float64)}
    with mode():
        before = layer(graph, {"x": x}, params)
    after = layer(graph, {"x": x}, params)
    assert torch.equal(before, after.detach()) and len(layer.programs) == 1
    assert torch.autograd.grad(after.sum(), x)[0].abs().max() > 0
