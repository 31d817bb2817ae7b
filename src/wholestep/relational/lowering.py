"""A traced message function, lowered to a program over the smallest index spaces.

In: `Traced`, operators over edges. Out: `Program`, a graph module that takes a RelGraph and the tensors.

What each value depends on says in which space it is computed (`spaces.py`); it is handed to larger ones where it is read. Products
with the matrix of an edge's relation, or of a node's type, become one product per group of rows. A product with a vector after one
with a relation's matrix becomes one with their product, which is made once per relation; so does one with a narrow matrix that all
relations share. A sum of weighted messages that are linear in the source is given to `linear_sum`, which chooses the side. What is
none of this and not row by row is refused, with its line.

A traced value with edges in dimension 0 has rows of some space; any other is `Space.NONE` and no size of it counts edges.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from wholestep.errors import UnsupportedModel
from wholestep.relational import spaces
from wholestep.relational.by_rows import CONSTANTS, RESHAPES, VIEWS, counted, draws, has_rows, works_by_rows
from wholestep.relational.spaces import GROUPS, Space, joined
from wholestep.relational.trace import Traced, refused

aten = torch.ops.aten
_SQUEEZES = {aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default}
_UNTOLD = VIEWS | {spaces.tail_reshaped, spaces.one_row_each, Tensor.detach, Tensor.to, operator.getitem}
_HALF = (torch.bfloat16, torch.float16)
_HOMES = {"src": "nodes", "dst": "nodes", "edge": "edges", "param": "params"}
_SPACES = {
    "src": Space.SOURCE, "dst": Space.DESTINATION, "edge": Space.EDGE, "param": Space.NONE, "relation": Space.RELATION,
    "source type": Space.SOURCE_TYPE, "destination type": Space.DESTINATION_TYPE,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Linear:
    """A product (rows @ matrices) with a matrix per relation, up to dimensions of size one."""

    rows: Value
    matrices: Value
    tail: tuple[int, ...]
    """Its sizes without edges: (k,), or (m, k) for m rows or heads."""


@dataclasses.dataclass(slots=True)
class Value:
    """A traced value in the program that is being made."""

    node: Any
    """In the new graph."""
    space: Space
    linear: Linear | None = None
    numbers: bool = False
    """The relations or types themselves: what they index is the whole table, a row each."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What was made of a message function."""

    module: fx.GraphModule
    """Its nodes say in meta["told"] what they do, and in which space."""

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """(what, in which space), for people."""
        told = (node.meta["told"] for node in self.module.graph.nodes if "told" in node.meta)
        return tuple((what, "" if space is None else space.value) for what, space in told)


def lower(traced: Traced, aggregate: str) -> Program:
    return _Lowering(traced, aggregate).run()


