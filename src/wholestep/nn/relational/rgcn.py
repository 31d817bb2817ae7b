"""RGCNConv: out = root x + sum over relations of the mean (or sum) over their edges of W[relation] x[source].

In: x (nodes, in), or ids of rows of W, or None for one id per node, or a pair of such for sources and destinations; edges. Out:
(destinations, out). W[relation] is a matrix of its own, a sum of `num_bases` shared ones, or `num_blocks` blocks on a diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wholestep import relational as rel
from wholestep.errors import NotBuiltYet
from wholestep.nn.relational.common import constant, glorot, graph_of, refuse_both, refuse_others, refuse_uneven

AGGREGATES = {"mean": "mean per relation", "add": "sum", "sum": "sum"}


def by_matrix(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


def by_blocks(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(2) @ p.W[e.type]).squeeze(2)


def by_id(e: Any, p: Any) -> Tensor:
    out: Tensor = p.W[e.type, e.src.x]
    return out


LAYERS = {
    (message, how): rel.layer(message, aggregate=how)
    for message in (by_matrix, by_blocks, by_id)
    for how in set(AGGREGATES.values())
}


class RGCNConv(nn.Module):
    """As torch_geometric.nn.RGCNConv; see the module."""

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, num_relations: int, num_bases: int | None = None,
        num_blocks: int | None = None, aggr: str = "mean", root_weight: bool = True, is_sorted: bool = False,
        bias: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_both(num_bases, num_blocks)
        refuse_others(kwargs)
        if aggr not in AGGREGATES:
            raise NotBuiltYet(f"aggr={aggr!r}", hint=f"one of {', '.join(AGGREGATES)}")
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.aggr, self.is_sorted = num_bases, num_blocks, aggr, is_sorted
        wide, wide_root = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.in_channels_l = wide
        if num_blocks is not None:
            refuse_uneven(num_blocks, in_channels=wide, out_channels=out_channels)
            shape: tuple[int, ...] = num_relations, num_blocks, wide // num_blocks, out_channels // num_blocks
        else:
            shape = num_relations if num_bases is None else num_bases, wide, out_channels
        self.weight = nn.Parameter(torch.empty(shape))
        self.register_parameter(
            "comp", None if num_bases is None else nn.Parameter(torch.empty(num_relations, num_bases))
        )
        self.register_parameter("root", nn.Parameter(torch.empty(wide_root, out_channels)) if root_weight else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.comp, self.root):
            glorot(parameter)
        constant(self.bias, 0.0)

    def forward(self, x: Any, edge_index: Any, edge_type: Tensor | None = None) -> Tensor:
        """`edge_index`: (2, edges), or a RelGraph of as many nodes as there are sources or destinations, whichever are more."""
        sources, own = x if isinstance(x, tuple) else (x, x)
        if sources is None:
            sources = torch.arange(self.in_channels_l, device=self.weight.device)
        own = sources if own is None else own
        nodes = max(sources.shape[0], own.shape[0])
        graph = graph_of(edge_index, edge_type, nodes, self.num_relations)
        out = self._gathered(graph, _filled(sources, nodes))[: own.shape[0]]
        if self.root is not None:
            out = out + (own @ self.root if own.is_floating_point() else self.root[own])
        return out if self.bias is None else out + self.bias

    def _gathered(self, graph: rel.RelGraph, x: Tensor) -> Tensor:
        how, weight = AGGREGATES[self.aggr], self.weight
        if self.num_blocks is not None:
            if not x.is_floating_point():
                raise NotBuiltYet("num_blocks with ids of nodes", hint="give features")
            blocks = x.reshape(x.shape[0], self.num_blocks, weight.shape[2])
            return LAYERS[by_blocks, how](graph, {"x": blocks}, {"W": weight}).reshape(x.shape[0], self.out_channels)
        if self.comp is not None:
            weight = (self.comp @ weight.reshape(weight.shape[0], -1)).reshape(-1, *weight.shape[1:])
        return LAYERS[by_matrix if x.is_floating_point() else by_id, how](graph, {"x": x}, {"W": weight})

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, num_relations={self.num_relations}"


def _filled(x: Tensor, rows: int) -> Tensor:
    """With rows of zeros, which no edge reads."""
    return x if x.shape[0] == rows else torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])
