"""Dots of both ends where relations take different sides: as edge by edge, and with a row per pair of the better side."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import NAMES, edges_of, made
from torch import Tensor

from wholestep import relational as rel
from wholestep.relational import RelGraph
from wholestep.relational import between as module
from wholestep.relational import tables as tables_module


def hgt(e: Any, p: Any) -> Tensor:
    k = (e.src.k.unsqueeze(1) @ p.A[e.type]).squeeze(1)
    a = rel.edge_softmax((k * e.dst.q).sum(-1) * p.mu[e.type] / math.sqrt(k.shape[-1]))
    return a[:, None] * (e.src.v.unsqueeze(1) @ p.W[e.type]).squeeze(1)


def gate(e: Any, p: Any) -> Tensor:
    """Of one feature at both ends."""
    k = (e.src.k.unsqueeze(1) @ p.A[e.type]).squeeze(1)
    return F.leaky_relu((k * e.dst.k).sum(-1))[:, None] * e.src.v


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("message", [hgt, gate], ids=lambda m: m.__name__)
@pytest.mark.parametrize("wide", [4, 6], ids=["square", "not square"])
def test_equal_to_edge_by_edge(name: str, message: Any, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a graph is like, with gradients."""
    monkeypatch.setattr(module, "PER_NODE", -1000)
    monkeypatch.setattr(tables_module, "side_of", lambda *_: None)
    src, dst, etype, nodes, relations = edges_of(name)
    graph = RelGraph(src, dst, etype, num_nodes=nodes, num_relations=relations)
    sizes = {"k": wide if message is hgt else 4, "q": 4, "v": 4}
    given = {n: torch.randn(nodes, size, dtype=torch.float64, requires_grad=True) for n, size in sizes.items()}
    shapes = {"A": (relations, sizes["k"], 4), "W": (relations, 4, 4), "mu": (relations,)}
    params = {n: torch.randn(shape, dtype=torch.float64, requires_grad=True) for n, shape in shapes.items()}
    layer = rel.layer(message)
    found, wanted = (run(graph, given, params) for run in (layer, layer.reference))
    torch.testing.assert_close(found, wanted)
    pull, leaves = torch.randn_like(wanted), [*given.values(), *params.values()]
    ours, plain = (torch.autograd.grad(out, leaves, pull, allow_unused=True) for out in (found, wanted))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(torch.zeros(()) if one is None else one, torch.zeros(()) if other is None else other)


def test_it_is_for_graphs_where_it_saves_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    few, many, etype = (torch.randint(0, most, (400,), generator=generator) for most in (2, 30, 4))
    ends = torch.cat([few, many]), torch.cat([many, few]), torch.cat([etype, etype + 4])
    graph = RelGraph(*ends, num_nodes=30, num_relations=8)
    assert graph.between is not None and made("plain").between is None and made("few sources").between is None
    rows = graph.rows.gathered.ptr.shape[0] - 1
    assert graph.between.of_rows.index.shape[0] == rows < graph.sources.relation.shape[0] / 4
    assert graph.to("meta").between is not None
