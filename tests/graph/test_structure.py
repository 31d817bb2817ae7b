"""Equal runs share a key, unequal ones do not; families are the outermost lists of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph import toy_graphs
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.graph.layers import LayerFamily, layer_families, repeated_layers
from wholestep.graph.structure import (
    equal_runs,
    escaping_values,
    external_inputs,
    structural_key,
)
from wholestep.graph.training_graph import module_of, phase_of


def operations(function: Callable[..., Any], *values: Tensor) -> list[fx.Node]:
    module = make_fx(function, tracing_mode="fake")(*values)
    return [node for node in module.graph.nodes if node.op == "call_function"]


def key(function: Callable[..., Any], *values: Tensor) -> str:
    return structural_key(operations(function, *values))


X, Y = torch.randn(2, 3), torch.randn(2, 3)


def base(x: Tensor, y: Tensor) -> Tensor:
    return (x * 2.0 + y).relu() * x


def test_names_and_position_do_not_matter() -> None:
    nodes = operations(lambda x, y: base(base(x, y), x), X, Y)
    assert len(nodes) == 8
    assert structural_key(nodes[:4]) == structural_key(nodes[4:]) == key(base, X, Y)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: (x * 2 + y).relu() * x,  # an int, not a float
        lambda x, y: (x * 2.5 + y).relu() * x,
        lambda x, y: (x * 2.0 + y).relu() * y,
        lambda x, y: (x * 2.0 + x).relu() * x,
        lambda x, y: (y + x * 2.0).relu() * x,
        lambda x, y: (x * 2.0 + y).sigmoid() * x,
        lambda x, y: torch.add(x * 2.0, y, alpha=3).relu() * x,
    ],
)
def test_another_computation_has_another_key(other: Callable[..., Any]) -> None:
    assert key(other, X, Y) != key(base, X, Y)


def test_another_kind_of_value_has_another_key() -> None:
    assert key(base, X.double(), Y.double()) != key(base, X, Y)
    assert key(base, X[:1], Y[:1]) != key(base, X, Y)
    transposed = torch.randn(3, 2).t()
    assert key(base, transposed, transposed.clone()) != key(base, X, Y)
    # The result may be alike while an input is not.
    assert key(lambda x: x.sum(), X) != key(lambda x: x.sum(), X.flatten())


def test_inputs_by_first_use_and_values_that_leave() -> None:
    mul, add, relu, mul_1 = operations(base, X, Y)
    x, y = mul.args[0], add.args[1]
    assert external_inputs([mul, add, relu, mul_1]) == [x, y]
    assert external_inputs([relu, mul_1]) == [add, x]
    assert escaping_values([mul, add, relu]) == [relu]
    assert escaping_values([mul, add, relu, mul_1]) == [mul_1]
    assert escaping_values([mul, relu]) == [mul, relu]


def test_families_are_outermost_lists() -> None:
    paths = ["emb", "dec.h.0.attn", "dec.h.1.mlp.0", "dec.h.10.mlp.1", "one.0.inner.3", "one.0.inner.4", None, "x.7"]
    assert layer_families(paths) == [LayerFamily("dec.h", (0, 1, 10)), LayerFamily("one.0.inner", (3, 4))]
    assert layer_families(["0.a", "1"]) == [LayerFamily("", (0, 1))]
    assert layer_families(["s.0.b.0", "s.0.b.1", "s.1.b.0"], below="s.0") == [LayerFamily("s.0.b", (0, 1))]


def test_layer_of_a_path() -> None:
    family = LayerFamily("dec.h", (0, 1))
    assert [family.layer_of(p) for p in ("dec.h.1.attn", "dec.h.0", "dec.h.2", "dec.ham.0", "dec.h", None)] == [
        1, 0, None, None, None, None,
    ]  # fmt: skip
    assert family.layer_of("dec.h.1#2.attn") == 1


def test_layers_of_the_toy_transformer() -> None:
    graph = toy_graphs.transformer(num_layers=3).graph
    assert repeated_layers(graph) == [LayerFamily("decoder.h", (0, 1, 2))]
    forward, backward = equal_runs(graph)
    assert (forward.phase, forward.layers) == ("forward", (0, 1, 2))
    assert (backward.phase, backward.layers) == ("backward", (2, 1, 0))
    for layer, run in zip(backward.layers, backward.runs, strict=True):
        mine = [n for n in graph.operations() if module_of(n) == f"decoder.h.{layer}" and phase_of(n) == "backward"]
        assert list(run) == mine
    # Only the middle layer's run ends in a value that layer 0 reads, yet all agree on what is returned.
    assert max(forward.returned) == len(forward.runs[0]) - 1


def test_a_node_of_no_layer_inside_a_layer_joins_its_run() -> None:
    graph = toy_graphs.transformer(num_layers=3).graph
    before = len(equal_runs(graph)[0].runs[0])
    for node in graph.operations():
        if node.target is torch.ops.aten.native_layer_norm.default:
            node.meta["custom"] = {"phase": "forward"}
    assert len(equal_runs(graph)[0].runs[0]) == before


def test_a_layer_that_differs_is_left_out() -> None:
    graph = toy_graphs.transformer(num_layers=3).graph
    scalar = [node for node in graph.operations() if node.target is torch.ops.aten.triu.default][1]
    scalar.args = (scalar.args[0], 2)
    forward, backward = equal_runs(graph)
    assert forward.layers == (0, 2) and backward.layers == (2, 1, 0)
