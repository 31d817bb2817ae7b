"""Each rule of the verifier is broken once, on a graph that keeps all the others."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from operator import is_

import pytest
import torch
from tests.graph import toy_graphs
from torch import fx

from wholestep.graph.check import GraphError, check, looked_at
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

aten = torch.ops.aten


def insert_before_output(graph: TrainingGraph, target: object, *args: object, phase: str = "forward") -> fx.Node:
    """A new node whose result looks like its first argument's."""
    with graph.graph.inserting_before(graph.output_node):
        node = graph.graph.call_function(target, args)  # type: ignore[arg-type]
    node.meta["val"] = args[0].meta["val"]  # type: ignore[attr-defined]
    node.meta["custom"] = {"phase": phase, "module": "net.7", "source": "model.py:31"}
    return node


def replace_output(graph: TrainingGraph, index: int, value: object) -> None:
    values = list(graph.output_values)
    values[index] = value
    graph.output_node.args = (tuple(values),)


def too_few_inputs(graph: TrainingGraph) -> None:
    graph.inputs = graph.inputs[:-1]


def inputs_named_alike(graph: TrainingGraph) -> None:
    graph.inputs = (graph.inputs[0], graph.inputs[0], *graph.inputs[2:])


def too_few_outputs(graph: TrainingGraph) -> None:
    graph.outputs = graph.outputs[:-1]


def mutation(graph: TrainingGraph) -> None:
    insert_before_output(graph, aten.add_.Tensor, graph.placeholders[0], 1)


def update_of_other_shape(graph: TrainingGraph) -> None:
    replace_output(graph, 1, graph.output_values[2])


def update_of_other_dtype(graph: TrainingGraph) -> None:
    value = insert_before_output(graph, aten.neg.default, graph.placeholders[0], phase="update")
    value.meta["val"] = value.meta["val"].to(torch.bfloat16)
    replace_output(graph, 1, value)


def update_of_no_input(graph: TrainingGraph) -> None:
    graph.outputs = (graph.outputs[0], Output(OutputKind.UPDATE, "x", 999), *graph.outputs[2:])


def update_twice(graph: TrainingGraph) -> None:
    again = dataclasses.replace(graph.outputs[1], name="again")
    graph.outputs = (*graph.outputs, again)
    replace_output(graph, 0, graph.output_values[0])
    graph.output_node.args = ((*graph.output_values, graph.output_values[1]),)


def no_loss(graph: TrainingGraph) -> None:
    graph.outputs = (Output(OutputKind.AUX, "loss"), *graph.outputs[1:])


def loss_is_a_number(graph: TrainingGraph) -> None:
    replace_output(graph, 0, 1.0)


def no_val(graph: TrainingGraph) -> None:
    del toy_graphs.first(graph, "backward").meta["val"]


def no_phase(graph: TrainingGraph) -> None:
    del toy_graphs.first(graph, "backward").meta["custom"]["phase"]


def forward_reads_update(graph: TrainingGraph) -> None:
    node = insert_before_output(graph, aten.neg.default, graph.output_values[1])
    replace_output(graph, 1, node)


def missing_gradient(graph: TrainingGraph) -> None:
    graph.gradients = {"net.0.weight": "gone"}


def missing_boundary(graph: TrainingGraph) -> None:
    graph.boundaries = {"net.0": "gone"}


def used_before_made(graph: TrainingGraph) -> None:
    node = toy_graphs.first(graph, "forward")
    node.append(last := next(reversed(list(graph.operations()))))
    node.args = (last, *node.args[1:])


def named_alike(graph: TrainingGraph) -> None:
    toy_graphs.first(graph, "backward").name = toy_graphs.first(graph, "forward").name


def attribute_of_nothing(graph: TrainingGraph) -> None:
    with graph.graph.inserting_before(graph.output_node), warnings.catch_warnings(action="ignore"):
        graph.graph.get_attr("gone.weight")


def from_another_graph(graph: TrainingGraph) -> None:
    toy_graphs.first(graph, "forward").args = tuple(toy_graphs.mlp().graph.placeholders[:1])


def not_an_operator(graph: TrainingGraph) -> None:
    with graph.graph.inserting_before(graph.output_node):
        node = graph.graph.call_method("neg", (graph.placeholders[0],))
    node.meta.update(val=1, custom={"phase": "forward"})


BREAKS: list[tuple[Callable[[TrainingGraph], None], str]] = [
    (too_few_inputs, r"\d+ placeholders, but \d+ inputs"),
    (inputs_named_alike, "inputs 0 and 1 are both called parameter:net.0.weight"),
    (too_few_outputs, r"\d+ values are returned, but \d+ outputs"),
    (mutation, r"node add_\w* \(aten.add_.Tensor\), module net.7, model.py:31: mutates an argument"),
    (update_of_other_shape, r"update of parameter:net.0.weight is \(\(6,\).*the input is \(\(6, 4\)"),
    (update_of_other_dtype, r"module net.7, model.py:31: update of parameter:net.0.weight is .*bfloat16"),
    (update_of_no_input, "targets input 999"),
    (update_twice, "parameter:net.0.weight is updated twice"),
    (no_loss, "no output is the loss"),
    (loss_is_a_number, r"output loss:loss is 1\.0, not a node"),
    (no_val, r"toy.py:\d+: no meta\['val'\]"),
    (no_phase, "phase is None"),
    (forward_reads_update, "a forward node reads sub"),
    (missing_gradient, r"gradients\['net.0.weight'\] names the node gone"),
    (missing_boundary, r"boundaries\['net.0'\] names the node gone"),
    (used_before_made, "malformed: .*before it has been defined"),
    (named_alike, "malformed: .*redefined name"),
    (attribute_of_nothing, "malformed: .*nonexistent attribute"),
    (from_another_graph, "malformed: .*does not belong to this Graph"),
    (not_an_operator, "a call_method node"),
]


@pytest.mark.parametrize(("break_it", "message"), BREAKS, ids=[break_it.__name__ for break_it, _ in BREAKS])
def test_broken_rule_is_named(break_it: Callable[[TrainingGraph], None], message: str) -> None:
    graph = toy_graphs.mlp().graph
    check(graph)
    checked = looked_at(graph)
    break_it(graph)
    changed = looked_at(graph)
    assert len(changed) != len(checked) or not all(map(is_, changed, checked))
    with pytest.raises(GraphError, match=message):
        check(graph)


def test_a_graph_that_nobody_touched_is_known() -> None:
    graph = toy_graphs.mlp().graph
    assert all(map(is_, looked_at(graph), looked_at(graph)))


def test_forward_may_read_backward() -> None:
    """A gradient penalty: the inner gradient is part of the loss."""
    graph = toy_graphs.mlp().graph
    penalty = insert_before_output(graph, aten.neg.default, toy_graphs.first(graph, "backward"))
    assert penalty.meta["custom"]["phase"] == "forward"
    check(graph)


def test_update_graph_needs_no_loss() -> None:
    graph = toy_graphs.mlp().graph
    no_loss(graph)
    graph.inputs = (*graph.inputs[:-1], Input(Role.GRADIENT, "net.0.weight"))
    check(graph)


def test_dead_nodes_are_errors_only_when_strict() -> None:
    graph = toy_graphs.mlp().graph
    check(graph, strict=True)
    insert_before_output(graph, aten.neg.default, graph.placeholders[0])
    check(graph)
    with pytest.raises(GraphError, match="nobody reads it"):
        check(graph, strict=True)
