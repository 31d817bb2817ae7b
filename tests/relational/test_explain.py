"""explain(): rows and bytes of every step, sides, and the floor, by hand for a small graph."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import made
from torch import Tensor

from wholestep import relational as rel


def numbers(told: str, start: str) -> list[float]:
    """The numbers at the end of a line."""
    line = next(line for line in told.splitlines() if line.startswith(start))
    return [float(number) for number in re.findall(r"\d+\.?\d*(?= |$)", line)]


def test_bytes_of_a_plain_layer() -> None:
    """x (30, 250) float32 by one matrix (250, 250), then the sum over 120 edges."""
    graph = made("hubs")
    x, weight = torch.randn(30, 250), torch.randn(250, 250)
    told = rel.layer(lambda e, p: e.src.x @ p.W).explain(graph, {"x": x}, {"W": weight})
    node, matrix = 30 * 250 * 4, 250 * 250 * 4
    assert numbers(told, "mm")[:2] == [30, pytest.approx((2 * node + matrix) / 1e6, abs=1e-3)]
    tables = 4 * (31 + 120)  # where the edges of a node begin, and their sources
    assert numbers(told, "weighted sum")[:2] == [30, pytest.approx((2 * node + tables) / 1e6, abs=1e-3)]
    ids = 3 * 4 * 120
    assert numbers(told, "floor, forward:")[0] == pytest.approx((2 * node + matrix + ids) / 1e6, abs=1e-3)
    both = 3 * (node + matrix) + 2 * ids + 2 * node
    assert numbers(told, "floor, forward and")[-2:] == [
        pytest.approx(both / 1e6, abs=1e-3), pytest.approx(both / 4.3e9, abs=1e-5),
    ]  # fmt: skip


def test_sides_are_counted_and_edges_have_numbers_only() -> None:
    def rgat(e: Any, p: Any) -> Tensor:
        m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
        a = rel.edge_softmax(F.leaky_relu((e.dst.x * p.u[e.type]).sum(-1) + (m * p.v[e.type]).sum(-1)))
        return a[:, None] * m

    graph = made("hubs")
    params = {"W": torch.randn(5, 64, 64), "u": torch.randn(5, 64), "v": torch.randn(5, 64)}
    told = rel.layer(rgat).explain(graph, {"x": torch.randn(30, 64)}, params)
    by_source = int(graph.rows.by_source.sum())
    assert f"{by_source} by source, {5 - by_source} by destination" in told
    at_edges = [line for line in told.splitlines() if re.search(r" edges +120 ", line)]
    assert at_edges and all(float(line.split()[-2]) < 120 * 64 * 4 / 1e6 / 4 for line in at_edges)


def test_a_sum_without_rows_between_reads_nodes_and_moves_its_products_twice() -> None:
    graph = made("many relations")
    x, weight = torch.randn(graph.num_nodes, 64), torch.randn(graph.num_relations, 64, 32)
    layer = rel.layer(lambda e, p: (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1))
    told, rows = layer.explain(graph, {"x": x}, {"W": weight}), graph.rows
    tables = sum(
        t.numel() for t in (rows.gathered.ptr, rows.gathered.index, rows.spread.ptr, rows.spread.index, rows.ends)
    )
    products = 2 * (rows.gathered.ptr.shape[0] - 1) * 32
    moved = 4 * (x.numel() + weight.numel() + tables + products + graph.num_nodes * 32)
    assert numbers(told, "weighted sum")[-2] == pytest.approx(moved / 1e6, abs=1e-3)


def test_where_most_pairs_exist_nothing_has_a_row_per_pair() -> None:
    graph = made("loops, edges twice")
    x, w = torch.randn(graph.num_nodes, 4), torch.randn(graph.num_relations, 4, 4)
    layer = rel.layer(lambda e, p: (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1))
    told = layer.explain(graph, {"x": x}, {"W": w})
    assert re.search(rf"weighted sum of products, all relations at once +destination nodes +{graph.num_nodes} ", told)
    assert "by source," not in told


def test_types_and_edge_features_have_rows() -> None:
    graph = rel.RelGraph([0, 1, 1], [1, 2, 2], [0, 0, 1], ntype=[0, 1, 1])
    told = rel.layer(lambda e, p: e.src.x * (p.g * 2)[e.src.type].tanh() + e.x).explain(
        graph, {"x": torch.randn(3, 4)}, {"g": torch.randn(2, 4)}, {"x": torch.randn(3, 4)}
    )
    assert re.search(r"tanh +source types +2 ", told) and re.search(r"mul +source nodes +3 ", told)
    assert re.search(r"add +edges +3 ", told) and "2 node types" in told
