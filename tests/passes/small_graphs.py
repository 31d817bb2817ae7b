"""Tiny TrainingGraphs for the tests of passes: a function of tensors, traced, with phases and boundaries as the test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta

from wholestep.graph.check import check
from wholestep.graph.training_graph import Input, Output, OutputKind, Role, TrainingGraph


def module(path: str) -> Any:
    """Context: what is traced inside belongs to that module."""
    return annotate({"module": path})


def in_backward() -> Any:
    return annotate({"phase": "backward"})


def traced(function: Callable[..., Any], *inputs: torch.Tensor, parameters: int = 0) -> TrainingGraph:
    """The graph of `function`; its first result is the loss, the others are aux. The first inputs are parameters."""

    def step(*flat: torch.Tensor) -> list[torch.Tensor]:
        with annotate({"phase": "forward"}):
            found = function(*flat)
        return list(found) if isinstance(found, list | tuple) else [found]

    with preserve_node_meta():
        made = make_fx(step, tracing_mode="fake")(*inputs)
    for node in list(made.graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.lift_fresh_copy.default):
            node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
    made.graph.eliminate_dead_code()
    made.recompile()
    roles = [Role.PARAMETER if i < parameters else Role.BATCH for i in range(len(inputs))]
    count = len(next(iter(reversed(made.graph.nodes))).args[0])
    outputs = [Output(OutputKind.LOSS, "loss"), *(Output(OutputKind.AUX, f"aux{i}") for i in range(1, count))]
    graph = TrainingGraph(made, tuple(Input(r, f"in{i}") for i, r in enumerate(roles)), tuple(outputs))
    check(graph)
    return graph


def operators(graph: TrainingGraph) -> list[str]:
    """`["mul", "sum"]`: the operators of the graph, in order."""
    return [
        str(getattr(n.target, "_schema", n.target)).split("(")[0].split("::")[-1].split(".")[0]
        for n in graph.operations()
    ]


def rewritten(
    one: Callable[[TrainingGraph], TrainingGraph], graph: TrainingGraph, *inputs: torch.Tensor
) -> TrainingGraph:
    """The graph after a bitwise pass: checked, and run on `inputs` with the same bits as before."""
    before = graph.module(*inputs)
    changed = one(graph)
    check(changed)
    after = changed.module(*inputs)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        assert torch.equal(
            old.reshape(-1).contiguous().view(torch.uint8), new.reshape(-1).contiguous().view(torch.uint8)
        )
    return changed
