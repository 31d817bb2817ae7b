"""Graphs for the tests of cost: traced functions, and whole captured training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep
from wholestep.graph.training_graph import TrainingGraph


def traced(function: Callable[..., Any], *arguments: Any, symbolic: bool = False) -> list[fx.Node]:
    """The operators of a function, on tensors without data."""
    graph = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*arguments).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def operator(name: str, function: Callable[..., Any], *arguments: Any) -> fx.Node:
    """The one node of the traced function that calls `name`, as in `aten::mm`."""
    (found,) = [
        n for n in traced(function, *arguments) if hasattr(n.target, "_schema") and n.target._schema.name == name
    ]
    return found


def captured(model: Any, loss_fn: Any, batch: Any, optimizer: Any = None, **options: Any) -> TrainingGraph:
    """The graph of one SGD step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    # cache=False: what is counted is what this very model traces to
    step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret", check="off", cache=False, **options)
    assert step.graph is not None
    return step.graph
