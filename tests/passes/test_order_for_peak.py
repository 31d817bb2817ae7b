"""Cheap nodes move to where less is alive, never so that the peak rises; equal layers stay equal; bits stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.passes.stacks import Stack, early, id_batches, next_token
from tests.runtime.twins import Side, interpreted
from torch import fx, nn

from wholestep.graph.check import check
from wholestep.graph.liveness import peak_bytes
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph, phase_of
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.regions import Region, split_regions
from wholestep.passes.lean_gradients import lean_gradients
from wholestep.passes.order_for_peak import order_for_peak
from wholestep.passes.pipeline import Pipeline

aten = torch.ops.aten


def call(graph: fx.Graph, phase: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda entry: entry.meta["val"])
    node.meta = {"val": target(*values[0], **values[1]), "custom": {"phase": phase}}
    return node


def small_graph(*, write_input: bool = False) -> TrainingGraph:
    """x (bf16) is doubled; `wide`, its cast, is made in the forward and read only by the last node; a large temporary between.

    The peak lies at the temporary, with `wide` alive.
    """
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(64, dtype=torch.bfloat16)
    doubled = call(graph, "forward", aten.mul.Tensor, x, 2.0)
    wide = call(graph, "forward", aten._to_copy.default, x if write_input else doubled, dtype=torch.float32)
    large = call(graph, "forward", aten.repeat.default, doubled, [100])
    loss = call(graph, "forward", aten.sum.default, large)
    total = call(graph, "backward", aten.add.Tensor, wide, loss)
    last = call(graph, "backward", aten.sum.default, total)
    outputs = [Output(OutputKind.LOSS, "loss")]
    values = [last]
    if write_input:
        outputs.append(Output(OutputKind.UPDATE, "parameter:x", 0))
        values.append(call(graph, "update", aten.mul.Tensor, x, 0.5))
    graph.output(tuple(values))
    return TrainingGraph(fx.GraphModule({}, graph), (Input(Role.PARAMETER, "x"),), tuple(outputs))


def names(graph: TrainingGraph) -> list[str]:
    return [node.name for node in graph.operations()]


def test_a_widening_cast_waits_for_its_reader() -> None:
    graph = small_graph()
    assert names(graph) == [
        "mul_tensor",
        "_to_copy_default",
        "repeat_default",
        "sum_default",
        "add_tensor",
        "sum_default_1",
    ]
    before, value = peak_bytes(graph), graph.module(torch.full((64,), 3.0, dtype=torch.bfloat16))
    order_for_peak(graph)
    check(graph)
    assert names(graph) == [
        "mul_tensor",
        "repeat_default",
        "sum_default",
        "_to_copy_default",
        "add_tensor",
        "sum_default_1",
    ]
    assert phase_of(graph.node("_to_copy_default")) == "backward", "it belongs to the region of its reader"
    assert peak_bytes(graph) < before
    assert torch.equal(graph.module(torch.full((64,), 3.0, dtype=torch.bfloat16))[0], value[0])


def test_what_reads_written_state_stays() -> None:
    """Read later, the old value of x would have to be kept."""
    graph = small_graph(write_input=True)
    before = names(graph)
    assert names(order_for_peak(graph)) == before


def test_a_narrowing_cast_follows_its_argument_unless_that_is_read_later() -> None:
    def graph(*, read_later: bool) -> TrainingGraph:
        made = fx.Graph()
        x = made.placeholder("x")
        x.meta["val"] = torch.ones(64)
        doubled = call(made, "forward", aten.mul.Tensor, x, 2.0)
        large = call(made, "forward", aten.repeat.default, x, [100])
        loss = call(made, "forward", aten.sum.default, large)
        narrow = call(made, "forward", aten._to_copy.default, doubled, dtype=torch.bfloat16)
        rest = call(made, "backward", aten.sum.default, doubled) if read_later else loss
        last = call(made, "backward", aten.sum.default, call(made, "backward", aten.add.Tensor, narrow, rest))
        made.output((loss, last))
        outputs = (Output(OutputKind.LOSS, "loss"), Output(OutputKind.AUX, "last"))
        return TrainingGraph(fx.GraphModule({}, made), (Input(Role.BATCH, "x"),), outputs)

    moved, stays = order_for_peak(graph(read_later=False)), order_for_peak(graph(read_later=True))
    assert names(moved)[:2] == ["mul_tensor", "_to_copy_default"]
    assert names(stays)[:2] == ["mul_tensor", "repeat_default"]
    for one in (moved, stays):
        check(one)


def test_the_gradient_of_a_gate_is_made_before_products_that_do_not_read_it() -> None:
    """Else the gradient it is made from and the gate wait beside the product, as in the MLP of a Llama."""
    graph = fx.Graph()
    x, gate = graph.placeholder("x"), graph.placeholder("gate")
    for node in (x, gate):
        node.meta["val"] = torch.ones(32, 32)
    kept = call(graph, "forward", aten.exp.default, gate)
    loss = call(graph, "forward", aten.sum.default, kept)
    product = call(graph, "backward", aten.mm.default, x, x)
    up = call(graph, "backward", aten.mul.Tensor, product, 2.0)
    down = call(graph, "backward", aten.mul.Tensor, product, 3.0)
    first = call(graph, "backward", aten.mm.default, up, x)
    gradient = call(graph, "backward", aten.silu_backward.default, down, kept)
    second = call(graph, "backward", aten.mm.default, gradient, x)
    graph.output((loss, first, second))
    outputs = tuple(
        Output(kind, name) for kind, name in ((OutputKind.LOSS, "loss"), *((OutputKind.AUX, n) for n in "ab"))
    )
    inputs = (Input(Role.BATCH, "x"), Input(Role.BATCH, "gate"))
    whole = TrainingGraph(fx.GraphModule({}, graph), inputs, outputs)
    before = peak_bytes(whole)
    order = names(order_for_peak(whole))
    assert order.index(gradient.name) == order.index(down.name) + 1 < order.index(first.name)
    assert peak_bytes(whole) <= before


def test_two_small_values_do_not_keep_a_large_one() -> None:
    """Each mask alone would gladly wait for the backward, but then what both read would wait too."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["val"] = torch.ones(64)
    doubled = call(made, "forward", aten.mul.Tensor, x, 2.0)
    one, two = call(made, "forward", aten.gt.Scalar, doubled, 1), call(made, "forward", aten.lt.Scalar, doubled, 1)
    large = call(made, "forward", aten.repeat.default, x, [100])
    loss = call(made, "forward", aten.sum.default, large)
    last = call(made, "backward", aten.sum.default, call(made, "backward", aten.mul.Tensor, one, two))
    made.output((loss, last))
    outputs = (Output(OutputKind.LOSS, "loss"), Output(OutputKind.AUX, "last"))
    training = TrainingGraph(fx.GraphModule({}, made), (Input(Role.BATCH, "x"),), outputs)
    before, peak = names(training), peak_bytes(training)
    assert names(order_for_peak(training)) == before and peak_bytes(training) == peak


