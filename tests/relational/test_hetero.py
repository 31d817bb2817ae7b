"""HeteroData as one graph: ids, types, features joined and results split; what is missing or does not fit, in one line."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from wholestep import relational as rel
from wholestep.capture.batch import flatten
from wholestep.errors import BadOption


class Plain(dict):
    """What HeteroData has of what is read."""

    @property
    def node_types(self) -> list[str]:
        return [key for key in self if isinstance(key, str)]

    @property
    def edge_types(self) -> list[tuple[str, str, str]]:
        return [key for key in self if isinstance(key, tuple)]


def library() -> Plain:
    data = Plain({name: types.SimpleNamespace(x=torch.randn(count, 4)) for name, count in (("book", 5), ("author", 3))})
    data["writer"] = types.SimpleNamespace(num_nodes=2)
    data["author", "wrote", "book"] = types.SimpleNamespace(edge_index=torch.tensor([[0, 2, 2], [4, 0, 1]]))
    data["book", "cites", "book"] = types.SimpleNamespace(edge_index=torch.tensor([[0, 0], [1, 2]]))
    return data


def test_types_one_after_another() -> None:
    graph, layout = rel.RelGraph.from_hetero(library())
    assert (graph.num_nodes, graph.num_edges, graph.num_relations) == (10, 5, 2)
    assert graph.types is not None and graph.types.order is None
    assert graph.types.to_node.index.tolist() == [0] * 5 + [1] * 3 + [2] * 2
    index, etype = graph.given()
    assert index.tolist() == [[5, 7, 7, 0, 0], [4, 0, 1, 1, 2]] and etype.tolist() == [0, 0, 0, 1, 1]
    features = {"book": torch.ones(5, 4), "author": torch.ones(3, 4) * 2, "writer": torch.ones(2, 4) * 3}
    x = layout.joined(features)
    assert all(torch.equal(layout.split(x)[name], features[name]) for name in features)
    of_edges = layout.joined(
        {("book", "cites", "book"): torch.ones(2, 1), ("author", "wrote", "book"): torch.zeros(3, 1)}
    )
    assert of_edges[:, 0].tolist() == [0, 0, 0, 1, 1]
    assert "3 node types" in graph.report()


def test_graphs_of_equal_sizes_are_one_batch() -> None:
    one, two = library(), library()
    two["book", "cites", "book"].edge_index = torch.tensor([[0, 1], [1, 2]])
    two["author", "wrote", "book"].edge_index = torch.tensor([[0, 2, 1], [4, 0, 1]])
    two_again = library()
    two_again["book", "cites", "book"].edge_index = torch.tensor([[3, 3], [1, 2]])
    specs = [flatten(rel.RelGraph.from_hetero(data)[0])[1] for data in (one, two, two_again)]
    assert specs[0] == specs[1] == specs[2]


def test_torch_geometric_has_it_so() -> None:
    data_of = pytest.importorskip("torch_geometric.data").HeteroData
    data, plain = data_of(), library()
    for name in ("book", "author"):
        data[name].x = plain[name].x
    data["writer"].num_nodes = 2
    for edge in plain.edge_types:
        data[edge].edge_index = plain[edge].edge_index
    graph, layout = rel.RelGraph.from_hetero(data)
    wanted, wanted_layout = rel.RelGraph.from_hetero(plain)
    assert layout == wanted_layout
    assert all(torch.equal(a, b) for a, b in zip(flatten(graph)[0], flatten(wanted)[0], strict=True))


def with_edges(index: Any) -> Plain:
    data = library()
    data["book", "cites", "book"].edge_index = index
    return data


def without_count() -> Plain:
    data = library()
    data["writer"] = types.SimpleNamespace()
    return data


def of_nobody() -> Plain:
    data = library()
    data["reader", "read", "book"] = types.SimpleNamespace(edge_index=torch.tensor([[0], [0]]))
    return data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (without_count(), r"the number of 'writer' nodes is not known.*data\['writer'\].num_nodes"),
        (with_edges(torch.tensor([[0, 9], [0, 0]])), r"edge 1 of .*cites.* has node 9 of type 'book', of which there are 5"),
        (with_edges(torch.tensor([0, 9])), r"edge_index is of shape \(2,\).*\(2, edges\)"),
        (with_edges(None), r"edge_index is a NoneType"),
        (of_nobody(), r"between nodes of type 'reader'"),
        (None, "a NoneType has no node_types"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_one_line(data: Plain, told: str) -> None:
    with pytest.raises(BadOption, match=told):
        rel.RelGraph.from_hetero(data)


def test_features_that_do_not_fit_are_named() -> None:
    _, layout = rel.RelGraph.from_hetero(library())
    features = {"book": torch.ones(5, 4), "author": torch.ones(3, 4), "writer": torch.ones(2, 4)}
    for name, given, told in (
        ("author", torch.ones(3, 6), r"unequal widths: 'book' \(4,\), 'author' \(6,\).*linear layer"),
        ("author", torch.ones(4, 4), r"features of 'author' have shape \(4, 4\).*has 3 of that type"),
    ):
        with pytest.raises(BadOption, match=told):
            layout.joined({**features, name: given})
    with pytest.raises(BadOption, match="no features of 'writer'"):
        layout.joined({name: features[name] for name in ("book", "author")})
