"""A relational layer: a message function and how messages are added up.

In: `message(e, p)` in plain PyTorch over all edges at once: e.src.x and e.dst.x (features of the edge's nodes), e.type (its
relation, to index parameters), e.x (features of the edge itself), p.W (parameters). Out: a callable over a RelGraph. The function
is followed at the first call for every combination of shapes, and again when something that it read has changed (`follow.py`);
`reference` runs it edge by edge as it is written.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from wholestep.capture.front.replay import user_line
from wholestep.errors import BadOption, UnsupportedModel
from wholestep.relational.explain import explain
from wholestep.relational.follow import Asked, Guarded, Narrow, carry_out, follow, run
from wholestep.relational.graph import RelGraph
from wholestep.relational.messages import Fields, arguments_of, largest_of, pair_of, softmax_by_edges
from wholestep.relational.program import Program
from wholestep.relational.trace import Shapes

AGGREGATES = ("sum", "mean", "max", "mean per relation")
MOST_PROGRAMS = 16
"""For one combination of shapes: the one that held least lately goes."""


def layer(message: Callable[[Any, Any], Tensor], *, aggregate: str = "sum") -> Layer:
    """A layer from a message function; `aggregate`: sum, mean or max over the edges that come in at a node, or the sum over
    relations of the mean over a relation's edges."""
    if not callable(message):
        raise BadOption(f"message={message!r}", hint="give a function (e, p) of edges and parameters")
    if aggregate not in AGGREGATES:
        raise BadOption(f"aggregate={aggregate!r}", hint=f"one of {', '.join(AGGREGATES)}")
    return Layer(message, aggregate)


class Layer:
    """See the module."""

    def __init__(self, message: Callable[[Any, Any], Tensor], aggregate: str) -> None:
        self.message, self.aggregate = message, aggregate
        self.programs: dict[Any, list[Guarded]] = {}

    def __call__(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        edges: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """One row per node. `edges`: features of the edges, in the order in which the graph was given them."""
        params, edges = {} if params is None else params, {} if edges is None else edges
        shapes, narrow = self._shapes(graph, {"nodes": nodes, "edges": edges, "params": params}), _narrow(graph)
        given = (
            graph,
            *nodes.values(),
            *[edge.index_select(0, graph.order) for edge in edges.values()],
            *params.values(),
        )
        if torch.compiler.is_dynamo_compiling():
            return run(self.message, self.aggregate, shapes, narrow, *given)  # type: ignore[no-any-return]
        return carry_out(self._found(shapes, narrow).module, narrow, *given)  # type: ignore[no-any-return]

    def program(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        edges: Mapping[str, Tensor] | None = None,
    ) -> Program:
        """What was made of the message function for such tensors, under autocast or not."""
        return self._found(
            self._shapes(graph, {"nodes": nodes, "edges": edges or {}, "params": params}), _narrow(graph)
        )

    def _shapes(self, graph: RelGraph, like: Mapping[str, Mapping[str, Tensor]]) -> Shapes:
        self._refuse_wrong(graph, like)
        return tuple(
            (kind, name, tuple(t.shape if kind == "params" else t.shape[1:]), t.dtype)
            for kind, tensors in like.items()
            for name, t in tensors.items()
        )

    def _found(self, shapes: Shapes, narrow: Narrow) -> Program:
        """In eager PyTorch: one that was made before, where all that the message function read then is as it was."""
        known = self.programs.setdefault((shapes, narrow), [])
        for place, guarded in enumerate(known):
            if guarded.holds(self.message):
                if place:
                    known.insert(0, known.pop(place))
                return guarded.program
        try:
            known.insert(0, follow(self.message, Asked(self.aggregate, shapes, narrow)))
        except UnsupportedModel as refusal:
            raise (_fails_by_itself(self.message, shapes) or refusal) from refusal.__cause__
        del known[MOST_PROGRAMS:]
        return known[0].program

    def reference(
        self,
        graph: RelGraph,
        nodes: Mapping[str, Tensor],
        params: Mapping[str, Tensor] | None = None,
        edges: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The same edge by edge, as it is written."""
        params, edges = {} if params is None else params, {} if edges is None else edges
        self._refuse_wrong(graph, {"nodes": nodes, "edges": edges, "params": params})
        src, dst = graph.src.long(), graph.dst.long()
        at_src, at_dst = ({n: x[ids] for n, x in nodes.items()} for ids in (src, dst))
        given = {n: x[graph.order] for n, x in edges.items()}
        kinds = () if graph.types is None else [graph.types.to_node.index.long()[ids] for ids in (src, dst)]
        etype = graph.etype.long()
        with softmax_by_edges(dst, etype):
            messages = self.message(*arguments_of(at_src, at_dst, given, params, etype, *kinds))
        if self.aggregate == "mean per relation":
            pair = pair_of(dst, etype)
            messages = messages / torch.bincount(pair)[pair].reshape(-1, *[1] * (messages.dim() - 1))
        if self.aggregate == "max":
            return largest_of(messages, dst, graph.degree)
        total = messages.new_zeros(graph.num_nodes, *messages.shape[1:]).index_add(0, dst, messages)
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
        for kind, given in like.items():
            _refuse_unnamed(kind, given)
        if not isinstance(graph, RelGraph):
            raise BadOption(f"the graph is a {type(graph).__name__}", hint="give a RelGraph(src, dst, etype)")
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


def _refuse_unnamed(kind: str, given: Mapping[str, Tensor]) -> None:
    if not hasattr(given, "items"):
        raise BadOption(f"{kind} is a {type(given).__name__}", hint="give a dictionary: name -> tensor")
    for name, tensor in given.items():
        if not isinstance(name, str):
            raise BadOption(
                f"{kind} has {name!r}", hint="names are texts: the message function reads them as attributes"
            )
        if not isinstance(tensor, Tensor):
            raise BadOption(f"{kind}[{name!r}] is a {type(tensor).__name__}", hint="give a tensor")


def _narrow(graph: RelGraph) -> Narrow:
    device = graph.src.device.type
    return (torch.get_autocast_dtype(device), device) if torch.is_autocast_enabled(device) else None


FEW_EDGES = 61
"""More than a function that takes some of them apart would name, and no usual width."""


def _fails_by_itself(message: Callable[[Any, Any], Tensor], shapes: Shapes) -> BadOption | None:
    """What the function raises where nobody follows it, over a few edges: a name that was not given, sizes that do not fit."""
    given: dict[str, dict[str, Tensor]] = {"nodes": {}, "edges": {}, "params": {}}
    for kind, name, shape, dtype in shapes:
        given[kind][name] = torch.zeros(shape if kind == "params" else (FEW_EDGES, *shape), dtype=dtype)
    ids = torch.zeros(FEW_EDGES, dtype=torch.int64)
    arguments = arguments_of(given["nodes"], given["nodes"], given["edges"], given["params"], ids, ids, ids)
    try:
        with softmax_by_edges(ids, ids), torch.no_grad():
            message(*arguments)
    except (AttributeError, TypeError, RuntimeError) as error:
        where = user_line("".join(traceback.format_tb(error.__traceback__)))
        if isinstance(error, AttributeError) and isinstance(error.obj, Fields):
            what = f"the message function reads {error.name!r}, which is not given"
            return BadOption(what, where=where, hint=f"there are {', '.join(sorted(vars(error.obj))) or 'none'}")
        reason = (str(error).strip().splitlines() or [""])[0]
        return BadOption(f"the message function fails: {type(error).__name__}: {reason}", where=where)
    except Exception:  # of values, which are not those of a graph
        return None
    return None
