"""A traced message function, lowered to a program over the smallest index spaces.

In: `Traced`, operators over edges. Out: `Program`, a graph module that takes a RelGraph and the tensors.

What each value depends on says in which space it is computed (`spaces.py`); it is handed to larger ones where it is read. Products
with the matrix of an edge's relation, or of a node's type, become one product per group of rows (`products.py`). A sum of weighted
messages that are linear in the source is given to `linear_sum`, which chooses the side. What is none of this and not row by row is
refused, with its line.

A traced value with edges in dimension 0 has rows of some space; any other is `Space.NONE` and no size of it counts edges.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from wholestep.errors import UnsupportedModel
from wholestep.relational import spaces
from wholestep.relational.by_rows import CONSTANTS, RESHAPES, VIEWS, counted, draws, has_rows, works_by_rows
from wholestep.relational.products import Products
from wholestep.relational.program import HALF, Linear, Program, Value
from wholestep.relational.spaces import Space, joined
from wholestep.relational.trace import Traced, refused

aten = torch.ops.aten
_SQUEEZES = {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
_HOMES = {"src": "nodes", "dst": "nodes", "edge": "edges", "param": "params"}
_SPACES = {
    "src": Space.SOURCE, "dst": Space.DESTINATION, "edge": Space.EDGE, "param": Space.NONE, "relation": Space.RELATION,
    "source type": Space.SOURCE_TYPE, "destination type": Space.DESTINATION_TYPE,
}  # fmt: skip


MOST_WRITTEN = 4096
"""Numbers of a constant that become part of the program's text."""


def lower(traced: Traced, aggregate: str, *, on_gpu: bool) -> Program:
    """`on_gpu`: it is for a GPU, whatever its tensors are on; else they tell."""
    return _Lowering(traced, aggregate, on_gpu).run()


