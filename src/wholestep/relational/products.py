"""Products and dots of a message function: with the matrix or vector of an edge's relation or of a node's type, and of both ends.

Products become one per group of rows. A product with a vector after one with a relation's matrix becomes one with their product,
which is made once per relation; so does one with a narrow matrix that all relations share.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from wholestep.relational import spaces
from wholestep.relational.by_rows import RESHAPES, has_rows
from wholestep.relational.program import HALF, Building, Linear, Value
from wholestep.relational.spaces import GROUPS, Space, joined
from wholestep.relational.trace import refused

aten = torch.ops.aten


_ONES = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default}


def before_views(node: Any) -> fx.Node:
    """What has the same numbers in the same order, before dimensions of size one came and went."""
    while node.target in _ONES:
        before, after = ([size for size in n.meta["val"].shape if size != 1] for n in (node.args[0], node))
        if before != after:
            break
        node = node.args[0]
    return node  # type: ignore[no-any-return]


class Products(Building):
    """Each takes a traced node; None: it is not of the kind."""

    def _bmm(self, node: fx.Node) -> Value:
        nodes = node.args
        left, right = (self.values[n] for n in nodes)  # type: ignore[index]
        if node.meta["val"].is_complex():  # kernels know real numbers
            return self._each_by_its_own(node, left, right)
        if right.space in GROUPS and left.space not in (Space.ONE, right.space):
            if nodes[0].meta["val"].shape[1] != 1:  # type: ignore[union-attr]
                return self._grouped(node, left, right, tuple(node.meta["val"].shape[1:]))
            given = before_views(nodes[0])
            if given.meta["val"].dim() == 2:  # the very rows: what else reads them, reads the same
                rows = self.values[given]
            else:
                rows = self._made(
                    node, spaces.tail_reshaped, (left.node, [nodes[0].meta["val"].shape[2]]), left.space, told=False
                )  # type: ignore[union-attr]
            return self._shaped(node, self._grouped(node, rows, right, (node.meta["val"].shape[2],)))
        if left.space in GROUPS and right.space not in (Space.ONE, left.space):
            turned = [self._made(node, aten.transpose.int, (v.node, 1, 2), v.space, told=False) for v in (right, left)]
            made = self._grouped(node, turned[0], turned[1], ())
            return self._made(node, aten.transpose.int, (made.node, 1, 2), made.space, told=False)
        return self._each_by_its_own(node, left, right)

    def _each_by_its_own(self, node: fx.Node, left: Value, right: Value) -> Value:
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
        in_groups = in_groups and not node.meta["val"].is_complex()  # kernels know real numbers
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
        if kind not in (source.meta["val"].dtype, *HALF):
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

    def _join_dots(self) -> None:
        """Dots of the same nodes with relations, as sources and as destinations, become one; when the program is whole."""
        place = {node: number for number, node in enumerate(self.graph.nodes)}
        seen: dict[Any, fx.Node] = {}
        for late in [node for node in place if node.target is spaces.dot_with_relations]:
            nodes, space = late.args[1], late.args[3]
            early = seen.setdefault(nodes, late)
            if early.args[3] is space or any(place[user] < place[late] for user in early.users):
                continue  # of one side, or read too early
            sides = {dot.args[3]: dot for dot in (early, late)}
            with self.graph.inserting_before(late):
                vectors = [sides[side].args[2] for side in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR)]
                both = self.graph.call_function(spaces.dots_with_relations, (self.table, nodes, *vectors))
                both.meta["told"] = "dots with relations of both sides", Space.SOURCE
                for number, side in enumerate((Space.SOURCE_PAIR, Space.DESTINATION_PAIR)):
                    part = self.graph.call_function(operator.getitem, (both, number))
                    sides[side].replace_all_uses_with(part)
            del seen[nodes]
        self.graph.eliminate_dead_code()

    def _dot_of_ends(self, node: fx.Node, sides: list[fx.Node]) -> Value | None:
        ends = {self.values[n].space: n for n in sides if n.meta["val"].dtype is node.meta["val"].dtype}
        start = next((space for space in spaces.DOTS if space in ends), None)
        if start is None or Space.DESTINATION not in ends or node.meta["val"].dim() > 2:
            return None
        destination, other = self.values[ends[Space.DESTINATION]], self.values[ends[start]]
        linear = other.linear
        alone = linear is not None and len(ends[start].users) == 1 and linear.rows.space is Space.SOURCE
        if linear is not None and alone and linear.tail == tuple(ends[start].meta["val"].shape[1:]):
            args = self.table, destination.node, linear.rows.node, linear.matrices.node, self.on_gpu
            return self._made(node, spaces.linear_dot, args, Space.EDGE, what="dot, the product on the better side")
        return self._made(node, spaces.DOTS[start], (self.table, destination.node, other.node), Space.EDGE, what="dot")
