"""HGTConv: attention over a graph of several node types, with keys and values by matrices of relation and head.

In: x_dict (node type -> features), edge_index_dict (edge type -> (2, edges)). Out: a dict of the types that edges lead to. Nodes
of all types are one set, in the order of `node_types`; relations are in the order of `edge_types`. `graph` makes the RelGraph.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep import relational as rel
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.nn.relational.common import constant, graph_of, refuse_others, remembered

EdgeType = tuple[str, str, str]


def message(e: Any, p: Any) -> Tensor:
    k, v = ((x.unsqueeze(2) @ w[e.type]).squeeze(2) for x, w in ((e.src.k, p.K), (e.src.v, p.V)))
    logits = (e.dst.q * k).sum(-1) * p.prior[e.type]
    return rel.edge_softmax(logits / math.sqrt(v.shape[-1])).unsqueeze(-1) * v


LAYER = rel.layer(message)


class TypedLinear(nn.Module):
    """A linear layer per node type."""

    def __init__(self, in_channels: dict[str, int], out_channels: int) -> None:
        super().__init__()
        self.lins = nn.ModuleDict({name: nn.Linear(wide, out_channels) for name, wide in in_channels.items()})

    def reset_parameters(self) -> None:
        for lin in self.lins.values():
            lin.reset_parameters()

    def forward(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = self.lins[name](x)
        return out


class HeadMatrices(nn.Module):
    """A matrix per head and relation, in this order."""

    def __init__(self, heads: int, relations: int, wide: int) -> None:
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.empty(heads * relations, wide, wide))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self) -> Tensor:
        """(relations, heads, d, d)."""
        by_head = self.weight.reshape(self.heads, self.weight.shape[0] // self.heads, *self.weight.shape[1:])
        return by_head.transpose(0, 1)


class HGTConv(nn.Module):
    """As torch_geometric.nn.HGTConv; see the module."""

    def __init__(
        self, in_channels: int | dict[str, int], out_channels: int, metadata: tuple[list[str], list[EdgeType]], heads: int = 1,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_others(kwargs)
        self.node_types, self.edge_types = metadata[0], [tuple(edge) for edge in metadata[1]]
        wide = in_channels if isinstance(in_channels, dict) else dict.fromkeys(self.node_types, in_channels)
        if out_channels % heads:
            raise BadOption(f"out_channels={out_channels} with heads={heads}", hint="heads are of equal size")
        if any(size == -1 for size in wide.values()):
            raise NotBuiltYet("in_channels=-1", hint="give the number of features of every node type")
        self.in_channels, self.out_channels, self.heads = wide, out_channels, heads
        self.dst_node_types = {edge[-1] for edge in self.edge_types}
        self.kqv_lin = TypedLinear(wide, 3 * out_channels)
        self.out_lin = TypedLinear(dict.fromkeys(self.node_types, out_channels), out_channels)
        self.k_rel, self.v_rel = (HeadMatrices(heads, len(self.edge_types), out_channels // heads) for _ in range(2))
        self.skip = nn.ParameterDict({name: nn.Parameter(torch.empty(1)) for name in self.node_types})
        self.p_rel = nn.ParameterDict()
        for edge in self.edge_types:  # one by one: of a dict it would take the keys in another order
            self.p_rel[_key(edge)] = nn.Parameter(torch.empty(1, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for part in (self.kqv_lin, self.out_lin, self.k_rel, self.v_rel):
            part.reset_parameters()
        for parameter in (*self.skip.values(), *self.p_rel.values()):
            constant(parameter, 1.0)

    def graph(self, x_dict: dict[str, Tensor], edge_index_dict: dict[EdgeType, Tensor]) -> rel.RelGraph:
        """The tables, to be given in the place of edge_index_dict."""
        first, nodes = self._offsets(x_dict)
        device = next(iter(x_dict.values())).device
        parts = [torch.empty(3, 0, dtype=torch.int64, device=device)]
        for edge, index in edge_index_dict.items():
            if tuple(edge) not in self.edge_types:
                raise BadOption(f"edge_index_dict has {edge}", hint="the layer's metadata does not")
            if not isinstance(index, Tensor) or index.layout is not torch.strided:
                raise NotBuiltYet(
                    f"edge_index_dict[{edge}] is a {type(index).__name__}", hint="give tensors (2, edges)"
                )
            relation = torch.full_like(index[0], self.edge_types.index(tuple(edge)))
            parts.append(torch.stack([index[0] + first[edge[0]], index[1] + first[edge[-1]], relation]))
        src, dst, etype = torch.cat(parts, 1)
        return rel.RelGraph(src, dst, etype, num_nodes=nodes, num_relations=len(self.edge_types))

    def _remembered(self, x_dict: dict[str, Tensor], edge_index_dict: dict[EdgeType, Tensor]) -> rel.RelGraph:
        tensors = tuple(edge_index_dict.values())
        if not all(isinstance(t, Tensor) for t in tensors):
            return self.graph(x_dict, edge_index_dict)  # which says what is wrong
        first, nodes = self._offsets(x_dict)
        said = tuple(first.items()), nodes, tuple(self.edge_types), tuple(edge_index_dict)
        return remembered(tensors, said, lambda: self.graph(x_dict, edge_index_dict))

    def edges(self, x_dict: dict[str, Tensor], graph: rel.RelGraph) -> dict[Any, Tensor]:
        """What `graph` was made of."""
        first, _ = self._offsets(x_dict)
        index, etype = graph.given()
        starts = {
            edge: index.new_tensor([[first.get(edge[0], 0)], [first.get(edge[-1], 0)]]) for edge in self.edge_types
        }
        return {edge: index[:, etype == i] - starts[edge] for i, edge in enumerate(self.edge_types)}

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: Any) -> dict[str, Tensor]:
        """`edge_index_dict`: edge type -> (2, edges), or a RelGraph made by `graph`."""
        first, nodes = self._offsets(x_dict)
        given = isinstance(edge_index_dict, rel.RelGraph)
        graph = edge_index_dict if given else self._remembered(x_dict, edge_index_dict)
        graph = graph_of(graph, None, nodes, len(self.edge_types))
        told = torch.cat([self.kqv_lin(name, x_dict[name]) for name in first])
        k, q, v = (part.reshape(nodes, self.heads, -1) for part in told.tensor_split(3, 1))
        there = set(self.edge_types if given else map(tuple, edge_index_dict))
        prior = torch.cat([self._prior(edge, edge in there) for edge in self.edge_types])
        params = {"K": self.k_rel(), "V": self.v_rel(), "prior": prior}
        out = F.gelu(LAYER(graph, {"k": k, "q": q, "v": v}, params).reshape(nodes, self.out_channels))
        return {
            name: self._mixed(name, out[at : at + x_dict[name].shape[0]], x_dict[name])
            for name, at in first.items()
            if name in self.dst_node_types
        }

    def _prior(self, edge: Any, there: bool) -> Tensor:
        """Of a relation that was not given no gradient is zero: its optimizer leaves it alone, as torch_geometric's."""
        prior: Tensor = self.p_rel[_key(edge)]
        return prior if there else prior.detach()

    def _mixed(self, name: str, out: Tensor, x: Tensor) -> Tensor:
        out = self.out_lin(name, out)
        if out.shape[-1] != x.shape[-1]:
            return out
        share = self.skip[name].sigmoid()
        return share * out + (1 - share) * x

    def _offsets(self, x_dict: dict[str, Tensor]) -> tuple[dict[str, int], int]:
        """Where the nodes of each type begin, and how many there are."""
        names = [name for name in self.node_types if name in x_dict]
        *first, nodes = itertools.accumulate((x_dict[name].shape[0] for name in names), initial=0)
        return dict(zip(names, first, strict=True)), nodes

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _key(edge: Any) -> str:
    """Names of parameters cannot have a point."""
    return "__".join(edge).replace(".", "#")
