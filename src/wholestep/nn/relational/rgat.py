"""RGATConv: messages W[relation] x[source], weighted per head by a softmax over the edges of a node.

In: x (nodes, in), edges, features of edges where edge_dim is given. Out: (nodes, heads * dim * out), or without `heads` if they are
not concatenated. Logits are made of q = W x[destination] Q and k = W x[source] K: leaky_relu(q + k), or q * k. `mod` keeps the size
of a node's neighbourhood visible after the softmax.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wholestep import relational as rel
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.nn.relational.common import constant, glorot, graph_of, refuse_both, refuse_others, refuse_uneven
from wholestep.nn.relational.rgcn import LAYERS, by_blocks, by_matrix

MODS = (None, "additive", "scaled", "f-additive", "f-scaled")
MECHANISMS = ("across-relation", "within-relation")
MODES = ("additive-self-attention", "multiplicative-self-attention")


class Settings(NamedTuple):
    """What a message function depends on beside its tensors."""

    heads: int
    dim: int
    num_blocks: int | None
    additive: bool
    within_relation: bool
    mod: str | None
    negative_slope: float
    dropped: bool
    with_features: bool


def transformed(x: Tensor, e: Any, p: Any, blocks: int | None) -> Tensor:
    if blocks is None:
        return (x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    return (x.reshape(x.shape[0], blocks, 1, -1) @ p.W[e.type]).squeeze(2).reshape(x.shape[0], -1)


def message(s: Settings, e: Any, p: Any) -> Tensor:
    sent = transformed(e.src.x, e, p, s.num_blocks)
    q, k = transformed(e.dst.x, e, p, s.num_blocks) @ p.q, sent @ p.k
    logits = q + k if s.additive else q * k
    if s.with_features:
        own = F.linear(e.x, p.edge) @ p.e
        logits = logits + own if s.additive else logits * own
    if s.additive:
        logits = F.leaky_relu(logits, s.negative_slope)
    a = rel.edge_softmax(logits, within_relation=s.within_relation)
    if s.mod == "f-additive":
        a = torch.where(a > 0, a + 1, a)
    elif s.mod == "f-scaled":
        a = a * e.dst.degree
    if s.dropped:
        a = a * e.kept
    if s.heads * s.dim == 1:
        return a * sent
    by_head = sent.reshape(sent.shape[0], s.heads, 1, -1).expand(-1, s.heads, s.dim, -1)
    return a.unsqueeze(-1) * by_head.reshape(sent.shape[0], s.heads * s.dim, -1)


_layers: dict[Settings, rel.Layer] = {}


def layer_of(settings: Settings) -> rel.Layer:
    """A dict of our own: Dynamo looks past functools.cache, and would make a layer anew."""
    if settings not in _layers:
        _layers[settings] = rel.layer(functools.partial(message, settings))
    return _layers[settings]


class RGATConv(nn.Module):
    """As torch_geometric.nn.RGATConv; see the module."""

    def __init__(
        self, in_channels: int, out_channels: int, num_relations: int, num_bases: int | None = None,
        num_blocks: int | None = None, mod: str | None = None, attention_mechanism: str = "across-relation",
        attention_mode: str = "additive-self-attention", heads: int = 1, dim: int = 1, concat: bool = True,
        negative_slope: float = 0.2, dropout: float = 0.0, edge_dim: int | None = None, bias: bool = True, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        refuse_both(num_bases, num_blocks)
        refuse_others({name: value for name, value in kwargs.items() if (name, value) != ("aggr", "add")})
        _refuse_unknown(mod, attention_mechanism, attention_mode, dim, dropout)
        self.in_channels, self.out_channels, self.num_relations = in_channels, out_channels, num_relations
        self.num_bases, self.num_blocks, self.mod, self.heads, self.dim = num_bases, num_blocks, mod, heads, dim
        self.attention_mechanism, self.attention_mode = attention_mechanism, attention_mode
        self.concat, self.negative_slope, self.dropout, self.edge_dim = concat, negative_slope, dropout, edge_dim
        self._own_parameters(bias)
        self.reset_parameters()

    def _own_parameters(self, bias: bool) -> None:
        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape))

        inside, out, wide = self.in_channels, self.out_channels, self.heads * self.out_channels
        self.q, self.k = (empty(wide, self.heads * self.dim) for _ in range(2))
        self.register_parameter("bias", empty((self.heads if self.concat else 1) * self.dim * out) if bias else None)
        self.lin_edge = None if self.edge_dim is None else nn.Linear(self.edge_dim, wide, bias=False)
        self.register_parameter("e", None if self.edge_dim is None else empty(wide, self.heads * self.dim))
        if self.num_bases is not None:
            self.att, self.basis = empty(self.num_relations, self.num_bases), empty(self.num_bases, inside, wide)
        elif self.num_blocks is not None:
            blocks = self.num_blocks
            refuse_uneven(blocks, in_channels=inside, **{"heads * out_channels": wide})
            self.weight = empty(self.num_relations, blocks, inside // blocks, wide // blocks)
        else:
            self.weight = empty(self.num_relations, inside, wide)
        self.w, self.l1, self.b1 = empty(out), empty(1, out), empty(1, out)
        self.l2, self.b2 = empty(out, out), empty(1, out)

    def reset_parameters(self) -> None:
        matrices = [self.weight] if self.num_bases is None else [self.basis, self.att]
        edge = None if self.lin_edge is None else self.lin_edge.weight
        for parameter in (*matrices, self.q, self.k, edge, self.e):
            glorot(parameter)
        values = {self.bias: 0.0, self.w: 1.0, self.l1: 1.0, self.b1: 0.0, self.l2: 1 / self.out_channels, self.b2: 0.0}
        for parameter, value in values.items():
            constant(parameter, value)

    def forward(
        self, x: Tensor, edge_index: Any, edge_type: Tensor | None = None, edge_attr: Tensor | None = None, size: Any = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """`edge_index`: (2, edges), or a RelGraph."""
        for name, given in (("size", size), ("return_attention_weights", return_attention_weights)):
            if given is not None:
                raise NotBuiltYet(f"{name}={given!r}", hint="leave it out")
        graph = graph_of(edge_index, edge_type, x.shape[0], self.num_relations)
        weight = self._matrices()
        out = self._attended(graph, x, weight, edge_attr).reshape(x.shape[0], self.heads, self.dim, self.out_channels)
        if self.mod == "additive":
            out = out + self.w * self._added_up(graph, x, weight)
        elif self.mod == "scaled":
            degree = graph.degree.to(x.dtype).unsqueeze(1)
            scale = torch.relu(degree @ self.l1 + self.b1) @ self.l2 + self.b2
            out = out * scale[:, None, None]
        out = (out if self.concat else out.mean(1)).flatten(1)
        return out if self.bias is None else out + self.bias

    def _matrices(self) -> Tensor:
        if self.num_bases is None:
            return self.weight
        return (self.att @ self.basis.reshape(self.num_bases, -1)).reshape(-1, *self.basis.shape[1:])

    def _attended(self, graph: rel.RelGraph, x: Tensor, weight: Tensor, edge_attr: Tensor | None) -> Tensor:
        params, edges, nodes = {"W": weight, "q": self.q, "k": self.k}, {}, {"x": x}
        if edge_attr is not None:
            if self.lin_edge is None:
                raise BadOption("edge_attr is given and edge_dim is not", hint="make the layer with edge_dim")
            params |= {"edge": self.lin_edge.weight, "e": self.e}
            edges["x"] = edge_attr if edge_attr.dim() > 1 else edge_attr.unsqueeze(1)
        dropped = self.training and self.dropout > 0
        if dropped:  # ones rather than the weights: the same draw, before edges are ordered
            ones = torch.ones(graph.num_edges, self.heads * self.dim, dtype=x.dtype, device=x.device)
            edges["kept"] = F.dropout(ones, self.dropout)
        if self.mod == "f-scaled":
            nodes["degree"] = graph.degree.to(x.dtype).unsqueeze(1)
        settings = Settings(
            self.heads, self.dim, self.num_blocks, self.attention_mode == MODES[0], self.attention_mechanism == MECHANISMS[1],
            self.mod, self.negative_slope, dropped, edge_attr is not None,
        )  # fmt: skip
        return layer_of(settings)(graph, nodes, params, edges)

    def _added_up(self, graph: rel.RelGraph, x: Tensor, weight: Tensor) -> Tensor:
        """Messages without attention."""
        if self.num_blocks is None:
            total = LAYERS[by_matrix, "sum"](graph, {"x": x}, {"W": weight})
        else:
            blocks = x.reshape(x.shape[0], self.num_blocks, weight.shape[2])
            total = LAYERS[by_blocks, "sum"](graph, {"x": blocks}, {"W": weight})
        return total.reshape(x.shape[0], self.heads, 1, self.out_channels)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}"


def _refuse_unknown(mod: Any, mechanism: str, mode: str, dim: int, dropout: float) -> None:
    asked = (("mod", mod, MODS), ("attention_mechanism", mechanism, MECHANISMS), ("attention_mode", mode, MODES))
    for name, value, known in asked:
        if value not in known:
            raise BadOption(f"{name}={value!r}", hint=f"one of {', '.join(map(str, known))}")
    if mode == MODES[0] and dim > 1:
        raise BadOption(f"dim={dim} with attention_mode={mode!r}", hint=f"it needs {MODES[1]!r}")
    if dropout > 0 and mod is not None:
        raise BadOption(f"dropout={dropout} with mod={mod!r}", hint="drop weights without mod")
