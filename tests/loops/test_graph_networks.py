"""Graph convolutions over a sparse adjacency as in Kipf's pygcn, message passing by index_add: whole steps.

The graph is another one at every step, with other numbers of nodes and edges, or it stands in a closure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins
from torch import nn

from wholestep.errors import WholestepWarning

Batch = dict[str, torch.Tensor]
FEATURES, CLASSES = 6, 3


class GraphConvolution(nn.Module):
    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(given, made)), nn.Parameter(torch.zeros(made))
        nn.init.uniform_(self.weight, -1 / math.sqrt(made), 1 / math.sqrt(made))

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.spmm(adjacency, torch.mm(x, self.weight)) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GraphConvolution(FEATURES, 8), GraphConvolution(8, CLASSES)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.second(F.relu(self.first(x, adjacency)), adjacency), dim=1)


def graph(number: int, nodes: int = 7, edges: int = 12, layout: str = "coo") -> Batch:
    source = torch.Generator().manual_seed(number)
    ends = torch.randint(0, nodes, (2, edges), generator=source)
    ends = torch.cat([ends, torch.arange(nodes).repeat(2, 1)], dim=1)
    adjacency = torch.sparse_coo_tensor(ends, torch.rand(ends.shape[1], generator=source), (nodes, nodes))
    adjacency = {"some twice": adjacency, "coo": adjacency.coalesce(), "csr": adjacency.coalesce().to_sparse_csr()}[
        layout
    ]
    return {
        "adjacency": adjacency, "ends": ends, "x": torch.randn(nodes, FEATURES, generator=source),
        "labels": torch.randint(0, CLASSES, (nodes,), generator=source),
    }  # fmt: skip


def side(loss: Callable[..., torch.Tensor]) -> Side:
    model = GCN()
    return Side(model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4), loss)


def pygcn(m: Any, b: Batch) -> torch.Tensor:
    return F.nll_loss(m(b["x"], b["adjacency"]), b["labels"])


def other_products(m: Any, b: Batch) -> torch.Tensor:
    """`@`, torch.sparse.mm, a method, the transposed matrix, its sizes and type."""
    adjacency = b["adjacency"]
    assert isinstance(adjacency, torch.Tensor) and adjacency.shape[0] == adjacency.size(1) == len(b["x"])
    h = m.first(b["x"], adjacency)
    mixed = adjacency @ h + torch.sparse.mm(adjacency, h) + adjacency.matmul(h) + torch.sparse.mm(adjacency.t(), h)
    return F.cross_entropy(mixed[:, :CLASSES], b["labels"])


def attention(m: Any, b: Batch) -> torch.Tensor:
    """The values of a matrix that the loss makes are trained through, as in a graph attention network."""
    ends = b["ends"]
    h = m.first(b["x"], b["adjacency"])
    weights = (h[ends[0]] * h[ends[1]]).sum(-1).sigmoid()
    scores = torch.sparse_coo_tensor(ends, weights, (len(h), len(h)))
    return F.cross_entropy(torch.sparse.mm(scores, h)[:, :CLASSES], b["labels"])


def messages(m: Any, b: Batch) -> torch.Tensor:
    source, target = b["ends"]
    h = F.relu(b["x"] @ m.first.weight)
    summed = torch.zeros_like(h).index_add(0, target, h[source])
    scattered = torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, h.shape[1]), h[source])
    degree = torch.zeros(len(h)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
    return F.cross_entropy(((summed + scattered) / degree[:, None]) @ m.second.weight, b["labels"])


@pytest.mark.parametrize("layout", ["coo", "csr", "some twice"])
def test_pygcn_trains_as_in_eager(layout: str) -> None:
    graphs = [graph(number, 5 + number, 9 + 3 * number, layout) for number in range(5)]
    twins = Twins(lambda: side(pygcn), graphs[0])
    twins.train([*graphs, graph(9, 1, 0, layout)], tolerance=1e-6)
    assert twins.step.rung == "whole step" and twins.step.captures <= 4, twins.step.explain()
    assert all(not vars(g["adjacency"]) for g in graphs), "something was left on the user's tensor"


@pytest.mark.parametrize("loss", [other_products, attention, messages])
def test_trains_as_in_eager(loss: Callable[..., torch.Tensor]) -> None:
    graphs = [graph(number, 5 + number, 9 + 3 * number) for number in range(4)]
    twins = Twins(lambda: side(loss), graphs[0])
    twins.train(graphs, tolerance=1e-6)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_a_graph_in_a_closure_is_read_live() -> None:
    held = graph(0)

    def make() -> Side:
        return side(lambda m, b: F.nll_loss(m(b["x"], held["adjacency"]), b["labels"]))

    batches = [{name: value for name, value in graph(number).items() if name != "adjacency"} for number in range(4)]
    twins = Twins(make, batches[0])
    twins.train(batches[:2], tolerance=1e-6)
    held["adjacency"].values().mul_(0.5)
    twins.train(batches[2:3], tolerance=1e-6)
    held["adjacency"] = graph(7)["adjacency"]
    twins.train(batches[3:], tolerance=1e-6)
    assert twins.step.rung == "whole step", twins.step.explain()


@pytest.mark.slow
def test_compiled_trains_as_in_eager() -> None:
    graphs = [graph(number) for number in range(3)]
    twins = Twins(lambda: side(pygcn), graphs[0], backend="inductor")
    twins.train(graphs, tolerance=1e-5)
    assert twins.step.rung == "whole step" and not twins.step.regions["notes"], twins.step.explain()


def test_a_matrix_that_does_not_fit_raises() -> None:
    graphs = [graph(number) for number in range(2)]
    twins = Twins(lambda: side(pygcn), graphs[0])
    twins.train(graphs, tolerance=1e-6)
    with pytest.raises(RuntimeError):
        twins.step({**graphs[0], "adjacency": graph(3, nodes=5)["adjacency"]})
    twins.assert_same_state(1e-6)


def test_what_else_is_done_with_it_is_refused_by_name() -> None:
    def loss(m: Any, b: Batch) -> torch.Tensor:
        return F.nll_loss(m(b["x"], b["adjacency"] * 0.5), b["labels"])

    with pytest.warns(WholestepWarning, match=r"test_graph_networks\.py:\d+"):
        twins = Twins(lambda: side(loss), graph(0))
        twins.train([graph(0), graph(1)], tolerance=1e-6)
    assert twins.step.rung == "eager"
