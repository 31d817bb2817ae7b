"""A relational layer: a message function and how messages are added up.

In: `message(e, p)` in plain PyTorch over all edges at once: e.src.x and e.dst.x (features of the edge's nodes), e.type (its
relation, to index parameters), e.x (features of the edge itself), p.W (parameters). Out: a callable over a RelGraph. The function
is traced at the first call for every combination of shapes; `reference` runs it edge by edge as it is written.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.errors import BadOption
from wholestep.ops.amounts import numel
from wholestep.ops.record import record
from wholestep.relational.explain import explain
from wholestep.relational.graph import RelGraph
from wholestep.relational.lowering import Program, lower
from wholestep.relational.trace import refuse_own_derivatives, trace

AGGREGATES = ("sum", "mean", "max", "mean per relation")
_at_work = threading.local()

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define("edge_softmax(Tensor logits, Tensor dst, Tensor? etype=None) -> Tensor")
LIBRARY.define("row_matmul(Tensor left, Tensor right) -> Tensor")
LIBRARY.define("row_einsum(str equation, Tensor[] operands) -> Tensor")


def _edge_softmax(logits: Tensor, dst: Tensor, etype: Tensor | None = None) -> Tensor:
    """Edges in any order."""
    dst = dst if etype is None else _pair_of(dst, etype)
    order = dst.argsort(stable=True)
    last = int(dst.max()) + 1 if dst.numel() else 0
    ptr = torch.searchsorted(dst[order], torch.arange(last + 1, device=dst.device))
    return torch.ops.ws.segment_softmax(logits[order], ptr)[order.argsort()]  # type: ignore[no-any-return]


LIBRARY.impl("edge_softmax", _edge_softmax, "CompositeExplicitAutograd")
# marks in a traced message function, of which a program has none
record("ws::edge_softmax", kind="reduction", flops=lambda call: 5 * numel(call.outputs[0]))
record("ws::row_matmul", kind="matmul", flops=lambda call: 2 * numel(call.outputs[0]) * call.shape("left")[-1])
record("ws::row_einsum", kind="matmul", flops=lambda call: 2 * numel(call.outputs[0]))
for _name, _plain in (("row_matmul", torch.matmul), ("row_einsum", torch.einsum)):
    LIBRARY.impl(_name, _plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ws::{_name}", _plain, lib=LIBRARY)
torch.library.register_fake("ws::edge_softmax", lambda logits, dst, etype=None: torch.empty_like(logits), lib=LIBRARY)


def _pair_of(dst: Tensor, etype: Tensor) -> Tensor:
    """A number for every destination and relation of which there are edges."""
    relations = int(etype.max()) + 1 if etype.numel() else 1
    return torch.unique(dst * relations + etype, return_inverse=True)[1]


def edge_softmax(logits: Tensor, *, within_relation: bool = False) -> Tensor:
    """Inside of a message function: softmax over the edges that come in at one node; logits (edges,) or (edges, heads).

    `within_relation`: over those of the same relation only.
    """
    dst = getattr(_at_work, "dst", None)
    if dst is None:
        raise BadOption("edge_softmax outside of a message function", hint="call it in the function given to rel.layer")
    if _at_work.traced:
        ids = (dst, _at_work.etype) if within_relation else (dst,)
        out: Tensor = torch.ops.ws.edge_softmax(logits, *ids)
        return out
    return _softmax_by_edges(logits, _pair_of(dst, _at_work.etype) if within_relation else dst)


def _softmax_by_edges(logits: Tensor, dst: Tensor) -> Tensor:
    """In plain PyTorch, with its own derivative."""
    place = dst.reshape(-1, *[1] * (logits.dim() - 1)).expand(logits.shape)
    nodes = int(dst.max()) + 1 if dst.numel() else 0
    top = (
        logits.detach()
        .new_full((nodes, *logits.shape[1:]), float("-inf"))
        .scatter_reduce(0, place, logits.detach(), "amax")
    )
    risen = (logits - top[dst]).exp()
    return risen / risen.new_zeros(nodes, *logits.shape[1:]).index_add(0, dst, risen)[dst]


def layer(message: Callable[[Any, Any], Tensor], *, aggregate: str = "sum") -> Layer:
    """A layer from a message function; `aggregate`: sum, mean or max over the edges that come in at a node, or the sum over
    relations of the mean over a relation's edges."""
    if aggregate not in AGGREGATES:
        raise BadOption(f"aggregate={aggregate!r}", hint=f"one of {', '.join(AGGREGATES)}")
    return Layer(message, aggregate)


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()


