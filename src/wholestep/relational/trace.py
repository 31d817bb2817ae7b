"""A message function, traced once: plain PyTorch over edges in, a program over the smallest index spaces out.

In: the function and tensors like those it will be given. It is traced with a number of edges that occurs nowhere else, so that the
dimension of edges is known wherever it is. Out: `Program`, a graph module that takes a RelGraph and the tensors.

What each value depends on says in which space it is computed (`spaces.py`); it is handed to larger ones where it is read. Products
with the matrix of an edge's relation become one product per relation. A product with a vector after one with a matrix becomes one
with their product, which is made once per relation; so does one with a narrow matrix that all relations share. A sum of weighted
messages that are linear in the source is given to `linear_sum`, which chooses the side. What is none of this and not row by row is
refused, with its line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep.errors import UnsupportedModel
from wholestep.relational import spaces
from wholestep.relational.spaces import DOTS, LIFTS, PRODUCTS, Space, joined, pair_space

aten = torch.ops.aten
EDGES = 10_007
"""Of the trace: a prime that no size of a model is a multiple of."""
_VIEWS = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.slice.Tensor, aten.select.int, aten.alias.default, aten.detach.default,
}  # fmt: skip
_UNTAGGED = {aten.leaky_relu.default}
"""Pointwise, though not every torch says so."""
_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten._softmax.default, aten._log_softmax.default}


@dataclasses.dataclass(slots=True)
class Value:
    """A traced value in the program that is being made."""

    node: Any
    """In the new graph."""
    space: Space
    linear: tuple[Value, Value] | None = None
    """It is (first @ second), second a matrix per relation."""


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What was made of a message function."""

    module: fx.GraphModule
    steps: tuple[tuple[str, str], ...]
    """(what, in which space), for people."""

    def __call__(self, *args: Any) -> Tensor:
        out: Tensor = self.module(*args)
        return out


