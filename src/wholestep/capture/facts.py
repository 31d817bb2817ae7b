"""Facts about sizes that only data tells, on which a trace relied and at which nothing in it looks: the graph looks at them.

In: a trace, and facts such as `n == 3` of a number that `.item()` reads (a batch of graphs has as many graphs as labels). The trace
gains one `ws::require` for each, where its numbers are first at hand. A step for which a fact does not hold ends before anything is
computed with it, and eager PyTorch takes it, as with the facts that Dynamo's graph asserts itself. It must be the last trace: one
more would take the facts for granted, and write `ws::require(1)`, which looks at nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from wholestep.graph.training_graph import tensors_in


def look_at(recorded: fx.GraphModule, facts: Iterable[Any], device: torch.device, mode: Any) -> dict[Any, torch.Tensor]:
    """Add results to the trace, one for each fact that it has the numbers for: fact -> the value without data."""
    graph = recorded.graph
    output = next(iter(reversed(graph.nodes)))
    sources = _sources(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    looks: dict[Any, fx.Node] = {}
    for fact in sorted(facts, key=str):
        if fact.free_symbols - set(sources):
            continue
        last = max((sources[symbol][0] for symbol in fact.free_symbols), key=order.__getitem__)
        behind = last.next
        with graph.inserting_before(behind):
            numbers = {symbol: fx.Proxy(_number(graph, *sources[symbol])) for symbol in fact.free_symbols}
            told = sympy_interp(PythonReferenceAnalysis, numbers, fact).node
            flag = graph.call_function(torch.sym_ite, (told, 1, 0))
            looks[fact] = graph.call_function(torch.ops.ws.require.default, (flag, device))
        _complete(last, behind, mode)
    output.args = ([*output.args[0], *looks.values()],)
    recorded.recompile()
    return {fact: node.meta["val"] for fact, node in looks.items()}


def divisors(recorded: fx.GraphModule) -> set[Any]:
    """That no number is zero by which the trace divides: Python raises there, torch's own code goes on with infinities."""
    found = set()
    for node in recorded.graph.nodes:
        divisor = (
            node.args[1].meta.get("val") if node.target in _DIVIDES and isinstance(node.args[1], fx.Node) else None
        )
        if isinstance(divisor, torch.SymInt | torch.SymFloat) and free_unbacked_symbols(divisor):
            found.add(sympy.Ne(divisor.node.expr, 0))
    return found


def kept_dimensions(recorded: fx.GraphModule) -> set[Any]:
    """That no size is one of a dimension which `squeeze` would take away: torch traces it as staying, and asks nobody."""
    found = set()
    for node in recorded.graph.nodes:
        if node.target in _SQUEEZES:
            value = node.args[0].meta["val"]
            dims = node.args[1] if len(node.args) > 1 else range(value.dim())
            sizes = [value.shape[dim] for dim in ([dims] if isinstance(dims, int) else dims) if value.dim()]
            found |= {sympy.Ne(size.node.expr, 1) for size in sizes if free_unbacked_symbols(size)}
    return found


_SQUEEZES = (torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims)
_DIVIDES = (operator.truediv, operator.floordiv, operator.mod)


def about_places(recorded: fx.GraphModule, facts: Iterable[Any]) -> set[Any]:
    """Facts that hold of themselves: where in memory a slice begins, which torch counts as a number of its own, is not below 0."""
    begins = set()
    for node in recorded.graph.nodes:
        value = node.meta.get("val")
        start = value.storage_offset() if isinstance(value, torch.Tensor) and value.layout is torch.strided else 0
        if isinstance(start, torch.SymInt) and start.node._expr.is_symbol:
            begins.add(start.node._expr)
    return {fact for fact in facts if any(fact == sympy.Le(0, symbol) for symbol in fact.free_symbols & begins)}


def _sources(graph: fx.Graph) -> dict[sympy.Symbol, tuple[fx.Node, int | None]]:
    """Where the number of a symbol is first at hand: a value, or one dimension of a tensor."""
    found: dict[sympy.Symbol, tuple[fx.Node, int | None]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node._expr.is_symbol:
            found.setdefault(value.node._expr, (node, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node._expr.is_symbol:
                    found.setdefault(size.node._expr, (node, dim))
    return found


def _number(graph: fx.Graph, node: fx.Node, dim: int | None) -> fx.Node:
    return node if dim is None else graph.call_function(torch.ops.aten.sym_size.int, (node, dim))


def _complete(before: fx.Node, end: fx.Node, mode: Any) -> None:
    """Values without data of the nodes between two, and that they are part of the forward."""
    node = before.next
    while node is not end:
        arguments = fx.map_arg(node.args, lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = node.target(*arguments)  # type: ignore[operator]
        assert not node.kwargs and (node.target is torch.ops.ws.require.default or not tensors_in(node.meta["val"]))
        node.meta["custom"] = {"phase": "forward"}
        node = node.next
