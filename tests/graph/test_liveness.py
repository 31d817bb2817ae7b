"""Storages die with their last alias, and the modelled peak is what can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.graph import toy_graphs
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.graph.liveness import last_uses, peak_bytes, storages
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

KILOBYTE = torch.zeros(256)


def traced(function: Callable[..., Any], *values: Tensor) -> TrainingGraph:
    module = make_fx(lambda *v: (function(*v),), tracing_mode="fake")(*values)
    for node in module.graph.nodes:
        node.meta["custom"] = {"phase": "forward"}
    inputs = tuple(Input(Role.BATCH, f"x{i}") for i in range(len(values)))
    return TrainingGraph(module, inputs, (Output(OutputKind.LOSS, "loss"),))


def deaths(graph: TrainingGraph) -> dict[str, list[str]]:
    return {node.name: [value.name for value in values] for node, values in last_uses(graph).items()}


def test_values_die_at_their_last_use() -> None:
    graph = traced(lambda x: (x.exp() + x.sin()).cos(), KILOBYTE)
    assert deaths(graph) == {"add": ["exp", "sin"], "cos": ["add"]}
    # exp and sin and their sum are alive together; then the sum and its cosine.
    assert peak_bytes(graph) == 3 * 1024


def test_a_view_keeps_its_storage_alive() -> None:
    graph = traced(lambda x: (x.exp().view(16, 16).t(), x.sin())[0].sum(), KILOBYTE)
    assert deaths(graph) == {"sin": ["sin"], "sum_1": ["exp", "view", "t"]}
    assert peak_bytes(graph) == 2 * 1024


def test_views_of_inputs_and_outputs_never_die() -> None:
    graph = traced(lambda x: x.view(16, 16).exp().view(256), KILOBYTE)
    assert deaths(graph) == {}
    assert peak_bytes(graph) == 1024


def test_a_list_of_views_shares_one_storage() -> None:
    graph = traced(lambda x: x.exp().split(128)[1].cos(), KILOBYTE)
    nodes = {node.name: node for node in graph.graph.nodes}
    found = storages(graph)
    assert found[nodes["split"]] == [found[nodes["exp"]]] * 2
    assert found[nodes["getitem"]] == found[nodes["exp"]] != found[nodes["cos"]]
    assert deaths(graph)["cos"] == ["exp", "split", "getitem", "getitem_1"]
    assert peak_bytes(graph) == 1024 + 512


def test_results_of_one_operator_die_apart() -> None:
    graph = traced(lambda x: torch.sort(x)[0].exp().cos(), KILOBYTE)
    # 1024 bytes of values and 2048 of indices; the indices, which nobody reads, are gone when exp runs.
    assert peak_bytes(graph) == 3072
    assert "getitem" in deaths(graph)["exp"]


def test_constants_and_inputs_count_nothing() -> None:
    assert peak_bytes(traced(lambda x: x, KILOBYTE)) == 0
    assert peak_bytes(traced(lambda x: torch.tensor(1.0) + x, KILOBYTE)) == 1024 + 4


def test_an_expanded_value_is_one_row() -> None:
    assert peak_bytes(traced(lambda x: x[:4].exp().expand(100, 4).sum(), KILOBYTE)) == 4 * 4 + 4


def test_updates_are_donated() -> None:
    toy = toy_graphs.mlp()
    state = sum(t.numel() * t.element_size() for t in toy.values[:8])
    assert 0 < peak_bytes(toy.graph) < peak_bytes(toy.graph, donate=False)
    assert peak_bytes(toy.graph, donate=False) > state


@pytest.mark.parametrize("make", [toy_graphs.mlp, toy_graphs.transformer])
def test_dropping_dead_values_changes_nothing(make: Callable[[], toy_graphs.Toy]) -> None:
    """An interpreter that overwrites every value that is said to be dead still computes the same results."""
    toy = make()
    dying = last_uses(toy.graph)

    class Poisoning(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            self.env[n] = result
            for value in dying.get(n, []):
                if isinstance(dead := self.env.get(value), Tensor) and dead.is_floating_point():
                    storage = dead.untyped_storage()
                    torch.empty(0, dtype=dead.dtype).set_(storage).fill_(float("nan"))
            return result

    expected = toy.run()
    actual = Poisoning(toy.graph.module, garbage_collect_values=False).run(*[v.clone() for v in toy.values])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert sum(map(len, dying.values())) > 20


def test_symbolic_shapes_are_refused() -> None:
    module = make_fx(lambda x: (x.exp(),), tracing_mode="symbolic")(torch.randn(3, 4))
    symbols = len([node for node in module.graph.nodes if node.op == "placeholder"])
    inputs = tuple(Input(Role.BATCH, str(i)) for i in range(symbols))
    with pytest.raises(ValueError, match="symbolic shape"):
        peak_bytes(TrainingGraph(module, inputs, (Output(OutputKind.LOSS, "loss"),)))


def test_a_value_copied_into_its_input_dies_there() -> None:
    """A new buffer is copied after the last reader of the old one; what is also returned lives to the end."""
    peaks = []
    for returned in (False, True):
        graph = fx.Graph()
        state = graph.placeholder("state")
        state.meta["val"] = torch.ones(100)
        new = graph.call_function(torch.ops.aten.add.Tensor, (state, 1.0))
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (state, 2.0))
        large = graph.call_function(torch.ops.aten.repeat.default, (doubled, [10]))
        for node, size in ((new, 100), (doubled, 100), (large, 1000)):
            node.meta = {"val": torch.ones(size), "custom": {"phase": "backward"}}
        outputs = [Output(OutputKind.LOSS, "loss"), Output(OutputKind.UPDATE, "gradient:state", 0)]
        outputs += [Output(OutputKind.AUX, "new")] if returned else []
        graph.output((large, new, *([new] if returned else [])))
        training = TrainingGraph(fx.GraphModule({}, graph), (Input(Role.GRADIENT, "state"),), tuple(outputs))
        peaks.append(peak_bytes(training))
        assert peak_bytes(training, donate=False) == 4 * 1200
    assert peaks == [4 * 1100, 4 * 1200]
