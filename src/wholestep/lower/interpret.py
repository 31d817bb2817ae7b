"""Lowering `interpret`: every node of the graph is one call of its operator, in order.

In goes a TrainingGraph, out comes a Runner. Nothing is compiled, so it is ready at once, runs shapes seen rarely, and
computes bit for bit what eager computes where the operators are the same. Each value dies at its last use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.strides import is_dense_in, laid_out, memory_order
from wholestep.graph.training_graph import TrainingGraph, module_of
from wholestep.lower.driver import Statement, build_driver
from wholestep.lower.in_place import write_state_in_place
from wholestep.lower.runner import Runner
from wholestep.ops import IN_ORDER

aten = torch.ops.aten


def lower_interpret(graph: TrainingGraph, *, watch: Sequence[str] = ()) -> Runner:
    """A Runner that calls one operator per node; `watch` names nodes whose values are returned after the outputs. The graph of
    several ranks runs on all of them, side by side."""
    if graph.ranks.several:
        from wholestep.lower.lockstep import lower_lockstep  # which calls what is defined here

        return lower_lockstep(graph, watch=watch)
    started = time.perf_counter()
    imperative = write_state_in_place(graph, watch)
    statements = [statement_of(node) for node in imperative.graph.nodes if node.op == "call_function"]
    driver = build_driver(
        imperative.placeholders, statements, imperative.results, constants_of(imperative.graph, imperative.owner)
    )
    facts = {
        "backend": "interpret",
        "regions": 0,
        "unique_regions": 0,
        "calls": len(statements),
        "symbolic": imperative.symbolic,
        "in_place_updates": imperative.num_in_place,
        "copied_updates": imperative.num_copies,
        "seconds": time.perf_counter() - started,
        "seconds_per_region": {},
        "cache_hits": 0,
        "driver": driver.source,
        "notes": [],
    }
    return Runner(driver.function, len(graph.inputs), facts)


_AS_RESHAPE = (aten.view.default, aten._unsafe_view.default)
"""Called as `reshape`, which copies where it must: a real kernel may return other strides than tracing was told (torch's batch
norm does so on the CPU for a transposed input)."""


def statement_of(node: fx.Node, *, exactly: bool = False) -> Statement:
    """The call that a node stands for; `exactly` with the strides of the trace, for a reader that was compiled for them."""
    if not callable(node.target):
        raise TypeError(f"node {node.name} calls {node.target!r}, which is no function")
    function = aten.reshape.default if node.target in _AS_RESHAPE else _in_order(node.target)
    if exactly:
        function = _with_strides(function, node.meta.get("val"))
    return Statement(function, node.args, node.kwargs, (node,), comment=module_of(node) or "")


def _in_order(target: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, or what gives the same sums in an order that repeats itself."""
    ordered = IN_ORDER.get(target)  # type: ignore[call-overload]
    if ordered is None:
        return target

    def call(*args: Any, **kwargs: Any) -> Any:
        found = ordered(*args, **kwargs)
        return target(*args, **kwargs) if found is NotImplemented else found

    return call


def _with_strides(function: Callable[..., Any], traced: Any) -> Callable[..., Any]:
    """Copies a result that lies in memory otherwise than tracing was told (hardtanh's backward does, for a transposed gradient)."""
    if not isinstance(traced, torch.Tensor) or traced.dim() < 2:
        return function
    order = memory_order(traced)
    if not is_dense_in(traced, order):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return laid_out(function(*args, **kwargs), order)

    return call


def constants_of(graph: fx.Graph, owner: torch.nn.Module) -> dict[fx.Node, Any]:
    """`get_attr` nodes -> the tensor or submodule they read, looked up once."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value: Any = owner
            for part in str(node.target).split("."):
                value = getattr(value, part)
            found[node] = value
        elif node.op in ("call_module", "call_method"):
            raise TypeError(f"node {node.name} is a {node.op}; a training graph has functions only")
    return found
