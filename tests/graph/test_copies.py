"""Copies of a training graph: equal and independent; without updates they compute the same and write nothing."""

from __future__ import annotations

import pytest
import torch
from tests.verify.small_models import Normed, batches, loss_fn

import wholestep
from wholestep.graph.check import check
from wholestep.graph.copies import copy_graph, without_updates
from wholestep.graph.training_graph import OutputKind, TrainingGraph, phase_of


@pytest.fixture(scope="module")
def graph() -> TrainingGraph:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters())
    step = wholestep.compile(
        model, loss_fn, optimizer, batches(1)[0], backend="interpret", clip_norm=1.0, check="off", cache=False
    )
    assert step.graph is not None
    return step.graph


def test_a_copy_is_equal_and_on_its_own(graph: TrainingGraph) -> None:
    copy = copy_graph(graph)
    check(copy)
    assert copy.module.code == graph.module.code
    assert (copy.inputs, copy.outputs, copy.gradients, copy.boundaries) == (
        graph.inputs, graph.outputs, graph.gradients, graph.boundaries,
    )  # fmt: skip
    before = graph.module.code
    node = next(copy.operations())
    node.meta["custom"]["module"] = "elsewhere"
    copy.output_node.args = ((),)
    copy.graph.eliminate_dead_code()
    assert graph.module.code == before and len(list(graph.operations())) > 20
    assert all(n.meta["custom"].get("module") != "elsewhere" for n in graph.operations())


def test_without_updates_nothing_of_the_update_is_left(graph: TrainingGraph) -> None:
    bare = without_updates(graph)
    check(bare)
    assert [entry.kind for entry in bare.outputs] == [OutputKind.LOSS, OutputKind.AUX]
    assert not [node for node in bare.operations() if phase_of(node) == "update"]
    assert bare.inputs == graph.inputs and set(bare.gradients) == set(graph.gradients)
    assert any(phase_of(node) == "update" for node in graph.operations())
