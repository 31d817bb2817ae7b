"""fold_constants: numbers are computed now, data stays, and nothing inexact or large is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.passes.small_graphs import operators, rewritten, traced

from wholestep.graph.training_graph import Target
from wholestep.passes.fold_constants import fold_constants

X = torch.randn(4, 6)

CASES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "ones over a count": (lambda x: x * (torch.ones_like(x) / 24), ["full", "mul"]),
    "a mask that is all true": (
        lambda x: x.masked_fill((torch.arange(6) >= 0) & torch.ones(6, dtype=torch.bool), 2.0), ["full", "masked_fill"],
    ),
    "an integer": (lambda x: x + (torch.full((6,), 3) * 2 - 1), ["full", "add"]),
    "minus zero": (lambda x: x * (torch.zeros(6) * -1.0), ["full", "mul"]),
    "an arange stays": (lambda x: x * (torch.arange(6) + 1), ["arange", "add", "mul"]),
    "exp is not exact": (lambda x: x * torch.full((6,), 0.3).exp(), ["full", "exp", "mul"]),
    "nan stays": (lambda x: x.where(x > 0, torch.zeros(6) / 0), ["gt", "full", "div", "where"]),
    "both zeros are two numbers": (
        lambda x: x * torch.where(torch.arange(6) > 2, torch.zeros(6), -torch.zeros(6)), [],
    ),
    "random stays": (lambda x: x * (torch.zeros(6) + 1).bernoulli(), []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_left(name: str) -> None:
    function, expected = CASES[name]
    graph = traced(lambda x: (x.sum(), function(x)), X)
    if name == "random stays":
        before = operators(graph).count("bernoulli")
        assert operators(fold_constants(graph)).count("bernoulli") == before == 1
        return
    left = operators(rewritten(fold_constants, graph, X))[1:]
    assert left == expected if expected else "where" in left


def test_an_input_is_never_computed() -> None:
    graph = traced(lambda x: (x.sum(), (x * 0 + 1) / 2), X)
    before = operators(graph)
    assert operators(rewritten(fold_constants, graph, X)) == before


def test_large_values_are_left_to_the_device() -> None:
    graph = traced(lambda x: (x.sum(), torch.ones(1 << 17) * 2), X)
    before = operators(graph)
    assert operators(rewritten(fold_constants, graph, X)) == before


ON_A_GPU: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "a root of a number": (lambda x: x / torch.full((), 48.0).sqrt(), ["div"]),
    "rounded to bf16": (lambda x: x.bfloat16() / torch.full((), 48.0).sqrt().bfloat16(), ["_to_copy", "div"]),
    "a sum with a logarithm": (lambda x: x + torch.full((), 7.75).log() * 2, ["add"]),
    "integers are promoted by a tensor": (
        lambda x: (x > 0).int() * torch.full((), 3.0).sqrt(),
        ["gt", "_to_copy", "full", "mul"],
    ),
    "a number of no dimension": (lambda x: x.sum() * torch.full((), 3.0).sqrt(), ["sum", "full", "mul"]),
    "a row is no number": (lambda x: x / torch.full((6,), 48.0).sqrt(), ["full", "sqrt", "div"]),
    "drawn": (lambda x: x * torch.full((), 0.5).bernoulli(), ["full", "bernoulli", "mul"]),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_numbers_on_the_host_of_a_gpu(name: str) -> None:
    function, expected = ON_A_GPU[name]
    graph = traced(lambda x: (x.sum(), function(x)), X)
    graph.target = Target("cuda")
    if name == "drawn":
        assert "bernoulli" in operators(fold_constants(graph))
    else:
        assert operators(rewritten(fold_constants, graph, X))[1:] == expected