class _Lowering(Products):
    def __init__(self, traced: Traced, aggregate: str, on_gpu: bool) -> None:
        super().__init__(traced, on_gpu)
        self.aggregate = aggregate

    def run(self) -> Program:
        nodes = list(self.traced.graph.nodes)
        self._inputs([node for node in nodes if node.op == "placeholder"])
        message: Any = nodes[-1].args[0]
        self.message = message[0] if isinstance(message, list | tuple) and len(message) == 1 else message
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._lower(node)
            elif node.op == "get_attr":
                self.values[node] = self._written_out(node)
        self.graph.output(self._summed(self.message))
        self.graph.eliminate_dead_code()
        self._join_dots()
        return Program(fx.GraphModule(torch.nn.Module(), self.graph))

    def _written_out(self, node: fx.Node) -> Value:
        """A tensor of numbers that stand in the function, or of a list that it indexes with."""
        tensor = node.meta.get("constant")
        if not isinstance(tensor, Tensor) or tensor.numel() > MOST_WRITTEN or counted(tensor.shape, self.edges):
            raise refused(node, "it makes a large tensor of its own", "give it as a parameter")
        args = self.table, tensor.tolist(), tensor.dtype
        return self._made(node, spaces.written_out, args, Space.NONE)

    def _inputs(self, placeholders: list[fx.Node]) -> None:
        pairs = list(zip(placeholders, self.traced.inputs, strict=True))
        places = dict.fromkeys((_HOMES[kind], name) for _, (kind, name) in pairs if kind in _HOMES)
        # by number: fx takes names for one that differ in their capitals only
        homes = {place: self.graph.placeholder(f"input_{number}") for number, place in enumerate(places)}
        for node, (kind, name) in pairs:
            if kind in _HOMES:
                self.values[node] = Value(homes[_HOMES[kind], name], _SPACES[kind])
            elif kind in _SPACES:
                numbers = self.graph.call_function(spaces.numbers_of, (self.table, _SPACES[kind]))
                self.values[node] = Value(numbers, _SPACES[kind], numbers=True)
        self.names = {self.values[node].node: f"params[{name!r}]" for node, (kind, name) in pairs if kind == "param"}

    # ---- one operator ----

    def _lower(self, node: fx.Node) -> Value:
        target, first = node.target, node.args[0] if node.args else None
        if target is torch.ops.ws.edge_softmax.default:
            return self._softmax(node)
        if target is aten.native_dropout.default:  # made anew, so that a capture sees what it knows
            if node.args[2] not in (True, None):
                raise refused(node, "it drops nothing", "leave it out")
            x = self.values[first]  # type: ignore[index]
            space = _drawn_in(x.space)
            return self._made(node, F.dropout, (self.at(x, space), node.args[1]), space)
        if target is operator.getitem and first.target is aten.native_dropout.default:  # type: ignore[union-attr]
            if node.args[1] != 0:
                raise refused(node, "dropout keeps what was dropped to itself", "draw with torch.rand_like")
            return self.values[first]  # type: ignore[index]
        self._refuse_unknown(node)
        if target is aten.lift_fresh_copy.default:
            return self.values[first]  # type: ignore[index]
        if target is aten._conj.default:  # numbers, not a mark on them, which is lost where kernels read memory
            x = self.values[first]  # type: ignore[index]
            return self._made(node, aten.conj_physical.default, (x.node,), x.space)
        if "val" not in node.meta:  # a check that returns nothing
            return self._checked(node)
        if target is aten.index.Tensor:
            return self._index(node, first, node.args[1])
        if target is aten.embedding.default and len(node.args) == 2 and not node.kwargs:
            return self._index(node, first, [node.args[1]])
        if target is aten.index_select.default and node.args[1] == 0:
            return self._index(node, first, [node.args[2]])
        if target is torch.ops.ws.row_einsum.default:
            return self._einsum(node)
        if target is torch.ops.ws.row_matmul.default:
            return self._matmul(node)
        if target is aten.bmm.default and has_rows(node.meta["val"], self.edges):
            return self._bmm(node)
        rewritten = {aten.mm.default: self._shared, aten.sum.dim_IntList: self._dot}.get(target)  # type: ignore[arg-type]
        made = None if rewritten is None else rewritten(node)
        return self._row_by_row(node) if made is None else made

    def _checked(self, node: fx.Node) -> Value:
        space = joined(*(self.values[n].space for n in node.all_input_nodes))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.at(self.values[n], space))
        return self._made(node, node.target, args, space, kwargs, told=False)

    def _refuse_unknown(self, node: fx.Node) -> None:
        if any(n not in self.values for n in node.all_input_nodes):
            raise refused(node, "it computes with the number of an edge's destination", "read e.dst.x or e.dst.type")
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            raise refused(node, "it writes in place", "make a new tensor")
        if node.target is aten.as_strided.default:
            raise refused(node, "it reads memory as it lies", "use reshape, slices or permute")

    def _row_by_row(self, node: fx.Node) -> Value:
        """The same operator in the smallest space; dimension 0 is that of rows, or the operator is refused."""
        values = [self.values[n] for n in node.all_input_nodes]
        space = joined(*(value.space for value in values))
        if node.target in CONSTANTS and self._is_constant(node, space):
            return self._constant(node)
        if draws(node):
            space = _drawn_in(space)
        if space is Space.NONE:
            return self._without_rows(node)
        if not works_by_rows(
            node, {n for n in node.all_input_nodes if self.values[n].space is not Space.NONE}, self.edges
        ):
            raise refused(node, "it does not work edge by edge", "keep edges in dimension 0 and leave that alone")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.at(self.values[n], space))
        target: Any = node.target
        if target in RESHAPES | _SQUEEZES:  # the program's rows may be one, and lie in memory otherwise
            target, args = spaces.tail_reshaped, (args[0], list(node.meta["val"].shape[1:]))
        elif target is aten.expand.default:
            args = args[0], [-1, *node.meta["val"].shape[1:]]
        elif target is aten.slice.Tensor and (node.args[1] if len(node.args) > 1 else 0) in (
            0,
            -node.meta["val"].dim(),
        ):
            return values[0]  # all rows
        elif target is aten.copy.default:  # which has no derivative
            target = spaces.in_the_place_of
        elif target is aten.detach.default:
            target = Tensor.detach
        self._refuse_numbers(node, args)
        made = self._made(node, target, args, space, kwargs)
        if node.target in VIEWS:
            made.linear = _through_view(node, values[0])
        return made

    def _without_rows(self, node: fx.Node) -> Value:
        self._refuse_numbers(node, node.args)
        results = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
        if any(isinstance(t, Tensor) and counted(t.shape, self.edges) for t in results):
            raise refused(node, "it makes a row for every edge out of nothing", "use torch.zeros_like, or a parameter")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].node)
        if node.target in RESHAPES:  # parameters may lie in memory otherwise
            return self._made(node, aten.reshape.default, args, Space.NONE)
        return self._made(node, node.target, args, Space.NONE, kwargs)

    def _refuse_numbers(self, node: fx.Node, args: Any) -> None:
        found: list[int] = []
        tree_map_only(int, found.append, (args, dict(node.kwargs)))
        if counted(found, self.edges):
            raise refused(node, "it computes with the number of edges", "which no message function may know")

    # ---- the same for all edges ----

    def _is_constant(self, node: fx.Node, space: Space) -> bool:
        made_of = node.target is not aten.expand.default or space is Space.NONE
        return made_of and has_rows(node.meta["val"], self.edges)

    def _constant(self, node: fx.Node) -> Value:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n].node)
        size = [1, *node.meta["val"].shape[1:]]
        place = CONSTANTS[node.target]  # type: ignore[index]
        self._refuse_numbers(node, args[place + 1 :])
        return self._made(node, node.target, (*args[:place], size, *args[place + 1 :]), Space.ONE, kwargs)

    # ---- rows of tables ----

    def _index(self, node: fx.Node, table: Any, indices: Any) -> Value:
        base, places = self.values[table], [None if n is None else self.values[n] for n in indices]
        if base.space is not Space.NONE:
            if places[0] is None and all(place is None or place.space is Space.NONE for place in places):
                if has_rows(node.meta["val"], self.edges):
                    return self._made(node, aten.index.Tensor, (base.node, [p and p.node for p in places]), base.space)
            raise refused(node, "it takes rows of what has a row per edge", "index parameters")
        first = places[0]
        if len(places) == 1 and first is not None and first.numbers:
            name = self.names.get(base.node, "what is indexed by e.type")
            args = (self.table, base.node, first.space, name)
            return self._made(node, spaces.one_row_each, args, first.space, told=False)
        space = joined(*(place.space for place in places if place is not None))
        if space is Space.NONE:
            return self._without_rows(node)
        deep = max(n.meta["val"].dim() for n in indices if n is not None)
        rowed = [n for n, p in zip(indices, places, strict=True) if p is not None and p.space is not Space.NONE]
        if not has_rows(node.meta["val"], self.edges) or any(n.meta["val"].dim() != deep for n in rowed):
            raise refused(node, "its result has no row per edge", "index the first dimension of a parameter")
        at = [None if place is None else self.at(place, space) for place in places]
        return self._made(node, aten.index.Tensor, (base.node, at), space, what="rows by number")

    # ---- over the edges of a node ----

    def _softmax(self, node: fx.Node) -> Value:
        logits = self.values[node.args[0]]  # type: ignore[index]
        if not has_rows(node.args[0].meta["val"], self.edges):  # type: ignore[union-attr]
            raise refused(node, "its logits have no row per edge", "give a number, or one per head, for every edge")
        args = self.table, self.at(logits, Space.EDGE), len(node.args) == 3
        return self._made(node, spaces.softmax_of, args, Space.EDGE)

    def _summed(self, message: Any) -> Any:
        if not isinstance(message, fx.Node) or not has_rows(message.meta["val"], self.edges):
            raise UnsupportedModel(
                "the message function does not return a tensor with a row per edge", hint="return one"
            )
        value, kind = self.values[message], message.meta["val"].dtype
        if not kind.is_floating_point:
            raise UnsupportedModel(f"the message function returns {kind}", hint="return floating-point numbers")
        if self.aggregate == "max":
            return self._node("max over edges", spaces.edge_max, (self.table, self.at(value, Space.EDGE)))
        weight, body = self._weighted(message)
        if self.aggregate == "mean per relation":
            share = self._node("share", spaces.share_of_pair, (self.table, kind), space=Space.EDGE)
            weight = share if weight is None else self._node("share", spaces.times_each, (share, weight))
        total = self._node(
            "", Tensor.to, (self._sum_of(weight, body, message), kind), told=False
        )  # autocast: half a body
        return total if self.aggregate != "mean" else self._node("mean", spaces.mean_of, (self.table, total))

    def _sum_of(self, weight: Any, body: Value, message: fx.Node) -> Any:
        linear = body.linear
        if linear is not None and linear.rows.space is Space.SOURCE:
            args = self.table, linear.rows.node, linear.matrices.node, weight, self.on_gpu
            total = self._node(spaces.LINEAR_SUM, spaces.linear_sum, args)
            return self._node("", spaces.tail_reshaped, (total, list(message.meta["val"].shape[1:])), told=False)
        if body.space is Space.SOURCE:
            return self._node("weighted sum", spaces.source_sum, (self.table, body.node, weight))
        if body.space is Space.SOURCE_PAIR:
            return self._node("weighted sum", spaces.source_pair_sum, (self.table, body.node, weight))
        at_edges = self.at(body, Space.EDGE)
        if weight is not None:
            at_edges = self._node("weight", spaces.times_each, (weight, at_edges), space=Space.EDGE)
        return self._node("sum", spaces.edge_sum, (self.table, at_edges))

    def _weighted(self, message: fx.Node) -> tuple[Any, Value]:
        """The message as (a number per edge, or per edge and head; the rest)."""
        if message.target is not aten.mul.Tensor:
            return None, self.values[message]
        whole = message.meta["val"]
        for scalar, body in (message.args, message.args[::-1]):
            if not (isinstance(scalar, fx.Node) and isinstance(body, fx.Node)):
                continue
            weight, shape = self.values[scalar], scalar.meta["val"].shape
            one = len(shape) == whole.dim() and all(size == 1 for size in shape[1:])
            heads = whole.dim() == 3 and shape == (self.edges, whole.shape[1], 1)
            if weight.space is Space.NONE or not (one or heads) or body.meta["val"].shape != whole.shape:
                continue
            if body.meta["val"].dtype not in (whole.dtype, *HALF) or self.values[body].space is Space.NONE:
                continue
            rest = self.values[body]
            if rest.linear is None and self.values[message].space is rest.space:
                continue  # it is where the rest is
            if rest.linear is not None and not one and rest.linear.tail != tuple(whole.shape[1:]):
                rest = Value(rest.node, rest.space)  # heads are not rows of that product
            flat = self._node(
                "", spaces.tail_reshaped, (self.at(weight, Space.EDGE), [] if one else [whole.shape[1]]), told=False
            )
            return self._node("", Tensor.to, (flat, whole.dtype), told=False), rest
        return None, self.values[message]


def _drawn_in(space: Space) -> Space:
    """Every edge has a number of its own, whatever its nodes and relation are; a parameter is drawn for as it is."""
    return space if space is Space.NONE else Space.EDGE


def _through_view(node: fx.Node, value: Value) -> Linear | None:
    """Linearity through views that move nothing but dimensions of size one."""
    if value.linear is None or node.target is aten.detach.default:
        return None
    before, after = (tuple(t.shape) for t in (node.all_input_nodes[0].meta["val"], node.meta["val"]))
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    if node.target in (aten.permute.default, aten.transpose.int):
        order = torch.empty(before, device="meta").permute(*_order_of(node, len(before))).stride()
        kept = [stride for stride, size in zip(order, after, strict=True) if size != 1]
        if kept != sorted(kept, reverse=True):
            return None
    return value.linear


def _order_of(node: fx.Node, dims: int) -> list[int]:
    if node.target is aten.permute.default:
        return list(node.args[1])  # type: ignore[arg-type]
    order = list(range(dims))
    one, other = node.args[1:3]
    order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return order