def _prepare(number: int, shapes: tuple[Any, ...], device: str, narrow: torch.dtype | None) -> bool:
    """Make the program of a layer, unless it is there. All arguments are constants: a capture that comes by runs it as it is."""
    self = _layers[number]
    if (shapes, narrow) not in self.programs:
        like: dict[str, dict[str, Tensor]] = {"nodes": {}, "edges": {}, "params": {}}
        for kind, name, shape, dtype in shapes:
            rows = shape if kind == "params" else (0, *shape)
            like[kind][name] = torch.empty(rows, dtype=dtype, device="meta")
        with torch.autocast("cpu", narrow, enabled=narrow is not None):  # where it is traced
            run = functools.partial(self._called, traced=True)
            refuse_own_derivatives(run, like)
            self.programs[shapes, narrow] = lower(trace(run, like), self.aggregate)
    return True


_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result, without importing Dynamo


class Layer:
    """See the module."""

    def __init__(self, message: Callable[[Any, Any], Tensor], aggregate: str) -> None:
        self.message, self.aggregate = message, aggregate
        self.programs: dict[Any, Program] = {}
        self.number = next(_numbers)
        _layers[self.number] = self

    def __call__(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        edges: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """One row per node. `edges`: features of the edges, in the order in which the graph was given them."""
        params, edges = params or {}, edges or {}
        program = self.program(graph, nodes, params, edges)
        ordered = [edge.index_select(0, graph.order) for edge in edges.values()]
        return program.module(graph, *nodes.values(), *ordered, *params.values())  # type: ignore[no-any-return]

    def program(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        edges: Mapping[str, Tensor] | None = None,
    ) -> Program:
        """What was made of the message function for such tensors, under autocast or not."""
        like = {"nodes": nodes, "edges": edges or {}, "params": params}
        self._refuse_wrong(graph, like)
        shapes = tuple(
            (kind, name, tuple(t.shape if kind == "params" else t.shape[1:]), t.dtype)
            for kind, tensors in like.items()
            for name, t in tensors.items()
        )
        device = graph.src.device.type
        narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        _prepare(self.number, shapes, device, narrow)
        return self.programs[shapes, narrow]

    def _called(
        self, src: Any, dst: Any, edge: Any, params: Any, etype: Tensor, target: Tensor, *types_of_ends: Tensor,
        traced: bool = False,
    ) -> Tensor:  # fmt: skip
        ends = [dict(features) for features in (src, dst)]
        for end, kind in zip(ends, types_of_ends, strict=False):
            end["type"] = kind
        at_ends = [types.SimpleNamespace(**end) for end in ends]
        e = types.SimpleNamespace(src=at_ends[0], dst=at_ends[1], type=etype, **edge)
        before = dict(vars(_at_work))
        _at_work.dst, _at_work.etype, _at_work.traced = target, etype, traced
        try:
            return self.message(e, types.SimpleNamespace(**params))
        finally:
            vars(_at_work).clear()
            vars(_at_work).update(before)

    def reference(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        edges: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The same edge by edge, as it is written."""
        src, dst = graph.src.long(), graph.dst.long()
        at_src, at_dst = ({n: x[ids] for n, x in nodes.items()} for ids in (src, dst))
        given = {n: x[graph.order] for n, x in (edges or {}).items()}
        kinds = () if graph.types is None else [graph.types.to_node.index.long()[ids] for ids in (src, dst)]
        messages = self._called(at_src, at_dst, given, params or {}, graph.etype.long(), dst, *kinds)
        place = dst.reshape(-1, *[1] * (messages.dim() - 1)).expand(messages.shape)
        if self.aggregate == "mean per relation":
            pair = _pair_of(dst, graph.etype.long())
            messages = messages / torch.bincount(pair)[pair].reshape(-1, *[1] * (messages.dim() - 1))
        out = messages.new_zeros(graph.num_nodes, *messages.shape[1:])
        if self.aggregate == "max":
            return out.scatter_reduce(0, place, messages, "amax", include_self=False)
        total = out.index_add(0, dst, messages)
        if self.aggregate != "mean":
            return total
        return total / graph.degree.clamp(min=1).reshape(-1, *[1] * (total.dim() - 1))

    def explain(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        edges: Mapping[str, Tensor] | None = None,
    ) -> str:
        """The steps of a forward, each with the space it runs in, its rows and its bytes, and the floor: see `explain.py`."""
        program = self.program(graph, nodes, params or {}, edges)
        return explain(program, graph, [*nodes.values(), *(edges or {}).values(), *(params or {}).values()])

    def _refuse_wrong(self, graph: RelGraph, like: Mapping[str, Mapping[str, Tensor]]) -> None:
        for kind, taken in (("nodes", {"type"}), ("edges", {"src", "dst", "type"})):
            for name in taken & set(like[kind]):
                raise BadOption(f"{kind} has a {name!r}", hint="the message function reads something else by that name")
        for kind, rows in (("nodes", graph.num_nodes), ("edges", graph.num_edges)):
            for name, tensor in like[kind].items():
                if tensor.dim() < 1 or tensor.shape[0] != rows:
                    raise BadOption(
                        f"{kind}[{name!r}] has shape {tuple(tensor.shape)}",
                        hint=f"it needs {rows} rows, one for each of the {kind}",
                    )
