"""Where things are computed: parameters by type, bases, blocks, heads and residuals in the smallest space."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import NAMES, edges_of, made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep import relational as rel
from wholestep.relational import spaces

TYPES = 3


def basis(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ torch.einsum("rb,bio->rio", p.c, p.basis)[e.type]).squeeze(1)


def basis_as_a_product(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ (p.c @ p.basis.flatten(1)).reshape(-1, 6, 4)[e.type]).squeeze(1)


def basis_of_edges(e: Any, p: Any) -> Tensor:
    return torch.einsum("ei,eio->eo", e.src.x, torch.einsum("eb,bio->eio", p.c[e.type], p.basis))


def blocks(e: Any, p: Any) -> Tensor:
    return torch.einsum("ebi,ebio->ebo", e.src.x.reshape(-1, 2, 3), p.B[e.type]).flatten(1)


def residual(e: Any, p: Any) -> Tensor:
    return F.layer_norm((e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1) + e.src.x[:, :4], (4,), p.gain, p.bias)


def typed(e: Any, p: Any) -> Tensor:
    return torch.einsum("ei,eio->eo", e.src.x, p.T[e.src.type]) + p.t[e.dst.type]


def typed_matrix_first(e: Any, p: Any) -> Tensor:
    return (p.T[e.src.type].transpose(1, 2) @ e.src.x.unsqueeze(2)).squeeze(2) * e.dst.x[:, :1]


def typed_after_relation(e: Any, p: Any) -> Tensor:
    """Products by type of rows that are not in the order of types."""
    m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    return ((m + e.dst.x[:, :4]).unsqueeze(1) @ p.S[e.dst.type]).squeeze(1) + (
        m.unsqueeze(1) @ p.S[e.src.type]
    ).squeeze(1)


def hgt(e: Any, p: Any) -> Tensor:
    k, v = ((e.src.x.unsqueeze(1) @ m[e.src.type]).reshape(-1, 2, 3) for m in (p.K, p.V))
    q = (e.dst.x.unsqueeze(1) @ p.Q[e.dst.type]).reshape(-1, 2, 3)
    k, v = ((t.unsqueeze(2) @ m[e.type]).squeeze(2) for t, m in ((k, p.A), (v, p.M)))
    return rel.edge_softmax((q * k).sum(-1) * p.prior[e.type] / math.sqrt(3)).unsqueeze(-1) * v


LINEAR = spaces.LINEAR_SUM
WHERE: dict[Callable[..., Tensor], list[tuple[str, str]]] = {
    basis: [(LINEAR, "")],
    basis_as_a_product: [(LINEAR, "")],
    basis_of_edges: [("einsum", "relations"), (LINEAR, "")],
    blocks: [("product", "source pairs")],
    residual: [("product", "source pairs"), ("native_layer_norm", "source pairs")],
    typed: [("product", "source nodes")],
    typed_matrix_first: [("product", "source nodes")],
    typed_after_relation: [("product", "source pairs"), ("product", "edges")],
    hgt: [("product", "source nodes"), ("product", "destination nodes"), ("product", "source pairs"), (LINEAR, "")],
}


def graph_of(name: str, *, in_order: bool) -> rel.RelGraph:
    src, dst, etype, nodes, relations = edges_of(name)
    ntype = torch.randint(0, TYPES - 1, (nodes,), generator=torch.Generator().manual_seed(5))  # none of the last
    ntype = ntype.sort()[0] if in_order else ntype
    return rel.RelGraph(src, dst, etype, ntype=ntype, num_nodes=nodes, num_relations=relations, num_types=TYPES)


def tensors(graph: rel.RelGraph) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    relations = graph.num_relations
    sizes = {
        "c": (relations, 2), "basis": (2, 6, 4), "B": (relations, 2, 3, 4), "W": (relations, 6, 4), "gain": (4,), "bias": (4,),
        "T": (TYPES, 6, 4), "t": (TYPES, 4), "S": (TYPES, 4, 5), "K": (TYPES, 6, 6), "Q": (TYPES, 6, 6), "V": (TYPES, 6, 6),
        "A": (relations, 2, 3, 3), "M": (relations, 2, 3, 3), "prior": (relations, 2),
    }  # fmt: skip
    params = {name: torch.randn(size, dtype=torch.float64).requires_grad_() for name, size in sizes.items()}
    return torch.randn(graph.num_nodes, 6, dtype=torch.float64).requires_grad_(), params


@pytest.mark.parametrize("message", WHERE, ids=lambda m: m.__name__)
@pytest.mark.parametrize(("name", "in_order"), [(name, False) for name in NAMES] + [("hubs", True)])
def test_equal_to_edge_by_edge(name: str, message: Any, in_order: bool) -> None:
    graph = graph_of(name, in_order=in_order)
    x, params = tensors(graph)
    layer = rel.layer(message)
    found, wanted = (run(graph, {"x": x}, params) for run in (layer, layer.reference))
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-12)
    pull, leaves = torch.randn_like(wanted), [x, *params.values()]
    grads = [
        torch.autograd.grad((out * pull).sum(), leaves, allow_unused=True, materialize_grads=True)
        for out in (found, wanted)
    ]
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("message", WHERE, ids=lambda m: m.__name__)
def test_in_the_smallest_space(message: Any) -> None:
    graph = graph_of("hubs", in_order=False)
    x, params = tensors(graph)
    steps = rel.layer(message).program(graph, {"x": x}, params).steps
    assert set(WHERE[message]) <= set(steps) or steps[-1][0] == LINEAR, steps
    products = {space for what, space in steps if what == "product"}
    assert products == {space for what, space in WHERE[message] if what == "product"} or steps[-1][0] == LINEAR
    if message not in (typed_after_relation, hgt):
        assert not [
            step for step in steps if step[1] == "edges" and step[0] in ("product", "einsum", "bmm", "matmul")
        ], steps


def test_a_detached_product_has_no_gradient() -> None:
    """Not even where the product itself is never made."""
    graph = graph_of("hubs", in_order=True)
    x, params = tensors(graph)

    def message(e: Any, p: Any) -> Tensor:
        m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1).detach()
        return e.src.x[:, :4] * (m * p.W[e.type][:, 0]).sum(-1)[:, None]

    layer = rel.layer(message)
    grads = [
        torch.autograd.grad(run(graph, {"x": x}, params).square().sum(), [x, params["W"]]) for run in (layer, layer.reference)
    ]  # fmt: skip
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(*grads, strict=True))


def test_dtypes_are_those_of_the_function() -> None:
    """A weight in float64 makes messages of float64, and no sum of them float32."""
    graph = graph_of("hubs", in_order=True)
    x = torch.randn(graph.num_nodes, 4)
    for message in (
        lambda e, p: p.w[e.type][:, None] * e.src.x,
        lambda e, p: (e.src.x * e.src.x.double()).sum(-1, keepdim=True) * e.src.x,
        lambda e, p: (e.src.x > 0)[:, :1] * e.dst.x,
        lambda e, p: (e.src.x * p.v[e.type]).sum(-1, dtype=torch.float64),
    ):
        layer, params = rel.layer(message), {"w": torch.randn(5, dtype=torch.float64), "v": torch.randn(5, 4)}
        found, wanted = (run(graph, {"x": x}, params) for run in (layer, layer.reference))
        assert found.dtype == wanted.dtype and torch.allclose(found, wanted, atol=1e-5)


def test_one_relation_keeps_its_dimension() -> None:
    """Over edges squeeze() leaves dimension 0 alone, so it does where there is one row."""
    graph = graph_of("one relation", in_order=True)
    x, params = tensors(graph)
    for message in (
        lambda e, p: p.W[e.type][:, :1].squeeze() + e.src.x[:, :4],
        lambda e, p: p.W[e.type].squeeze(0)[:, 0] + e.src.x[:, :4],
    ):
        layer = rel.layer(message)
        found, wanted = (run(graph, {"x": x}, params) for run in (layer, layer.reference))
        assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-12)


def attention(e: Any, p: Any) -> Tensor:
    m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    a = rel.edge_softmax(F.leaky_relu((e.dst.x * p.u[e.type]).sum(-1) + (m * p.v[e.type]).sum(-1)))
    return a[:, None] * m


@pytest.mark.parametrize("name", NAMES)
def test_dots_of_both_sides_read_rows_once(name: str) -> None:
    src, dst, etype, nodes, relations = edges_of(name)
    graph = rel.RelGraph(src, dst, etype, num_nodes=nodes, num_relations=relations)
    x = torch.randn(nodes, 6, dtype=torch.float64, requires_grad=True)
    params = {"W": (relations, 6, 4), "u": (relations, 6), "v": (relations, 4)}
    given = {n: torch.randn(shape, dtype=torch.float64, requires_grad=True) for n, shape in params.items()}
    layer = rel.layer(attention)
    called = [node.target for node in layer.program(graph, {"x": x}, given).module.graph.nodes]
    assert called.count(spaces.dots_with_relations) == 1 and spaces.dot_with_relations not in called
    results = [run(graph, {"x": x}, given) for run in (layer, layer.reference)]
    pull = torch.randn_like(results[0])
    found, wanted = (torch.autograd.grad(out, [x, *given.values()], pull) for out in results)
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(found, wanted)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def weighted(e: Any, p: Any) -> Tensor:
    return e.a[:, None] * (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


@pytest.mark.parametrize(("name", "product"), [("few destinations", "scattered_mm"), ("few sources", "gathered_mm")])
def test_no_rows_beside_a_product_whose_rows_are_of_one_node_each(name: str, product: str) -> None:
    """Neither the rows that a product reads nor those of its gradient are copied."""
    graph = made(name)
    x = torch.randn(graph.num_nodes, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(graph.num_relations, 3, 2, dtype=torch.float64, requires_grad=True)
    with Seen() as seen:
        rel.layer(weighted)(graph, {"x": x}, {"W": w}, {"a": torch.rand(graph.num_edges).double()}).sum().backward()
    named = [name for name in seen.names if name.startswith("ws::")]
    assert f"ws::{product}" in named and "ws::gathered_mm_weights" in named and "ws::take_rows" not in named
    assert not {"ws::grouped_mm", "ws::grouped_mm_weights"} & set(named) and named.count("ws::gather_sum") == 2


def test_a_sum_without_weights_keeps_no_rows() -> None:
    """On a graph where one destination pair has many edges, rows are summed, multiplied, and handed to nodes without weights."""
    edges = torch.arange(40), torch.arange(40) % 3, torch.zeros(40, dtype=torch.int64)
    graph = rel.RelGraph(*edges, num_nodes=40, num_relations=1)
    assert graph.rows.spread.edge is None and graph.rows.gathered.edge is not None
    x, kept = torch.randn(40, 6, requires_grad=True), []
    given = {n: torch.randn(shape, requires_grad=True) for n, shape in (("W", (1, 6, 4)), ("u", (1, 6)), ("v", (1, 4)))}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rel.layer(attention)(graph, {"x": x}, given)
    assert not [t for t in kept if t.is_floating_point() and t.shape == (3, 4)]  # products of pairs