class _Lowering:
    def __init__(self, traced: Traced, aggregate: str) -> None:
        self.traced, self.edges, self.aggregate = traced, traced.edges, aggregate
        self.graph = fx.Graph()
        self.table = self.graph.placeholder("graph")
        self.lifted: dict[tuple[Any, Space, Space], Any] = {}
        self.values: dict[fx.Node, Value] = {}

    def run(self) -> Program:
        nodes = list(self.traced.graph.nodes)
        self._inputs([node for node in nodes if node.op == "placeholder"])
        message: Any = nodes[-1].args[0]
        self.message = message[0] if isinstance(message, list | tuple) and len(message) == 1 else message
        for node in nodes:
            if node.op == "call_function":
                self.values[node] = self._lower(node)
            elif node.op == "get_attr":
                raise refused(node, "it makes a tensor of its own", "give it as a parameter")
        self.graph.output(self._summed(self.message))
        self.graph.eliminate_dead_code()
        return Program(fx.GraphModule(torch.nn.Module(), self.graph))

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

    # ---- products ----

    def _bmm(self, node: fx.Node) -> Value:
        nodes = node.args
        left, right = (self.values[n] for n in nodes)  # type: ignore[index]
        if right.space in GROUPS and left.space not in (Space.ONE, right.space):
            if nodes[0].meta["val"].shape[1] != 1:  # type: ignore[union-attr]
                return self._grouped(node, left, right, tuple(node.meta["val"].shape[1:]))
            rows = self._made(
                node, spaces.tail_reshaped, (left.node, [nodes[0].meta["val"].shape[2]]), left.space, told=False
            )  # type: ignore[union-attr]
            return self._shaped(node, self._grouped(node, rows, right, (node.meta["val"].shape[2],)))
        if left.space in GROUPS and right.space not in (Space.ONE, left.space):
            turned = [self._made(node, aten.transpose.int, (v.node, 1, 2), v.space, told=False) for v in (right, left)]
            made = self._grouped(node, turned[0], turned[1], ())
            return self._made(node, aten.transpose.int, (made.node, 1, 2), made.space, told=False)
        space = joined(left.space, right.space)
        return self._made(node, aten.bmm.default, (self.at(left, space), self.at(right, space)), space)

    def _grouped(self, node: fx.Node, rows: Value, matrices: Value, tail: tuple[int, ...]) -> Value:
        """Every row times its group's matrix; `tail`: sizes of the result without edges, or () where it is turned afterwards."""
        space = joined(rows.space, matrices.space)
        args = self.table, rows.node, matrices.node, rows.space, space, matrices.space
        made = self._made(node, spaces.product_of, args, space, what="product")
        if matrices.space is Space.RELATION and tail:
            made.linear = Linear(rows, matrices, tail)
        return made

    def _shaped(self, node: fx.Node, value: Value) -> Value:
        """With the dimensions that the traced value has."""
        made = self._made(
            node, spaces.tail_reshaped, (value.node, list(node.meta["val"].shape[1:])), value.space, told=False
        )
        made.linear = value.linear
        return made

    def _matmul(self, node: fx.Node) -> Value:
        """Products of more than two dimensions; (edges, heads, 1, d) @ (edges, heads, d, k) is one by relation and head."""
        nodes = node.args
        left, right = (self.values[n] for n in nodes)  # type: ignore[index]
        dims = [n.meta["val"].dim() for n in nodes]  # type: ignore[union-attr]
        rowed = [dim for dim, value in zip(dims, (left, right), strict=True) if value.space is not Space.NONE]
        if not has_rows(node.meta["val"], self.edges) or any(dim != max(dims) for dim in rowed):
            raise refused(node, "it does not work edge by edge", "keep edges in dimension 0 and leave that alone")
        shape = nodes[0].meta["val"].shape  # type: ignore[union-attr]
        in_groups = right.space in GROUPS and left.space not in (Space.ONE, Space.NONE, right.space)
        if dims == [4, 4] and in_groups and shape[2] == 1 and shape[1] == nodes[1].meta["val"].shape[1]:  # type: ignore[union-attr]
            rows = self._made(node, spaces.tail_reshaped, (left.node, [shape[1], shape[3]]), left.space, told=False)
            tail = node.meta["val"].shape[1], node.meta["val"].shape[3]
            return self._shaped(node, self._grouped(node, rows, right, tail))
        space = joined(left.space, right.space)
        return self._made(node, torch.matmul, (self.at(left, space), self.at(right, space)), space)

    def _einsum(self, node: fx.Node) -> Value:
        equation, nodes = node.args
        values = [self.values[n] for n in nodes]  # type: ignore[union-attr]
        terms, _, result = str(equation).replace(" ", "").partition("->")
        letters = {t[:1] for t, value in zip(terms.split(","), values, strict=True) if value.space is not Space.NONE}
        if not has_rows(node.meta["val"], self.edges) or "..." in terms or letters != {result[:1]}:
            raise refused(
                node, "it does not work edge by edge", "name edges first in the result and where they are given"
            )
        space = joined(*(value.space for value in values))
        return self._made(node, torch.einsum, (equation, *(self.at(value, space) for value in values)), space)

    def _shared(self, node: fx.Node) -> Value | None:
        """(x W[relation]) A = x (W[relation] A), where that is not wider and x W[relation] is not needed itself."""
        left, right = (self.values[n] for n in node.args)  # type: ignore[index]
        if left.linear is None or len(left.linear.tail) != 1 or right.space is not Space.NONE:
            return None
        wide, narrow = node.args[1].meta["val"].shape  # type: ignore[union-attr]
        others = [user for user in node.args[0].users if user not in (node, self.message)]  # type: ignore[union-attr]
        if narrow > wide or others:
            return None
        matrix = self._made(node, torch.matmul, (left.linear.matrices.node, right.node), Space.RELATION, what="fold")
        return self._grouped(node, left.linear.rows, matrix, (narrow,))

    def _dot(self, node: fx.Node) -> Value | None:
        """(x * v[relation]).sum(-1), as a product with a matrix of one column; <x, y> of nodes at both ends, without their rows."""
        source, dims, *keep = node.args
        if (
            not isinstance(source, fx.Node)
            or source.target is not aten.mul.Tensor
            or len(source.users) > 1
            or node.kwargs
        ):
            return None
        shape, sides = source.meta["val"].shape, source.all_input_nodes
        if list(dims) not in ([-1], [len(shape) - 1]) or keep not in ([], [False]) or len(sides) != 2:  # type: ignore[arg-type]
            return None
        if any(n.meta["val"].shape != shape for n in sides) or not source.meta["val"].is_floating_point():
            return None
        made = self._dot_of_ends(node, sides)
        if made is not None or len(shape) != 2:
            return made
        vectors = [n for n in sides if self.values[n].space is Space.RELATION]
        rows = [n for n in sides if self.values[n].space not in (Space.RELATION, Space.NONE, Space.ONE)]
        if len(vectors) != 1 or len(rows) != 1:
            return None
        kind = rows[0].meta["val"].dtype
        if kind not in (source.meta["val"].dtype, *_HALF):
            return None
        vector = self._made(node, Tensor.to, (self.values[vectors[0]].node, kind), Space.RELATION, told=False)
        matrix = self._made(node, aten.unsqueeze.default, (vector.node, -1), Space.RELATION, told=False)
        left = self.values[rows[0]]
        if left.linear is not None and len(left.linear.tail) == 1:  # (x W) v = x (W v): once per relation
            before, left = left.linear.matrices, left.linear.rows
            matrix = self._made(node, aten.bmm.default, (before.node, matrix.node), Space.RELATION, what="fold")
        if left.space in (Space.SOURCE, Space.DESTINATION):
            vector = self._made(node, aten.squeeze.dim, (matrix.node, -1), Space.RELATION, told=False)
            space = joined(left.space, Space.RELATION)
            made = self._made(
                node, spaces.dot_with_relations, (self.table, left.node, vector.node, space), space, what="dot"
            )
        else:
            made = self._shaped(node, self._grouped(node, left, matrix, (1,)))
        if kind is node.meta["val"].dtype:
            return made
        return self._made(node, Tensor.to, (made.node, node.meta["val"].dtype), made.space, told=False)

    def _dot_of_ends(self, node: fx.Node, sides: list[fx.Node]) -> Value | None:
        ends = {self.values[n].space: n for n in sides if n.meta["val"].dtype is node.meta["val"].dtype}
        start = next((space for space in spaces.DOTS if space in ends), None)
        if start is None or Space.DESTINATION not in ends or node.meta["val"].dim() > 2:
            return None
        destination, other = self.values[ends[Space.DESTINATION]], self.values[ends[start]]
        linear = other.linear
        alone = linear is not None and len(ends[start].users) == 1 and linear.rows.space is Space.SOURCE
        if linear is not None and alone and linear.tail == tuple(ends[start].meta["val"].shape[1:]):
            args = self.table, destination.node, linear.rows.node, linear.matrices.node
            return self._made(node, spaces.linear_dot, args, Space.EDGE, what="dot, the product on the better side")
        return self._made(node, spaces.DOTS[start], (self.table, destination.node, other.node), Space.EDGE, what="dot")

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
            args = self.table, linear.rows.node, linear.matrices.node, weight
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
            if body.meta["val"].dtype not in (whole.dtype, *_HALF) or self.values[body].space is Space.NONE:
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

    # ---- nodes ----

    def at(self, value: Value, space: Space) -> Any:
        """The value with the rows of a larger space."""
        if value.space in (space, Space.NONE):
            return value.node
        key = value.node, value.space, space  # one tensor may be that of sources and of destinations
        if key not in self.lifted:
            what = f"{value.space.value} to {space.value}"
            self.lifted[key] = self._node(what, spaces.lift, (self.table, value.node, value.space, space), space=space)
        return self.lifted[key]

    def _made(
        self, node: fx.Node, target: Any, args: Any, space: Space, kwargs: Any = None, *, what: str = "", told: bool = True
    ) -> Value:  # fmt: skip
        name = what or getattr(target, "_opname", getattr(target, "__name__", str(target)))
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:  # that of the trace
            kwargs["device"] = self._node("", spaces.device_of, (self.table,), told=False)
        return Value(self._node(name, target, args, kwargs, told=told and target not in _UNTOLD, space=space), space)

    def _node(
        self, what: str, target: Any, args: Any, kwargs: Any = None, *, told: bool = True, space: Space | None = None
    ) -> Any:
        node = self.graph.call_function(target, args, kwargs or {})
        if told and space is not Space.NONE:
            node.meta["told"] = what, space
        return node


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
