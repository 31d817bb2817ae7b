"""remove_dead: what nobody reads goes, with its boundary; what has an effect stays."""

from __future__ import annotations

import torch
from tests.passes.small_graphs import operators, rewritten, traced

from wholestep.passes.remove_dead import remove_dead

X = torch.randn(3, 5)


def test_an_unread_value_goes_with_its_boundary() -> None:
    graph = traced(lambda x: (x.exp().sum(), x.sin()), X)
    sine = next(n for n in graph.operations() if "sin" in n.name)
    graph.output_node.args = ((graph.output_values[0],),)
    graph.outputs = graph.outputs[:1]
    graph.module.recompile()
    graph.boundaries = {"a": sine.name, "b": graph.output_values[0].name}
    assert operators(graph) == ["exp", "sum", "sin"]
    assert operators(rewritten(remove_dead, graph, X)) == ["exp", "sum"]
    assert list(graph.boundaries) == ["b"]


def test_what_is_read_and_what_has_an_effect_stays() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._assert_async.msg(x.sum() < 1e9, "too large")
        return x.exp().sum()

    graph = traced(checked, X)
    before = operators(graph)
    assert "_assert_async" in before and operators(rewritten(remove_dead, graph, X)) == before