def trace(
    run: Callable[..., Tensor],
    names: Mapping[str, tuple[str, ...]],
    like: Mapping[str, Mapping[str, Tensor]],
    aggregate: str,
) -> Program:
    """`run(src, dst, edge, params, etype, target)` calls the message function; `names` and `like`: what each of them holds."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        rowed = {
            kind: {
                n: torch.empty(EDGES, *like[source][n].shape[1:], dtype=like[source][n].dtype) for n in names[source]
            }
            for kind, source in (("src", "nodes"), ("dst", "nodes"), ("edge", "edges"))
        }
        params = {n: torch.empty(like["params"][n].shape, dtype=like["params"][n].dtype) for n in names["params"]}
        ids = [torch.empty(EDGES, dtype=torch.int64) for _ in range(2)]
        del mode

        def noted(*args: Any) -> Tensor:
            with _Lines(), _Whole():
                return run(*args)

        traced = make_fx(noted, tracing_mode="fake")(rowed["src"], rowed["dst"], rowed["edge"], params, *ids)
    kinds = [
        (kind, n) for kind, source in (("src", "nodes"), ("dst", "nodes"), ("edge", "edges")) for n in names[source]
    ]
    kinds += [("param", n) for n in names["params"]] + [("etype", ""), ("target", "")]
    return _Lowering(names, aggregate).run(traced.graph, kinds)


class _Lowering:
    def __init__(self, names: Mapping[str, tuple[str, ...]], aggregate: str) -> None:
        self.graph, self.aggregate = fx.Graph(), aggregate
        self.lifted: dict[tuple[Any, Space, Space], Any] = {}
        self.table = self.graph.placeholder("graph")
        self.inputs = {
            (kind, n): self.graph.placeholder(f"{kind}_{n}")
            for kind in ("nodes", "edges", "params")
            for n in names[kind]
        }
        self.values: dict[fx.Node, Value] = {}

    def run(self, traced: fx.Graph, kinds: list[tuple[str, str]]) -> Program:
        spaces_of = {"src": Space.SOURCE, "dst": Space.DESTINATION, "edge": Space.EDGE, "param": Space.NONE}
        homes = {"src": "nodes", "dst": "nodes", "edge": "edges", "param": "params"}
        placeholders = [node for node in traced.nodes if node.op == "placeholder"]
        for node, (kind, name) in zip(placeholders, kinds, strict=True):
            if kind in spaces_of:
                self.values[node] = Value(self.inputs[homes[kind], name], spaces_of[kind])
        self.etype, self.target = placeholders[-2:]
        message: Any = next(iter(reversed(list(traced.nodes)))).args[0]
        message = message[0] if isinstance(message, list | tuple) and len(message) == 1 else message
        self.message = message
        for node in traced.nodes:
            if node.op == "call_function":
                self.values[node] = self._lower(node)
            elif node.op == "get_attr":
                raise _refused(node, "it makes a tensor of its own", "give it as a parameter")
        self.graph.output(self._summed(message))
        self.graph.eliminate_dead_code()
        told = (node.meta["told"] for node in self.graph.nodes if "told" in node.meta)
        return Program(fx.GraphModule(torch.nn.Module(), self.graph), tuple(told))

    # ---- one operator ----

    def _lower(self, node: fx.Node) -> Value:
        if node.target is aten.index.Tensor and node.args[1] == [self.etype]:
            return Value(self._read(node.args[0], Space.NONE), Space.RELATION)
        if node.target is aten.index.Tensor and self._is_row_of_id(node.args[1]):
            tables, ids = self._read(node.args[0], Space.NONE), self.values[node.args[1][1]].node  # type: ignore[index]
            return self._made(node, spaces.rows_of_ids, (self.table, tables, ids), Space.SOURCE_PAIR)
        if node.target is torch.ops.ws.edge_softmax.default:
            logits = self.at(self.values[node.args[0]], Space.EDGE)  # type: ignore[index]
            softmax = spaces.softmax_of if len(node.args) == 2 else spaces.softmax_within_relation
            return self._made(node, softmax, (self.table, logits), Space.EDGE)
        if node.target is aten.native_dropout.default:  # made anew, so that a capture sees what it knows
            x = self.values[node.args[0]]  # type: ignore[index]
            space = _drawn_in(x.space)
            return self._made(node, F.dropout, (self.at(x, space), node.args[1]), space)
        if node.target is operator.getitem and node.args[0].target is aten.native_dropout.default:  # type: ignore[union-attr]
            return self.values[node.args[0]]  # type: ignore[index]
        if node.target is aten.bmm.default:
            return self._bmm(node)
        if node.target is torch.ops.ws.head_product.default:
            return self._head_product(node)
        if node.target is aten.mm.default:
            folded = self._shared(node)
            if folded is not None:
                return folded
        if node.target is aten.sum.dim_IntList:
            dotted = self._dot(node)
            if dotted is not None:
                return dotted
        return self._row_by_row(node)

    def _is_row_of_id(self, index: Any) -> bool:
        """p.T[e.type, e.src.id]."""
        if len(index) != 2 or index[0] is not self.etype or index[1] not in self.values:
            return False
        return self.values[index[1]].space is Space.SOURCE

    def _row_by_row(self, node: fx.Node) -> Value:
        """The same operator in the smallest space; dimension 0 is that of rows, or the operator is refused."""
        values = [self.values[n] for n in node.all_input_nodes if n in self.values]
        if len(values) != len(node.all_input_nodes):
            raise _refused(node, "it computes with the ids of relations or nodes", "index parameters by e.type")
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            raise _refused(node, "it writes in place", "make a new tensor")
        space = joined(*(value.space for value in values))
        if _draws(node):
            space = _drawn_in(space)
        if space is not Space.NONE:
            self._refuse_other(node, [value.space is not Space.NONE for value in values])
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.at(self.values[n], space))
        args = tuple(_sized(arg) for arg in args) if space is not Space.NONE else args
        target = node.target
        if target in _RESHAPES and space is not Space.NONE:  # strides of the program's rows are not those of the trace
            target, args = aten.reshape.default, (args[0], [-1, *node.meta["val"].shape[1:]])
        made = self._made(node, target, args, space, kwargs)
        if node.target in _VIEWS and len(values) == 1:
            made.linear = _through_view(node, values[0])
        return made

    def _refuse_other(self, node: fx.Node, rowed: list[bool]) -> None:
        result = node.meta["val"]
        first = result[0] if isinstance(result, list | tuple) else result
        keeps = isinstance(first, Tensor) and first.dim() > 0 and first.shape[0] == EDGES
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _UNTAGGED
        known = node.target in _VIEWS | _REDUCTIONS | {
            aten.mm.default, aten.addmm.default, aten.cat.default, operator.getitem, aten.split.Tensor, aten.clone.default,
            aten.split_with_sizes.default, aten._to_copy.default, aten.unbind.int,
        }  # fmt: skip
        operands = [n.meta["val"] for n in node.all_input_nodes]
        aligned = all(
            not of_rows or not isinstance(t, Tensor) or (t.dim() > 0 and t.shape[0] == EDGES)
            for of_rows, t in zip(rowed, operands, strict=True)
        )
        wide = not pointwise or all(
            t.dim() == first.dim()
            for of_rows, t in zip(rowed, operands, strict=True)
            if of_rows and isinstance(t, Tensor)
        )
        along_edges = node.target in (aten._softmax.default, aten._log_softmax.default) and node.args[1] in (
            0,
            -first.dim(),
        )
        if along_edges or not (keeps and aligned and wide and (pointwise or known or _draws(node))):
            raise _refused(node, "it does not work edge by edge", "keep edges in dimension 0 and leave that alone")

    def _bmm(self, node: fx.Node) -> Value:
        left, right = (self.values[n] for n in node.all_input_nodes)
        if right.space is Space.RELATION and left.space not in (Space.RELATION, Space.NONE):
            return self._by_relation(node, left, right)
        if left.space is Space.RELATION and right.space not in (Space.RELATION, Space.NONE):
            turned = [self._made(node, aten.transpose.int, (v.node, 1, 2), v.space, told=False) for v in (right, left)]
            made = self._by_relation(node, *turned)
            return self._made(node, aten.transpose.int, (made.node, 1, 2), made.space, told=False)
        space = joined(left.space, right.space)
        return self._made(node, aten.bmm.default, (self.at(left, space), self.at(right, space)), space)

    def _by_relation(self, node: fx.Node, rows: Value, matrices: Value) -> Value:
        space = pair_space(rows.space)
        made = self._made(
            node, PRODUCTS[space], (self.table, self.at(rows, space), matrices.node), space, what="product"
        )
        made.linear = (rows, matrices)
        return made

    def _head_product(self, node: fx.Node) -> Value:
        """(edges, heads, m, d) @ (edges, heads, d, k)."""
        left, right = (self.values[n] for n in node.all_input_nodes)
        one_row = node.all_input_nodes[0].meta["val"].shape[2] == 1
        if one_row and right.space is Space.RELATION and left.space not in (Space.RELATION, Space.NONE):
            rows = self._made(node, aten.squeeze.dim, (left.node, 2), left.space, told=False)
            flat = self._by_relation(node, rows, right)
            made = self._made(node, aten.unsqueeze.default, (flat.node, 2), flat.space, told=False)
            made.linear = left, right
            return made
        space = joined(left.space, right.space)
        return self._made(node, torch.matmul, (self.at(left, space), self.at(right, space)), space)

    def _shared(self, node: fx.Node) -> Value | None:
        """(x W[relation]) A = x (W[relation] A), where that is not wider and x W[relation] is not needed itself."""
        left, right = (self.values.get(n) for n in node.args)  # type: ignore[arg-type]
        if left is None or right is None or left.linear is None or right.space is not Space.NONE:
            return None
        wide, narrow = node.args[1].meta["val"].shape  # type: ignore[union-attr]
        others = [user for user in node.args[0].users if user not in (node, self.message)]  # type: ignore[union-attr]
        if narrow > wide or others:
            return None
        rows, before = left.linear
        matrix = self._made(node, torch.matmul, (before.node, right.node), Space.RELATION, what="fold")
        return self._by_relation(node, rows, matrix)

    def _dot(self, node: fx.Node) -> Value | None:
        """(x * v[relation]).sum(-1), as a product with a matrix of one column."""
        source, dims, *keep = node.args
        if not isinstance(source, fx.Node) or source.target is not aten.mul.Tensor or len(source.users) > 1:
            return None
        shape = source.meta["val"].shape
        if list(dims) not in ([-1], [len(shape) - 1]) or keep not in ([], [False]) or "dtype" in node.kwargs:  # type: ignore[arg-type]
            return None
        sides = [self.values[n] for n in source.all_input_nodes if n in self.values]
        same = all(
            n.meta["val"].shape == shape and n.meta["val"].dtype == node.meta["val"].dtype
            for n in source.all_input_nodes
        )
        if len(sides) != 2 or not same:
            return None
        ends = {value.space: value.node for value in sides}
        start = next((space for space in DOTS if space in ends), None)
        if Space.DESTINATION in ends and start is not None and len(shape) in (2, 3):
            return self._made(
                node, DOTS[start], (self.table, ends[Space.DESTINATION], ends[start]), Space.EDGE, what="dot"
            )
        if len(shape) != 2:
            return None
        vectors = [v for v in sides if v.space is Space.RELATION]
        rows = [v for v in sides if v.space not in (Space.RELATION, Space.NONE)]
        if len(vectors) != 1 or len(rows) != 1:
            return None
        matrix = self._made(node, aten.unsqueeze.default, (vectors[0].node, -1), Space.RELATION, told=False)
        left = rows[0]
        if left.linear is not None:  # (x W) v = x (W v): once per relation
            left, before = left.linear
            matrix = self._made(node, aten.bmm.default, (before.node, matrix.node), Space.RELATION, what="fold")
        made = self._by_relation(node, left, matrix)
        flat = self._made(node, aten.squeeze.dim, (made.node, -1), made.space, told=False)
        return flat

    # ---- the sum over edges ----

    def _summed(self, message: Any) -> Any:
        if not isinstance(message, fx.Node) or message.meta["val"].dim() < 1 or message.meta["val"].shape[0] != EDGES:
            raise UnsupportedModel(
                "the message function does not return a tensor with a row per edge", hint="return one"
            )
        value = self.values[message]
        if self.aggregate == "max":
            return self._node("max over edges", spaces.edge_max, (self.table, self.at(value, Space.EDGE)))
        weight, body = self._weighted(message)
        if self.aggregate == "mean per relation":
            weight = self._shared_out(weight, message.meta["val"].dtype)
            return self._sum_of(weight, body)
        total = self._sum_of(weight, body)
        return total if self.aggregate == "sum" else self._node("mean", spaces.mean_of, (self.table, total))

    def _shared_out(self, weight: Any, dtype: torch.dtype) -> Any:
        """The weight of an edge, divided among those of its relation and destination."""
        share = self._node("share", spaces.share_of_pair, (self.table, dtype), space=Space.EDGE)
        return share if weight is None else self._node("share", spaces_unsqueezed_product, (share, weight))

    def _sum_of(self, weight: Any, body: Value) -> Any:
        if body.linear is not None and body.linear[0].space is Space.SOURCE:
            rows, matrices = body.linear
            return self._node(
                "weighted sum of products, per relation on the better side", spaces.linear_sum,
                (self.table, rows.node, matrices.node, weight),
            )  # fmt: skip
        if body.space is Space.SOURCE:
            return self._node("weighted sum", spaces.source_sum, (self.table, body.node, weight))
        if body.space is Space.SOURCE_PAIR:
            return self._node("weighted sum", spaces.source_pair_sum, (self.table, body.node, weight))
        at_edges = self.at(body, Space.EDGE)
        if weight is not None:
            wide = self._node("", spaces_unsqueezed, (weight, at_edges), told=False)
            at_edges = self._node("weight", operator.mul, (at_edges, wide))
        return self._node("sum", spaces.edge_sum, (self.table, at_edges))

    def _weighted(self, message: fx.Node) -> tuple[Any, Value]:
        """The message as (a number per edge, or per edge and head; the rest)."""
        value = self.values[message]
        if message.target is not aten.mul.Tensor:
            return None, value
        shape = message.meta["val"].shape
        for scalar, body in (message.args, message.args[::-1]):
            if not (isinstance(scalar, fx.Node) and isinstance(body, fx.Node)):
                continue
            said, whole = scalar.meta["val"].shape, body.meta["val"].shape
            heads = len(shape) == 3 and said == (EDGES, shape[1], 1)
            one = len(said) == len(shape) and all(n == 1 for n in said[1:])
            if whole == shape and (one or heads) and self.values[scalar].space is not Space.NONE:
                at_edges = self.at(self.values[scalar], Space.EDGE)
                size = (-1, shape[1]) if heads else (-1,)
                flat = self._node("", torch.reshape, (at_edges, size), told=False)
                return flat, self.values[body]
        return None, value

    # ---- nodes ----

    def at(self, value: Value, space: Space) -> Any:
        """The value with the rows of a larger space."""
        if value.space in (space, Space.NONE):
            return value.node
        key = value.node, value.space, space  # one tensor may be that of sources and of destinations
        if key not in self.lifted:
            lift = LIFTS[value.space, space]
            self.lifted[key] = self._node(f"{value.space.value} to {space.value}", lift, (self.table, value.node))
        return self.lifted[key]

    def _read(self, node: Any, space: Space) -> Any:
        value = self.values.get(node)
        if value is None or value.space is not space:
            raise UnsupportedModel(
                "e.type indexes something that is not a parameter", hint="index parameters by e.type"
            )
        return value.node

    def _made(
        self,
        node: fx.Node,
        target: Any,
        args: Any,
        space: Space,
        kwargs: Any = None,
        *,
        what: str = "",
        told: bool = True,
    ) -> Value:
        name = what or getattr(target, "_opname", getattr(target, "__name__", str(target)))
        return Value(self._node(name, target, args, kwargs, told=told and target not in _VIEWS, space=space), space)

    def _node(
        self, what: str, target: Any, args: Any, kwargs: Any = None, *, told: bool = True, space: Space | None = None
    ) -> Any:
        node = self.graph.call_function(target, args, kwargs or {})
        if told and space is not Space.NONE:
            node.meta["told"] = what, "" if space is None else space.value
        return node


def spaces_unsqueezed(weight: Tensor, like: Tensor) -> Tensor:
    """A weight with as many dimensions as what it is multiplied with."""
    return weight.reshape(*weight.shape, *[1] * (like.dim() - weight.dim()))


def spaces_unsqueezed_product(share: Tensor, weight: Tensor) -> Tensor:
    return spaces_unsqueezed(share, weight) * weight


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _drawn_in(space: Space) -> Space:
    """Every edge has a number of its own, whatever its nodes and relation are; a parameter is drawn for as it is."""
    return space if space is Space.NONE else Space.EDGE


def _sized(argument: Any) -> Any:
    """Sizes with the number of edges first are those of any number of rows."""
    if isinstance(argument, list | tuple) and argument and argument[0] == EDGES and isinstance(argument[0], int):
        return [-1, *argument[1:]]
    return argument


def _through_view(node: fx.Node, value: Value) -> tuple[Value, Value] | None:
    """Linearity through views that change nothing, and through squeeze(1) of a product of one row each."""
    if value.linear is None:
        return None
    rows, matrices = value.linear
    source = node.all_input_nodes[0].meta["val"]
    if source.shape == node.meta["val"].shape and node.target not in (aten.permute.default, aten.transpose.int):
        return value.linear
    if source.dim() == 3 and source.shape[1] == 1 and node.meta["val"].shape == (EDGES, source.shape[2]):
        flat = rows.node.graph.call_function(aten.squeeze.dim, (rows.node, 1))
        return Value(flat, rows.space), matrices
    if (
        source.dim() == 4
        and source.shape[2] == 1
        and node.meta["val"].shape == (EDGES, source.shape[1], source.shape[3])
    ):
        flat = rows.node.graph.call_function(aten.squeeze.dim, (rows.node, 2))
        return Value(flat, rows.space), matrices
    return None


def _refused(node: fx.Node, what: str, hint: str) -> UnsupportedModel:
    return UnsupportedModel(f"{node.target} in the message function: {what}", where=node.meta.get("line"), hint=hint)


class _Whole(TorchFunctionMode):
    """Stay one operator: (edges, heads, m, d) @ (edges, heads, d, k), whose parts no longer have edges in dimension 0, and dropout,
    whose parts write in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__) and len(args) == 2:
            left, right = args
            if left.dim() == right.dim() == 4 and left.shape[:2] == right.shape[:2] and left.shape[0] == EDGES:
                return torch.ops.ws.head_product(left, right)
        return func(*args, **(kwargs or {}))

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if inplace or not training or not 0 < p <= 1:
            return F.dropout(x, p, training, inplace)
        return torch.native_dropout(x, p, True)[0]


class _Lines(TorchDispatchMode):
    """Every traced node gets the line of the user's that made it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, mode = func(*args, **(kwargs or {})), get_proxy_mode()
        if mode is not None:
            node = next(iter(reversed(mode.tracer.graph.nodes)))
            node.meta.setdefault("line", _users_line())
        return out


def _users_line() -> str | None:
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THEIRS):
        frame = frame.f_back
    return None if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), contextlib.__file__)