def test_a_peak_that_would_rise_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    before = [(node.name, phase_of(node)) for node in graph.operations()]
    peaks = iter([1, 2])
    monkeypatch.setattr("wholestep.passes.order_for_peak.peak_bytes", lambda *_, **__: next(peaks))
    order_for_peak(graph)
    check(graph)
    assert [(node.name, phase_of(node)) for node in graph.operations()] == before


class Dropping(Stack):
    """Random numbers stay where they are drawn."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(ids), 0.1)


def held_before_the_embedding(graph: TrainingGraph) -> torch.dtype:
    """The dtype in which the head's part of the tied gradient waits while the layers run backward."""
    nodes = list(graph.operations())
    final = nodes.index(graph.node(graph.gradients["embedding.weight"]))
    layers = next(i for i, n in enumerate(nodes) if phase_of(n) == "backward" and "blocks" in str(n.meta["custom"]))
    parts = [n for n in nodes[:layers] if n.meta["val"] is not None and phase_of(n) == "backward" and n.users]
    waiting = [n for n in parts if nodes.index(max(n.users)) > final - 4]
    (one,) = [n.meta["val"].dtype for n in waiting if tuple(n.meta["val"].shape) == (13, 16)]
    return one


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [Stack, Dropping])
def test_the_same_bits_and_equal_regions(model: type[nn.Module], precision: str) -> None:
    results, found, peaks, held = [], [], [], []
    for passes in (early(lean_gradients), early(lean_gradients, after=[order_for_peak])):
        torch.manual_seed(0)
        own = model(tied=True)
        side = Side(own, torch.optim.AdamW(own.parameters(), lr=1e-2), next_token)
        batches = id_batches()
        step = interpreted(side, batches[0], passes=passes, precision=precision, check="off", seed=1)
        peaks.append(peak_bytes(step.graph))
        held.append(held_before_the_embedding(step.graph))
        pieces = split_regions(write_state_in_place(step.graph))
        regions = [piece for piece in pieces if isinstance(piece, Region) and piece.title.startswith("layer")]
        found.append([region.signature for region in regions])
        results.append([*(step(batch) for batch in batches), *own.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert peaks[1] <= peaks[0]
    assert len(found[0]) == len(found[1]) and len(set(found[1])) == len(set(found[0])) <= 3
    if precision == "bf16":
        assert held == [torch.float32, torch.bfloat16], "the head's part of the tied gradient waits in bf16"


def test_symbolic_sizes_are_left_alone() -> None:
    model = Stack(layers=2)
    side = Side(model, torch.optim.SGD(model.parameters(), lr=0.1), next_token)
    batch = id_batches()[0]
    step = interpreted(side, batch, passes=Pipeline([order_for_peak]), dynamic=True, check="off")
    assert torch.isfinite(step(batch))
