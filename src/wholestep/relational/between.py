"""Dots of both ends of an edge with its relation's matrix between them, where relations take different sides.

<destination, source @ W> is a dot of the destination with a row of the source pair, or of the source with a row of the destination
pair, destination @ W.T. Each relation takes the side with fewer pairs, as sums do (`Rows`): source and destination nodes are put
behind each other, so that a row is made of one of these, and each edge is a dot of a row and one of these.

In: tables of a graph. Out: `Between`, or None where all relations take one side, or too few rows are saved.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from wholestep.relational.tables import Rows, Table, Taking

PER_ROW, PER_NODE = 7, 10
"""Rows that are moved, forward and backward, for a pair, and for a node, whose two rows are put together and whose gradients are
added."""


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """Nodes stand twice: as sources, then as destinations."""

    of_rows: Taking
    """Nodes -> the rows of the chosen side of each relation."""
    to_edge: Table
    """Rows -> the other end's node, over edges."""

    def dot(self, rows: Rows, destination: Tensor, source: Tensor, matrices: Tensor) -> Tensor:
        nodes, taken = torch.cat([source, destination]), self.of_rows
        turned = torch.where(rows.by_source[:, None, None], matrices, matrices.transpose(1, 2))
        made = torch.ops.ws.gathered_mm(nodes, taken.index, turned, rows.ends, taken.back_ptr, taken.back_index)
        return self.to_edge.dot(nodes, made)

    @staticmethod
    def knows(destination: Tensor, source: Tensor, matrices: Tensor) -> bool:
        """Rows of both kinds are equally wide."""
        plain = (destination.dim(), source.dim(), matrices.dim()) == (2, 2, 3) and matrices.shape[1] == matrices.shape[
            2
        ]
        return plain and destination.dtype == source.dtype == matrices.dtype


def between(tables: dict[str, Any], nodes: int) -> Between | None:
    """From the fields of a RelGraph."""
    rows, sides = tables["rows"], (tables["sources"], tables["destinations"])
    count = rows.gathered.ptr.shape[0] - 1
    saved = min(side.relation.shape[0] for side in sides) - count
    if rows.gathered.edge is None or rows.spread.edge is None or PER_ROW * saved <= PER_NODE * nodes:
        return None
    src, dst, etype = (tables[name].long() for name in ("src", "dst", "etype"))
    through = rows.by_source[etype]
    begin = [torch.cat([ends.new_zeros(1), ends[:-1]])[etype] for ends in (rows.ends, *(side.ends for side in sides))]
    row = begin[0] + torch.where(through, sides[0].to_edge.index - begin[1], sides[1].to_edge.index - begin[2])
    own, other = torch.where(through, src, nodes + dst), torch.where(through, nodes + dst, src)
    node = own.new_empty(count).scatter_(0, row.long(), own)
    kind = tables["src"].dtype

    def sorted_by(ids: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Where each id begins, and in which order they stand together."""
        ordered, order = ids.sort(stable=True)
        return torch.searchsorted(ordered, torch.arange(most + 1, device=ids.device)).to(kind), order.to(kind)

    of_node, by_node, by_row = sorted_by(node, 2 * nodes), sorted_by(other, 2 * nodes), sorted_by(row.long(), count)
    return Between(
        Taking(node.to(kind), *of_node),
        Table(
            by_node[0], row.index_select(0, by_node[1]).to(kind), by_node[1],
            by_row[0], other.index_select(0, by_row[1]).to(kind), by_row[1],
        ),
    )  # fmt: skip
