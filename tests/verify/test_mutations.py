"""Every kind of wrong step must be found, and the module and the pass behind it named. The mutants are passes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verify.small_models import Mlp, Normed, batches, loss_fn
from torch import fx, nn

import wholestep
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph
from wholestep.verify.report import Report

aten = torch.ops.aten
ws = torch.ops.ws


def find(graph: TrainingGraph, target: Any) -> fx.Node:
    return next(node for node in graph.operations() if node.target is target)


def scaled_after(graph: TrainingGraph, node: fx.Node, factor: float) -> fx.Node:
    """Everyone who read `node` reads `node * factor` now."""
    with graph.graph.inserting_after(node):
        scaled = graph.graph.call_function(aten.mul.Tensor, (node, factor))
    scaled.meta = dict(node.meta)
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    graph.module.recompile()
    return scaled


def wrong_gelu_backward(graph: TrainingGraph) -> TrainingGraph:
    """The derivative of the tanh form for the exact one: wrong by less than a thousandth."""
    node = find(graph, aten.gelu_backward.default)
    node.kwargs = {**node.kwargs, "approximate": "tanh"}
    graph.module.recompile()
    return graph


def scaled_gradient(graph: TrainingGraph) -> TrainingGraph:
    """One gradient times 1.001, where everyone can see it."""
    scaled = scaled_after(graph, graph.node(graph.gradients["second.weight"]), 1.001)
    graph.gradients["second.weight"] = scaled.name
    return graph


def scaled_gradient_unseen(graph: TrainingGraph) -> TrainingGraph:
    """The same on the way to the optimizer only: the gradient itself still looks right."""
    scaled_after(graph, graph.node(graph.gradients["second.weight"]), 1.001)
    return graph


def swapped_keys(graph: TrainingGraph) -> TrainingGraph:
    """Two dropout sites draw each other's masks, in forward and backward alike."""
    one, two = [n for n, entry in zip(graph.placeholders, graph.inputs) if entry.role is Role.KEY]
    for node in [n for n in graph.operations() if n.target is ws.dropout.default]:
        node.args = (*node.args[:2], two if node.args[2] is one else one)
    graph.module.recompile()
    return graph


def lost_buffer(graph: TrainingGraph) -> TrainingGraph:
    """The new running mean is computed and not written back."""
    kept = [
        (value, entry)
        for value, entry in zip(graph.output_values, graph.outputs)
        if not (entry.kind is OutputKind.UPDATE and "running_mean" in entry.name)
    ]
    assert len(kept) == len(graph.outputs) - 1
    graph.output_node.args = (tuple(value for value, _ in kept),)
    graph.outputs = tuple(entry for _, entry in kept)
    graph.graph.eliminate_dead_code()
    graph.module.recompile()
    return graph


def swapped_parameters(graph: TrainingGraph) -> TrainingGraph:
    """Two parameters of one shape get each other's new value."""
    values, outputs = list(graph.output_values), list(graph.outputs)
    places = {entry.name: i for i, entry in enumerate(outputs)}
    one, two = places["parameter:norm.weight"], places["parameter:norm.bias"]
    assert isinstance(values[one], fx.Node) and values[one].target is operator.getitem
    values[one], values[two] = values[two], values[one]
    graph.output_node.args = (tuple(values),)
    graph.module.recompile()
    return graph


def harmless(graph: TrainingGraph) -> TrainingGraph:
    """Times one."""
    scaled_after(graph, find(graph, aten.addmm.default), 1.0)
    return graph


CASES: list[tuple[Callable, type[nn.Module], str, str]] = [
    (wrong_gelu_backward, Mlp, "first", "gradient"),
    (scaled_gradient, Mlp, "second", "gradient"),
    (scaled_gradient_unseen, Mlp, "second", "parameter"),
    (swapped_keys, Mlp, "drop_one", "output"),
    (lost_buffer, Normed, "norm", "buffer"),
    (swapped_parameters, Normed, "norm", "parameter"),
]


def verified(model: nn.Module, passes: list[Callable], backend: str = "interpret", **options: Any) -> Report:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wholestep.verify(
        model, loss_fn, optimizer, batches(2), steps=2, passes=passes, backend=backend, eval_too=False, **options
    )


@pytest.mark.parametrize(("mutant", "build", "module", "kind"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_mutant_is_found_and_named(mutant: Callable, build: type[nn.Module], module: str, kind: str) -> None:
    report = verified(build(), [harmless, mutant, harmless])
    assert not report.ok and not report.bitwise
    found = report.first_departure
    assert found is not None
    assert (found.module, found.kind, found.guilty_pass) == (module, kind, mutant.__name__), str(found)
    assert found.step == "0" and {row.step for row in report.rows} == {"0"}
    assert mutant.__name__ in str(report) and "DIFFERS" in str(report)


def test_it_is_named_without_guards_too() -> None:
    mutant, build, module, kind = CASES[0]
    found = verified(build(), [harmless, mutant], guards="off").first_departure
    assert found is not None and (found.module, found.kind, found.guilty_pass) == (module, kind, mutant.__name__)


def test_without_the_mutant_the_same_pipeline_holds() -> None:
    report = verified(Mlp(), [harmless, harmless])
    assert report.ok and report.bitwise, str(report)


def test_compiled_code_is_told_from_the_graph_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that computes something else than its graph says."""
    from wholestep.verify import side_by_side

    def wrong_lowering(graph: TrainingGraph, *, watch: list[str]) -> Any:
        find(graph, aten.gelu.default).kwargs = {"approximate": "tanh"}
        return side_by_side.lower_interpret(graph, watch=watch)

    monkeypatch.setattr(side_by_side, "lower_inductor", wrong_lowering)
    report = verified(Mlp(), [harmless], backend="inductor")
    assert not report.ok and report.first_departure is not None
    assert report.first_departure.guilty_pass == "lower_inductor"
    assert report.first_departure.module == "act"


def test_a_mutated_state_is_put_back_as_well() -> None:
    model = Normed()
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    assert not verified(model, [lost_buffer]).ok
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
