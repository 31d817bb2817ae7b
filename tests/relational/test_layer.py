"""Message functions: over index spaces against edge by edge, outputs and all gradients; what cannot be traced, by its line."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import NAMES, made
from torch import Tensor, nn

import wholestep
from wholestep import relational as rel
from wholestep.capture.dry import dry_capture
from wholestep.errors import BadOption
from wholestep.relational.follow import Asked, follow
from wholestep.relational.graph import RelGraph

WIDE, OUT = 6, 4


def rgcn(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


def rgat(e: Any, p: Any) -> Tensor:
    m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    a = rel.edge_softmax(F.leaky_relu((e.dst.x * p.u[e.type]).sum(-1) + (m * p.v[e.type]).sum(-1)))
    return a[:, None] * m


def gcn(e: Any, p: Any) -> Tensor:
    return e.src.x @ p.A


def gated(e: Any, p: Any) -> Tensor:
    """Not linear in its source."""
    return torch.relu((e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)) * torch.sigmoid(
        (e.dst.x * p.u[e.type]).sum(-1, True)
    )


def featured(e: Any, p: Any) -> Tensor:
    """Features of edges, by a matrix of their relation."""
    own = (e.x.unsqueeze(1) @ p.B[e.type]).squeeze(1)
    return torch.tanh(own + e.src.x @ p.A) * (e.dst.x * e.src.x).sum(-1, keepdim=True)


def of_the_destination(e: Any, p: Any) -> Tensor:
    return (e.dst.x.unsqueeze(1) @ p.W[e.type]).squeeze(1) + p.v[e.type]


def heads(e: Any, p: Any) -> Tensor:
    """Two heads that share a matrix, with a weight each."""
    m = e.src.x.reshape(-1, 2, 3) @ p.H[e.type]
    return rel.edge_softmax((m * m).sum(-1)).unsqueeze(-1) * m


def own_heads(e: Any, p: Any) -> Tensor:
    """A matrix per relation and head, softmax within a relation."""
    m = (e.src.x.reshape(-1, 2, 1, 3) @ p.HH[e.type]).squeeze(2)
    return rel.edge_softmax((m * e.dst.x[:, :1, None]).sum(-1), within_relation=True).unsqueeze(-1) * m


def folded(e: Any, p: Any) -> Tensor:
    """A product with a matrix that all relations share goes into theirs."""
    m = (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)
    return (m @ p.C) * rel.edge_softmax(
        ((e.dst.x.unsqueeze(1) @ p.W[e.type]).squeeze(1) @ p.C)[:, :1], within_relation=True
    )


MESSAGES = (rgcn, rgat, gcn, gated, featured, of_the_destination, heads, own_heads, folded)


def tensors(graph: RelGraph, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    sizes = {"W": (WIDE, OUT), "u": (WIDE,), "v": (OUT,), "B": (3, OUT), "H": (3, OUT)}
    params = {n: torch.randn(graph.num_relations, *s, dtype=dtype) for n, s in sizes.items()}
    params["HH"] = torch.randn(graph.num_relations, 2, 3, OUT, dtype=dtype)
    params["A"], params["C"] = torch.randn(WIDE, OUT, dtype=dtype), torch.randn(OUT, 2, dtype=dtype)
    x, own = torch.randn(graph.num_nodes, WIDE, dtype=dtype), torch.randn(graph.num_edges, 3, dtype=dtype)
    return x.requires_grad_(), own.requires_grad_(), {n: p.requires_grad_() for n, p in params.items()}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
@pytest.mark.parametrize(
    ("name", "aggregate"),
    [(name, "sum") for name in NAMES]
    + [(n, how) for n in ("hubs", "no edges") for how in ("mean", "max", "mean per relation")],
)
def test_it_is_the_message_function_edge_by_edge(name: str, message: Any, aggregate: str) -> None:
    graph = made(name)
    x, own, params = tensors(graph)
    edges = {"x": own} if message is featured else None
    layer = rel.layer(message, aggregate=aggregate)
    found, wanted = (f(graph, {"x": x}, params, edges) for f in (layer, layer.reference))
    assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-12)
    pull, leaves = torch.randn_like(wanted), [x, own, *params.values()]
    for one, other in zip(*(torch.autograd.grad((f * pull).sum(), leaves, allow_unused=True) for f in (found, wanted))):
        assert torch.allclose(*(torch.zeros(()) if g is None else g for g in (one, other)), atol=1e-10)


def test_the_largest_message_gets_the_gradient_though_it_is_zero() -> None:
    """Messages that tie share it; those of a node are as many as come in, whatever their value."""
    graph = RelGraph([0, 1, 2, 0, 1], [3, 3, 4, 5, 5], [0] * 5, num_nodes=7)
    x = torch.tensor([0.0, -1.0, 0.0, 9.0, 9.0, 9.0, 9.0], dtype=torch.float64).unsqueeze(1).requires_grad_()
    shift = torch.zeros(7, 1, dtype=torch.float64, requires_grad=True)
    layer = rel.layer(lambda e, p: e.src.x * (e.src.x + 1) - e.dst.shift, aggregate="max")
    for run in (layer, layer.reference):
        out = run(graph, {"x": x, "shift": shift})
        assert out.flatten().tolist() == [0.0] * 7
        of_x, of_shift = torch.autograd.grad(out.sum(), [x, shift])
        assert of_x.flatten().tolist() == [1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
        assert of_shift.flatten().tolist() == [0.0, 0.0, 0.0, -1.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_per_relation_and_id(name: str) -> None:
    graph = made(name)
    ids = torch.arange(graph.num_nodes) % 5
    tables = torch.randn(graph.num_relations, 5, OUT, dtype=torch.float64, requires_grad=True)
    layer = rel.layer(lambda e, p: p.T[e.type, e.src.id], aggregate="mean per relation")
    found, wanted = (f(graph, {"id": ids}, {"T": tables}) for f in (layer, layer.reference))
    assert torch.allclose(found, wanted, atol=1e-12)
    grads = [torch.autograd.grad(f.square().sum(), tables)[0] for f in (found, wanted)]
    assert torch.allclose(*grads, atol=1e-12)


def test_gradcheck() -> None:
    graph = made("loops, edges twice")
    x, _, params = tensors(graph)
    layer = rel.layer(rgat)

    def run(x: Tensor, W: Tensor, u: Tensor, v: Tensor) -> Tensor:
        return layer(graph, {"x": x}, {"W": W, "u": u, "v": v})

    assert torch.autograd.gradcheck(run, (x, params["W"], params["u"], params["v"]))


def test_bits_repeat() -> None:
    graph = made("hubs")
    x, _, params = tensors(graph, torch.float32)
    runs = []
    for _ in range(2):
        out = rel.layer(rgat)(graph, {"x": x}, params)
        runs.append([out.detach(), *torch.autograd.grad(out.square().sum(), [x, params["W"], params["u"]])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_what_is_computed_where() -> None:
    """Numbers per pair, weights folded per relation, one number per edge: no vector per edge or pair."""
    graph = made("hubs")
    x, _, params = tensors(graph)
    steps = rel.layer(rgat).program(graph, {"x": x}, params).steps
    assert ("fold", "relations") in steps and ("dots with relations of both sides", "source nodes") in steps
    assert steps[-1][0].startswith("weighted sum of products")
    told = rel.layer(rgat).explain(graph, {"x": x}, params)
    assert "the better side per relation" in told and "leaky_relu" in told


class Net(nn.Module):
    def __init__(self, graph: RelGraph) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.x = nn.Embedding(graph.num_nodes, WIDE)
        self.W = nn.Parameter(torch.randn(graph.num_relations, WIDE, OUT) * 0.3)
        self.u, self.v = (nn.Parameter(torch.randn(graph.num_relations, n)) for n in (WIDE, OUT))
        self.head, self.layer, self.plain = nn.Linear(OUT, 3), rel.layer(rgat), False

    def forward(self, graph: RelGraph) -> Tensor:
        run = self.layer.reference if self.plain else self.layer
        return self.head(torch.relu(run(graph, {"x": self.x.weight}, {"W": self.W, "u": self.u, "v": self.v})))


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_batch", [False, True], ids=["closure", "batch"])
def test_a_whole_step(backend: str, in_batch: bool) -> None:
    graph = made("hubs")
    labels = torch.randint(0, 3, (graph.num_nodes,), generator=torch.Generator().manual_seed(0))
    batch = {"labels": labels, "graph": graph} if in_batch else {"labels": labels}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.get("graph", graph)), batch["labels"])

    model = Net(graph)
    plain = copy.deepcopy(model)
    plain.plain = True
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    step = wholestep.compile(model, loss, optimizers[0], batch, backend=backend, cache=False)
    for _ in range(4):
        optimizers[1].zero_grad()
        wanted = loss(plain, batch)
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(batch), wanted.detach())
    assert step.rung == "whole step" and not step.falls
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_bad_calls_are_told() -> None:
    graph = made("plain")
    x, _, params = tensors(graph)
    with pytest.raises(BadOption, match=r"nodes\['x'\] has shape \(3, 6\).*20 rows"):
        rel.layer(rgcn)(graph, {"x": x[:3]}, params)
    with pytest.raises(BadOption, match=r"aggregate='median'.*sum, mean, max"):
        rel.layer(rgcn, aggregate="median")
    with pytest.raises(
        BadOption, match=r"params\['W'\] has shape \(3, 6, 4\), and the graph has 4 relations.*number 3"
    ):
        rel.layer(rgcn)(graph, {"x": x}, {"W": params["W"][:3]})
    with pytest.raises(BadOption, match=r"the graph has no node types.*ntype="):
        rel.layer(lambda e, p: e.src.x * p.v[e.src.type])(graph, {"x": x}, {"v": params["u"]})
    for nodes, given, told in (
        (None, params, "nodes is a NoneType.*dictionary"), ({"x": x}, x, "params is a Tensor"), ({"x": x}, [x], "params is a list"),
        ({"x": x}, {"W": None}, r"params\['W'\] is a NoneType"), ({"x": x.tolist()}, params, r"nodes\['x'\] is a list"),
        ({1: x}, params, "nodes has 1"),
    ):  # fmt: skip
        for call in (rel.layer(rgcn), rel.layer(rgcn).reference):
            with pytest.raises(BadOption, match=told):
                call(graph, nodes, given)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="nodes has a 'type'"):
        rel.layer(rgcn)(graph, {"x": x, "type": x}, params)
    with pytest.raises(BadOption, match="edge_softmax outside of a message function"):
        rel.edge_softmax(torch.zeros(3))


def test_autocast_is_traced_apart() -> None:
    """A program holds the casts of autocast; what was made without it is another one."""
    graph = made("hubs")
    model = Net(graph)
    wide = model(graph)
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(graph)
    assert (wide.dtype, narrow.dtype, len(model.layer.programs)) == (torch.float32, torch.bfloat16, 2)
    assert torch.equal(model(graph), wide) and torch.allclose(narrow.float(), wide, atol=0.1)
    step = wholestep.compile(
        model, lambda m, b: m(graph).float().square().mean() + b.sum(), torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(1),
        precision="bf16", backend="interpret", cache=False,
    )  # fmt: skip
    losses = [float(step(torch.zeros(1))) for _ in range(3)]
    assert step.rung == "whole step" and losses[2] < losses[0]


def without_autocast(e: Any, p: Any) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return e.src.x @ p.A + (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


@pytest.mark.parametrize("message", [
    lambda e, p: torch.einsum("nhi,nhio->nho", (e.src.x @ p.A).reshape(-1, 2, 2), p.HH[e.type, :, :2]),  # bf16 and float32
    lambda e, p: torch.einsum("ni,no,n->nio", e.src.x, p.v[e.type], e.dst.x[:, 0]),  # nothing is summed over
    lambda e, p: torch.einsum("ni,nio,n->no", e.src.x, p.W[e.type], e.dst.x[:, 0]),  # and then something is not
    lambda e, p: F.linear(e.src.x.reshape(-1, 2, 3), p.H[0].t(), p.v[0]),
    lambda e, p: F.bilinear(e.src.x, e.dst.x, p.W.permute(0, 2, 1)[:, :1].expand(-1, 6, -1).contiguous(), p.W[:, 0, 0]),
    lambda e, p: (e.src.x.reshape(-1, 2, 3) @ p.H[0]) * e.dst.x[:, :1, None],
    own_heads, rgat, without_autocast,
])  # fmt: skip
@pytest.mark.parametrize("captured", [False, True])
def test_autocast_gives_the_dtypes_of_eager(message: Any, captured: bool) -> None:
    """And its roundings, no others: what is in float32 stays there."""
    graph = made("plain")
    x, _, params = tensors(graph, torch.float32)
    layer, leaves, seen = rel.layer(message), [x, *params.values()], []
    pull: Any = None
    for call in (layer.reference, layer):
        with torch.autocast("cpu", torch.bfloat16):
            run = torch.compile(call, backend="eager") if captured and call is layer else call
            out = run(graph, {"x": x}, params)
        pull = torch.randn(out.shape) if pull is None else pull
        seen.append([out, *torch.autograd.grad((out * pull).sum(), leaves, allow_unused=True, materialize_grads=True)])
    exact = layer.reference(graph, {"x": x}, params)
    exact = [exact, *torch.autograd.grad((exact * pull).sum(), leaves, allow_unused=True, materialize_grads=True)]
    assert seen[1][0].dtype == seen[0][0].dtype
    for wanted, found, right in zip(*seen, exact, strict=True):
        theirs, ours = ((t.float() - right).norm() for t in (wanted, found))
        assert ours <= 3 * theirs + 1e-5 * right.norm() + 1e-5


def test_autocast_of_a_gpu_has_its_own_rules() -> None:
    """Powers are in float32 there, and in what they are given on a CPU."""
    layer = rel.layer(lambda e, p: (e.src.x @ p.W).exp())
    graph = made("plain")
    x, W = torch.randn(graph.num_nodes, 8), torch.randn(8, 8)
    shapes = (("nodes", "x", (8,), torch.float32), ("params", "W", (8, 8), torch.float32))
    kinds = [
        follow(layer.message, Asked("sum", shapes, (torch.bfloat16, device))).program.module(graph, x, W).dtype
        for device in ("cpu", "cuda")
    ]
    assert kinds == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["one head", "heads"])
@pytest.mark.parametrize("linear", [False, True], ids=["nodes", "products"])
@pytest.mark.parametrize("turned", [False, True], ids=["as it is", "turned round"])
def test_products_of_both_ends_need_no_rows_of_edges(shape: tuple[int, ...], linear: bool, turned: bool) -> None:
    """Whichever side has fewer pairs."""

    def message(e: Any, p: Any) -> Tensor:
        k = e.src.k
        if linear:
            k = (k.unsqueeze(-2) @ p.A[e.type]).squeeze(-2)
        return (k * e.dst.q).sum(-1)

    graph = made("hubs")
    if turned:
        (src, dst), etype = graph.given()
        graph = RelGraph(dst, src, etype, num_nodes=graph.num_nodes, num_relations=graph.num_relations)
    torch.manual_seed(0)
    nodes = {name: torch.randn(graph.num_nodes, *shape, dtype=torch.float64, requires_grad=True) for name in "kq"}
    params = {"A": torch.randn(graph.num_relations, *shape, shape[-1], dtype=torch.float64, requires_grad=True)}
    layer = rel.layer(message)
    steps = layer.program(graph, nodes, params).steps
    assert any(what.startswith("dot") for what, _ in steps) and ("mul", "edges") not in steps
    used = [*nodes.values(), *(params.values() if linear else ())]
    ours, plain = layer(graph, nodes, params), layer.reference(graph, nodes, params)
    pull = torch.randn_like(ours)
    torch.testing.assert_close(ours, plain)
    for mine, theirs in zip(torch.autograd.grad(ours, used, pull), torch.autograd.grad(plain, used, pull), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_capture_without_data_makes_the_program_by_itself() -> None:
    graph = made("plain")
    model = Net(graph)
    captured = dry_capture(
        model, lambda m, b: F.cross_entropy(m(graph), b), torch.optim.AdamW(model.parameters()),
        torch.zeros(graph.num_nodes, dtype=torch.int64), device="cpu",
    )  # fmt: skip
    assert any("gather_sum" in str(node.target) for node in captured.graph.operations())


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_what_is_drawn_is_drawn_for_every_edge(backend: str) -> None:
    """Not once per pair: edges that share a source and a relation drop other things."""
    hub = RelGraph([0] * 400, range(1, 401), [0] * 400)
    weight = nn.Parameter(torch.ones(1))
    layer = rel.layer(lambda e, p: F.dropout(e.src.x * p.w, 0.5, True))

    def run(w: Tensor) -> Tensor:
        return layer(hub, {"x": torch.ones(401, 1)}, {"w": w})

    if backend == "eager":
        kept = run(weight).detach().sum() / 2
    else:
        model = nn.Module()
        model.weight = weight
        step = wholestep.compile(
            model, lambda m, b: run(m.weight).sum() + b.sum(), torch.optim.SGD([weight], lr=0.0), torch.zeros(1),
            backend="interpret", cache=False,
        )  # fmt: skip
        kept = step(torch.zeros(1)) / 2
        assert step.rung == "whole step"
    assert 120 < float(kept) < 280


def test_the_derivative_drops_what_was_dropped() -> None:
    graph, weight = made("hubs"), torch.ones(1, dtype=torch.float64, requires_grad=True)
    x = torch.randn(graph.num_nodes, 3, dtype=torch.float64)
    out = rel.layer(lambda e, p: F.dropout(e.src.x * p.w, 0.5))(graph, {"x": x}, {"w": weight})
    assert torch.allclose(torch.autograd.grad(out.sum(), weight)[0], out.detach().sum())


def test_a_parameter_that_is_dropped_is_dropped_once() -> None:
    layer = rel.layer(lambda e, p: (e.src.x.unsqueeze(1) @ F.dropout(p.W, 0.5)[e.type]).squeeze(1))
    out = layer(RelGraph([0, 0], [1, 2], [0, 0]), {"x": torch.ones(3, 1)}, {"W": torch.ones(1, 1, 64)})
    assert torch.equal(out[1], out[2]) and 0 < int((out[1] == 0).sum()) < 64


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            lambda e, p: e.src.y,
            r"the message function reads 'y', which is not given \(at test_layer.py:\d+\). there are .*x",
        ),
        (lambda e, p: e.src.x @ p.W, r"reads 'W', which is not given \(at test_layer.py:\d+\). there are A"),
        (lambda e, p: e.src.x @ p.A, r"the message function fails: RuntimeError: mat1 and mat2 shapes .*test_layer.py"),
        (lambda e, p: torch.relu(e.src.x, 1, 2), r"fails: TypeError: .*test_layer.py"),
    ],
)
def test_what_fails_by_itself_is_told_in_its_own_words(message: Any, told: str) -> None:
    graph = made("plain")
    given = {"x": torch.randn(graph.num_nodes, 6)}, {"A": torch.randn(5, 4)}
    with pytest.raises(BadOption, match=told):
        rel.layer(message)(graph, *given)


def test_what_is_no_function_and_no_graph_is_refused() -> None:
    with pytest.raises(BadOption, match=r"message=5. give a function"):
        rel.layer(5)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"the graph is a str. give a RelGraph"):
        rel.layer(lambda e, p: e.src.x)("graph", {"x": torch.randn(2, 3)})  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"num_nodes=2.5. it is a count"):
        rel.RelGraph([0], [1], [0], num_nodes=2.5)  # type: ignore[arg-type]
