"""The table of passes: order, leaving out, inserting, what the runner checks and reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.twins import class_batches, classify, small_mlp

import wholestep
import wholestep.passes
from wholestep.graph.check import GraphError
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import TABLE, Pipeline, compiler_pass, default_pipeline, name_of, table_for_docs

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


CARRIED: list[tuple[str, ...]] = []


def carries_out(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    CARRIED.append(plan.recompute)
    return graph


def test_passes_that_wait_for_a_plan() -> None:
    """They run only when bound to one, after the others; then they are passes like any other."""
    pipeline = Pipeline([first], [carries_out]).insert_before("carries_out", lambda graph, plan: graph)
    assert names(pipeline) == ["first"] and len(pipeline) == 1 and len(pipeline.apply) == 2
    bound = pipeline.without("<lambda>").insert_after("carries_out", carries_out).bound(Plan(recompute=("made",)))
    assert (
        names(bound) == ["first", "carries_out", "carries_out"]
        and names(bound.first(1)) == ["first"]
        and not bound.apply
    )
    graph = compiled(Pipeline([])).graph
    assert graph is not None
    CARRIED.clear()
    pipeline.run(graph)
    assert not CARRIED
    bound.run(graph)
    assert CARRIED == [("made",), ("made",)]
    pipeline.without("<lambda>").bound(Plan()).run(graph)
    assert CARRIED[-1] == ()


def test_inserting_before() -> None:
    base = Pipeline([first, second])
    assert names(base.insert_before("first", adds_a_node)) == ["adds_a_node", "first", "second"]
    assert names(base.insert_before("second", adds_a_node)) == ["first", "adds_a_node", "second"]
    with pytest.raises(ValueError, match="there is no pass 'third'"):
        base.insert_before("third", first)


def test_the_public_names() -> None:
    assert names(wholestep.passes.default()) == names(wholestep.default_passes()) == names(default_pipeline())
    edited = wholestep.passes.default().insert_after("fold_casts", adds_a_node)
    assert names(edited).index("adds_a_node") == names(edited).index("fold_casts") + 1
    assert any("adds_a_node" in note for note in compiled(edited).notes)


def test_every_row_has_a_file_a_function_and_a_reason() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert name_of(row.load()) == row.name and row.reason and row.load().numerics in ("bitwise", "rounding")


def test_every_pass_is_reported_and_explained() -> None:
    graph = compiled(Pipeline([])).graph
    _, reports = default_pipeline(extra=[adds_a_node]).run_reporting(graph)
    assert [r.name for r in reports] == [*names(default_pipeline()), "adds_a_node"]
    assert all(r.seconds > 0 for r in reports) and reports[-1].nodes_after == reports[-1].nodes_before + 1
    told = compiled([adds_a_node]).explain()
    assert "passes     " in told and "adds_a_node" in told and "note       pass" not in told


def test_unknown_names_are_named() -> None:
    base = Pipeline([first, second])
    with pytest.raises(ValueError, match="there is no pass 'third'"):
        base.without("third")
    with pytest.raises(ValueError, match="there is no pass 'third'"):
        base.insert_after("third", first)


def test_the_tier_of_numerics_is_declared() -> None:
    assert adds_a_node.numerics == "rounding"
    with pytest.raises(ValueError, match="use 'bitwise' or 'rounding'"):
        compiler_pass(numerics="whatever")


def test_default_passes_and_extra_ones() -> None:
    whole = default_pipeline()
    assert [*names(whole), *map(name_of, whole.apply)] == [row.name for row in TABLE]
    assert names(whole)[0] == "recognise_masks" and [name_of(one) for one in whole.apply[:3]] == [
        "take_kernels",
        "mark_regions",
        "recompute",
    ]
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


def test_the_docs_have_the_table_of_the_code() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
    assert table_for_docs() in docs.read_text("utf-8"), f"paste this into {docs.name}:\n{table_for_docs()}"
