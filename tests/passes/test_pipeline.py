"""The table of passes: order, leaving out, inserting, what the runner checks and reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.twins import class_batches, classify, small_mlp

import wholestep
from wholestep.graph.check import GraphError
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pipeline, compiler_pass, default_pipeline, name_of

BATCH = class_batches(1)[0]


@compiler_pass(numerics="bitwise")
def first(graph: TrainingGraph) -> TrainingGraph:
    return graph


@compiler_pass(numerics="bitwise")
def second(graph: TrainingGraph) -> TrainingGraph:
    return graph


@compiler_pass(numerics="rounding")
def adds_a_node(graph: TrainingGraph) -> TrainingGraph:
    """x => x * 1 on the loss."""
    loss = graph.output_values[0]
    with graph.graph.inserting_before(graph.output_node):
        more = graph.graph.call_function(torch.ops.aten.mul.Tensor, (loss, 1.0))
    more.meta = dict(loss.meta)
    graph.output_node.update_arg(0, (more, *graph.output_values[1:]))
    graph.module.recompile()
    return graph


@compiler_pass(numerics="bitwise")
def breaks_the_graph(graph: TrainingGraph) -> TrainingGraph:
    next(iter(graph.operations())).meta.pop("val")
    return graph


def compiled(passes: object) -> wholestep.Step:
    torch.manual_seed(0)
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wholestep.compile(model, classify, optimizer, BATCH, backend="interpret", cache=False, passes=passes)


def names(pipeline: Pipeline) -> list[str]:
    return [name_of(p) for p in pipeline]


def test_order_and_edits_make_new_pipelines() -> None:
    base = Pipeline([first, second])
    assert names(base.insert_after("first", adds_a_node)) == ["first", "adds_a_node", "second"]
    assert names(base.without("first")) == ["second"] and names(base.first(1)) == ["first"]
    assert names(base) == ["first", "second"] and len(base) == 2


def test_unknown_names_are_named() -> None:
    base = Pipeline([first, second])
    with pytest.raises(ValueError, match="no pass named 'third'; there are first, second"):
        base.without("third")
    with pytest.raises(ValueError, match="no pass named 'third'; there are first, second"):
        base.insert_after("third", first)


def test_the_tier_of_numerics_is_declared() -> None:
    assert adds_a_node.numerics == "rounding"
    with pytest.raises(ValueError, match="use 'bitwise' or 'rounding'"):
        compiler_pass(numerics="whatever")


def test_default_passes_and_extra_ones() -> None:
    assert names(default_pipeline()) == ["recognise_masks", "fuse_loss"]
    assert names(default_pipeline(extra=[first]))[-1] == "first"


def test_passes_run_in_order_and_are_reported() -> None:
    ran: list[str] = []

    def noting(name: str) -> object:
        def one(graph: TrainingGraph) -> TrainingGraph:
            ran.append(name)
            return graph

        one.__name__ = name
        return one

    step = compiled([noting("a"), noting("b"), adds_a_node])
    assert ran == ["a", "b"]
    assert any(note.startswith("pass adds_a_node:") for note in step.notes)
    assert float(step(BATCH)) == float(compiled(None)(BATCH))


def test_a_pipeline_replaces_the_default_one() -> None:
    step = compiled(Pipeline([first]))
    assert float(step(BATCH)) == float(compiled(None)(BATCH))


def test_a_pass_that_breaks_the_graph_is_caught() -> None:
    with pytest.raises(GraphError):
        compiled([breaks_the_graph])


def test_every_stage_is_dumped(tmp_path: Path) -> None:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wholestep.compile(
        model, classify, optimizer, BATCH, backend="interpret", cache=False, passes=[first], dump=str(tmp_path)
    )
    found = sorted(p.name for p in tmp_path.iterdir())
    assert found[0].startswith("00_captured") and any("first" in name for name in found)
    assert "addmm" in (tmp_path / found[0]).read_text()
