"""A step at another batch size without tracing it again: the same plans as those of a step captured there."""

from __future__ import annotations

import pytest

from wholestep.cost.target import find_target
from wholestep.graph.training_graph import Role, tensors_in
from wholestep.passes.pipeline import default_pipeline
from wholestep.plan.frontier import frontier, leanest
from wholestep.plan.rebatch import rebatched
from wholestep.train.fit import Question, captured_step, largest_fitting

TARGET = find_target("h200")


def _question(model: str, batch: int, *sets: str, seq: int | None) -> Question:
    return Question(model=model, sets=sets, batch=batch, seq=seq, target=TARGET, budget_bytes=1)


@pytest.mark.parametrize(
    "asked",
    [
        _question("gpt-1m", 3, "layers=2", "width=48", "heads=2", seq=31),
        pytest.param(_question("resnet-18", 5, "image_size=16", seq=None), marks=pytest.mark.slow),
        pytest.param(
            _question(
                "bert-large",
                3,
                "num_hidden_layers=2",
                "hidden_size=64",
                "intermediate_size=160",
                "vocab_size=500",
                seq=19,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda asked: asked.model,
)
def test_the_peaks_of_a_step_captured_there(asked: Question) -> None:
    factor = 4
    scaled = rebatched(captured_step(asked).captured.graph, factor)
    there = captured_step(asked, batch=asked.batch * factor).captured.graph
    mine, true = (frontier(graph, TARGET.device, default_pipeline().carry_out, targets=1) for graph in (scaled, there))
    for one, other in ((mine[0], true[0]), (mine[-1], true[-1])):
        assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.01)
        assert one.seconds == pytest.approx(other.seconds, rel=0.03)
    least = leanest(there, TARGET.device, default_pipeline().carry_out)
    assert least.peak_bytes == pytest.approx(true[-1].peak_bytes, rel=0.01), "what the largest batch is found by"


def test_weights_states_and_gradients_do_not_grow_and_the_original_stays() -> None:
    graph = captured_step(_question("gpt-1m", 2, "layers=2", "width=48", "heads=2", seq=31)).captured.graph
    before = {node.name: [tuple(t.shape) for t in tensors_in(node.meta.get("val"))] for node in graph.graph.nodes}
    scaled = rebatched(graph, 3)
    for entry, node, copy in zip(graph.inputs, graph.placeholders, scaled.placeholders):
        grows = entry.role is Role.BATCH
        assert copy.meta["val"].numel() == node.meta["val"].numel() * (3 if grows else 1), entry
    for name in graph.gradients.values():
        assert scaled.node(name).meta["val"].shape == graph.node(name).meta["val"].shape
    assert before == {
        node.name: [tuple(t.shape) for t in tensors_in(node.meta.get("val"))] for node in graph.graph.nodes
    }


@pytest.mark.parametrize("budget", [99, 100, 137, 250, 1000, 5003])
def test_the_largest_batch_on_a_line_with_a_corner(budget: int) -> None:
    def least(rows: int) -> int:
        return max(100, 40 + 7 * rows)

    found, known, certain = largest_fitting(least, {4: least(4)}, budget)
    true = max((rows for rows in range(1, 2000) if least(rows) <= budget), default=0)
    assert found == true if certain else 0.98 * true <= found <= true
    assert len(known) <= 6
