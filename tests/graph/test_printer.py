"""The printed program reads well and computes, bit by bit, what the graph computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.graph import toy_graphs
from torch import fx

from wholestep.graph.printer import dump, hash_source, to_python, value_type
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph

aten = torch.ops.aten


def run_source(source: str, values: list[torch.Tensor], constants: dict[str, torch.Tensor] | None = None) -> Any:
    namespace: dict[str, Any] = {}
    exec(compile(source, "printed", "exec"), namespace)
    namespace.get("CONSTANTS", {}).update(constants or {})
    return namespace["step"](*values)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


def graph_of(*calls: tuple[Any, tuple], name: str = "x") -> TrainingGraph:
    """One input, and a chain of calls in which "x" stands for the value so far."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target, args in calls:
        value = graph.call_function(target, tuple(value if a == "x" else a for a in args))
        value.meta["custom"] = {"phase": "forward"}
    graph.output((value,))
    module = fx.GraphModule(torch.nn.Module(), graph)
    return TrainingGraph(module, (Input(Role.BATCH, name),), (Output(OutputKind.LOSS, "loss"),))


@pytest.mark.parametrize("fold_layers", [True, False], ids=["folded", "flat"])
@pytest.mark.parametrize("make", [toy_graphs.mlp, toy_graphs.transformer, toy_graphs.staged])
def test_printed_program_computes_the_same(make: Callable[[], toy_graphs.Toy], fold_layers: bool) -> None:
    toy = make()
    assert_same_bits(run_source(to_python(toy.graph, fold_layers=fold_layers), toy.values), toy.run())


def test_equal_layers_print_once() -> None:
    source = to_python(toy_graphs.transformer(num_layers=3).graph)
    assert source.count("\ndef decoder_h_forward(") == 1 and source.count("= decoder_h_forward(") == 3
    assert source.count("\ndef decoder_h_backward(") == 1 and source.count("= decoder_h_backward(") == 3
    assert source.count("# decoder.h.*, layers 0-2 x3\n") == 2
    assert source.count("aten._softmax.default(") == 1
    body = source[source.index("def decoder_h_forward(") : source.index("def decoder_h_backward(")]
    assert "    qkv,  # f32[24, 8]\n" in body and "decoder.h.*  toy.py:" in body and "decoder.h.0" not in body
    flat = to_python(toy_graphs.transformer(num_layers=3).graph, fold_layers=False)
    assert "def decoder_h" not in flat and flat.count("aten._softmax.default(") == 3


def test_unequal_layers_print_in_place() -> None:
    source = to_python(toy_graphs.mlp().graph)
    assert source.count("def ") == 1


def test_layers_inside_unequal_stages_are_folded() -> None:
    source = to_python(toy_graphs.staged().graph)
    assert source.count("def stages_0_blocks_forward(") == 1 and source.count("= stages_0_blocks_forward(") == 2
    assert source.count("def stages_1_blocks_backward(") == 1 and "def stages_forward" not in source


def test_header_inputs_lines_and_returns() -> None:
    source = to_python(toy_graphs.mlp().graph)
    first, second, *_ = source.splitlines()
    assert first.startswith("# Training step: ") and "(forward " in first and "11 inputs, 9 outputs" in first
    assert second == "# Made by toy in 0.25 s."
    assert "    # parameter\n    net_0_weight,  # f32[6, 4]  parameter:net.0.weight\n" in source
    assert "    net_0_weight_momentum,  # f32[6, 4]  state:net.0.weight/momentum\n" in source
    assert "    hyper_group0,  # f64[1]  hyper:group0\n" in source
    assert "    # ---- forward ----\n" in source and source.count("# ---- backward ----") == 1
    assert "    addmm = aten.addmm.default(detach_1, detach_2, t)  # f32[5, 6]  net.0  toy.py:5\n" in source
    assert "  # loss:loss\n" in source and "  # update parameter:net.0.weight\n" in source


def test_rare_arguments_run() -> None:
    graph = graph_of(
        (aten.clamp.default, ("x", -math.inf, math.inf)),
        (aten._to_copy.default, ("x",)),
        (operator.getitem, ("x", (slice(None, 3, 2), Ellipsis, None))),
        (aten.to.device, ("x", torch.device("cpu"), torch.float64)),
        (aten.sum.dim_IntList, ("x", [0], True)),
        (math.floor, (2.5,)),
    )
    assert run_source(to_python(graph), [torch.randn(4, 2)]) == (2,)


def test_names_that_python_needs_stay_free() -> None:
    graph = graph_of((aten.neg.default, ("x",)), (aten.exp.default, ("x",)), name="torch")
    neg, exp = graph.operations()
    neg.name, exp.name = "aten", "lambda"
    x = torch.randn(3)
    assert_same_bits(run_source(to_python(graph), [x]), [torch.exp(-x)])


def test_large_constants_come_from_a_table() -> None:
    graph = graph_of((aten.neg.default, ("x",)))
    graph.module.register_buffer("table", torch.randn(100))
    with graph.graph.inserting_before(next(graph.operations())):
        table = graph.graph.get_attr("table")
    next(graph.operations()).args = (table,)
    source = to_python(graph)
    assert "# table: f32[100]" in source
    assert_same_bits(run_source(source, [torch.zeros(1)], {"table": graph.module.table}), [-graph.module.table])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64])
def test_small_constants_are_exact(dtype: torch.dtype) -> None:
    graph = graph_of((aten.clone.default, ("x",)))
    constant = torch.tensor([[0.1, math.inf], [-0.0, 3.0]]).to(dtype) if dtype.is_floating_point else torch.ones(2, 1)
    graph.module.register_buffer("small", constant.to(dtype))
    with graph.graph.inserting_before(next(graph.operations())):
        small = graph.graph.get_attr("small")
    next(graph.operations()).args = (small,)
    assert_same_bits(run_source(to_python(graph), [torch.zeros(1)]), [constant.to(dtype)])


def test_value_types() -> None:
    assert value_type([torch.empty(2, 3, dtype=torch.bfloat16), None, torch.empty(())]) == "(bf16[2, 3], None, f32[])"
    assert value_type(torch.empty(1, dtype=torch.bool)) == "b8[1]" and value_type(3) == "int"


def test_dump_names_stage_and_effect(tmp_path: Path) -> None:
    toy = toy_graphs.mlp()
    path = dump(toy.graph, tmp_path / "graphs", "fold_casts", 3, "12 casts fewer")
    assert path == tmp_path / "graphs" / "03_fold_casts.py"
    source = path.read_text(encoding="utf-8")
    assert source.startswith("# Stage 03: fold_casts.\n# Effect: 12 casts fewer\n# Training step: ")
    assert_same_bits(run_source(source, toy.values), toy.run())


def test_a_hash_is_of_what_is_computed_not_of_where_the_model_stands() -> None:
    line = "# Made in 1 s.\n    y = aten.relu.default(x)  # f32[2]  net.*.act  model.py:79\n"
    moved = line.replace("1 s", "2 s").replace("model.py:79", "moved.py:81")
    assert hash_source(line) == hash_source(moved)
    assert (
        len({hash_source(line), hash_source(line.replace("[2]", "[3]")), hash_source(line.replace("relu", "neg"))}) == 3
    )
