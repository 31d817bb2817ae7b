"""Relational layers against torch_geometric's: outputs, all gradients, state dicts; and its layers converted into ours."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import NAMES, edges_of
from torch import Tensor, nn

import wholestep
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.nn.relational import convert as converting
from wholestep.relational import RelGraph

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is what the layers are compared with")
WIDE, OUT = 6, 4
RGCN: list[dict[str, Any]] = [
    {}, {"aggr": "add", "bias": False}, {"num_bases": 3}, {"num_blocks": 2}, {"num_blocks": 2, "aggr": "sum", "root_weight": False},
]  # fmt: skip
MULTIPLIED = "multiplicative-self-attention"
RGAT: list[dict[str, Any]] = [
    {}, {"heads": 2, "attention_mechanism": "within-relation"}, {"heads": 2, "concat": False, "num_bases": 2},
    {"heads": 2, "dim": 3, "attention_mode": MULTIPLIED}, {"heads": 2, "num_blocks": 2, "mod": "scaled"},
    {"heads": 2, "edge_dim": 3, "mod": "f-scaled"}, {"mod": "f-additive", "bias": False},
    {"dim": 2, "attention_mode": MULTIPLIED, "mod": "additive", "concat": False, "edge_dim": 3}, {"heads": 2, "dropout": 0.4},
    {"heads": 2, "num_blocks": 2, "mod": "additive", "negative_slope": 0.1},
]  # fmt: skip


def edges(name: str) -> tuple[Tensor, Tensor, int, int]:
    src, dst, etype, nodes, relations = edges_of(name)
    if relations == 500:  # theirs loops over relations: fewer will do
        etype, relations = etype % 70, 70
    return torch.stack([src, dst]), etype, nodes, relations


def made(name: str) -> RelGraph:
    index, etype, nodes, relations = edges(name)
    return RelGraph(*index, etype, num_nodes=nodes, num_relations=relations)


def both(kind: str, dtype: torch.dtype, *args: Any, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """(theirs, ours) with equal parameters, through both state dicts."""
    torch.manual_seed(4)
    theirs = getattr(pyg, kind)(*args, **settings).to(dtype)
    with torch.no_grad():  # some of theirs are never initialised
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
    ours = getattr(wholestep.nn, kind.removeprefix("Fast"))(*args, **settings).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def same(layers: tuple[nn.Module, nn.Module], inputs: list[Tensor], *calls: Any, rtol: float = 1e-9) -> None:
    """Outputs and gradients, where `calls[i]` runs layer i."""
    outcomes = []
    for layer, call in zip(layers, calls, strict=True):
        torch.manual_seed(5)
        out = call(layer)
        outs = list(out.values()) if isinstance(out, dict) else [out]
        pulled = sum((o * torch.arange(o.numel()).cos().reshape(o.shape)).sum() for o in outs)
        leaves = [*inputs, *layer.parameters()]
        grads = torch.autograd.grad(pulled, leaves, allow_unused=True)
        outcomes.append(outs + list(grads))
    for wanted, found in zip(*outcomes, strict=True):
        assert (wanted is None) == (found is None)
        if wanted is not None:
            torch.testing.assert_close(
                found, wanted, atol=rtol * max(1.0, float(wanted.detach().abs().sum())), rtol=rtol
            )


def every(settings: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """All settings with two graphs, two settings with all graphs."""
    return [(name, s) for name in NAMES for s in (settings if name in ("hubs", "loops, edges twice") else settings[:2])]


@pytest.mark.parametrize(("name", "settings"), every(RGCN), ids=str)
def test_rgcn(name: str, settings: dict[str, Any]) -> None:
    index, etype, nodes, relations = edges(name)
    layers = both("RGCNConv", torch.float64, WIDE, OUT, relations, **settings)
    x = torch.randn(nodes, WIDE, dtype=torch.float64, requires_grad=True)
    same(layers, [x], *[lambda layer: layer(x, index, etype)] * 2)
    assert torch.equal(layers[1](x, made(name)), layers[1](x, index, etype))


@pytest.mark.parametrize("settings", RGCN, ids=str)
def test_fast_rgcn(settings: dict[str, Any]) -> None:
    index, etype, nodes, relations = edges("hubs")
    layers = both("FastRGCNConv", torch.float64, WIDE, OUT, relations, **settings)
    x = torch.randn(nodes, WIDE, dtype=torch.float64, requires_grad=True)
    same(layers, [x], *[lambda layer: layer(x, index, etype)] * 2)


@pytest.mark.parametrize("settings", [{}, {"num_bases": 2, "aggr": "add"}], ids=str)
def test_rgcn_of_ids_and_of_two_sets_of_nodes(settings: dict[str, Any]) -> None:
    index, etype, nodes, relations = edges("hubs")
    layers = both("RGCNConv", torch.float64, nodes, OUT, relations, **settings)
    for x in (None, torch.arange(nodes).flip(0), (None, torch.arange(nodes))):
        same(layers, [], *[lambda layer, x=x: layer(x, index, etype)] * 2)
    layers = both("RGCNConv", torch.float64, (WIDE, 5), OUT, relations, **settings)
    for more in (0, 7):
        sources = torch.randn(nodes + more, WIDE, dtype=torch.float64, requires_grad=True)
        own = torch.randn(nodes + 3, 5, dtype=torch.float64, requires_grad=True)
        same(layers, [sources, own], *[lambda layer, pair=(sources, own): layer(pair, index, etype)] * 2)


@pytest.mark.parametrize(("name", "settings"), every(RGAT), ids=str)
def test_rgat(name: str, settings: dict[str, Any]) -> None:
    index, etype, nodes, relations = edges(name)
    layers = both("RGATConv", torch.float64, WIDE, OUT, relations, **settings)
    x = torch.randn(nodes, WIDE, dtype=torch.float64, requires_grad=True)
    own = [torch.randn(index.shape[1], 3, dtype=torch.float64, requires_grad=True)] if "edge_dim" in settings else []
    same(layers, [x, *own], *[lambda layer: layer(x, index, etype, *own)] * 2)
    found, wanted = (layers[1].eval()(x, *told, *own) for told in ((made(name), None), (index, etype)))
    assert torch.equal(found, wanted)


TYPES = ["paper", "author", "venue"]
RELATIONS = [
    ("author", "writes", "paper"),
    ("paper", "cites", "paper"),
    ("paper", "by", "author"),
    ("venue", "has", "paper"),
]


def typed(
    dtype: torch.dtype, wide: dict[str, int], skip: int | None = None
) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    torch.manual_seed(6)
    counts = {"paper": 9, "author": 7, "venue": 3}
    x = {name: torch.randn(counts[name], wide[name], dtype=dtype, requires_grad=True) for name in TYPES}
    index = {
        edge: torch.stack([torch.randint(0, counts[end], (15 * (i != 1),)) for end in (edge[0], edge[2])])
        for i, edge in enumerate(RELATIONS)
        if i != skip
    }
    return x, index


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("skip", [None, 2], ids=["all", "one not given"])
@pytest.mark.parametrize("wide", [{"paper": 8, "author": 5, "venue": 8}, 6], ids=["by type", "one"])
def test_hgt(heads: int, skip: int | None, wide: Any) -> None:
    layers = both("HGTConv", torch.float64, wide, 8, (TYPES, RELATIONS), heads)
    x, index = typed(torch.float64, wide if isinstance(wide, dict) else dict.fromkeys(TYPES, wide), skip)
    same(layers, list(x.values()), *[lambda layer: layer(x, index)] * 2)
    if skip is None:
        same(layers, list(x.values()), lambda m: m(x, index), lambda m: m(x, m.graph(x, index)))


def test_float32() -> None:
    index, etype, nodes, relations = edges("hubs")
    x = torch.randn(nodes, WIDE, requires_grad=True)
    for kind in ("RGCNConv", "RGATConv"):
        layers = both(kind, torch.float32, WIDE, OUT, relations)
        same(layers, [x], *[lambda layer: layer(x, index, etype)] * 2, rtol=1e-5)
    features, by_type = typed(torch.float32, dict.fromkeys(TYPES, 8))
    layers = both("HGTConv", torch.float32, 8, 8, (TYPES, RELATIONS), 2)
    same(layers, list(features.values()), *[lambda layer: layer(features, by_type)] * 2, rtol=1e-5)


def test_tables_are_made_once_and_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    index, etype, nodes, relations = edges("plain")
    layers = both("RGCNConv", torch.float64, WIDE, OUT, relations)
    x, built = torch.randn(nodes, WIDE, dtype=torch.float64), []
    init = RelGraph.__init__
    monkeypatch.setattr(RelGraph, "__init__", lambda *a, **k: (built.append(1), init(*a, **k))[1])
    for _ in range(3):
        layers[1](x, index, etype)
    assert len(built) == 1
    index[0, 0] = (index[0, 0] + 1) % nodes
    etype[3] = (etype[3] + 1) % relations
    torch.testing.assert_close(layers[1](x, index, etype), layers[0](x, index, etype))
    assert len(built) == 2
    features, by_type = typed(torch.float64, dict.fromkeys(TYPES, 6))
    layers = both("HGTConv", torch.float64, 6, 8, (TYPES, RELATIONS), 2)
    for _ in range(2):
        layers[1](features, by_type)
    assert len(built) == 3
    by_type[RELATIONS[0]][0, 0] = (by_type[RELATIONS[0]][0, 0] + 1) % 7
    torch.testing.assert_close(layers[1](features, by_type), layers[0](features, by_type))
    assert len(built) == 4


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda nn: nn.RGCNConv(6, 4, 3, aggr="max"), NotBuiltYet, "aggr='max'"),
        (lambda nn: nn.RGCNConv(6, 4, 3, num_bases=2, num_blocks=2), BadOption, "num_bases and num_blocks together"),
        (lambda nn: nn.RGCNConv(6, 4, 3, num_blocks=4), BadOption, "in_channels is 6, and num_blocks=4"),
        (lambda nn: nn.RGCNConv(6, 4, 3, flow="target_to_source"), NotBuiltYet, "flow='target_to_source'"),
        (lambda nn: nn.RGATConv(6, 4, 3, mod="more"), BadOption, "mod='more'"),
        (lambda nn: nn.RGATConv(6, 4, 3, dim=2), BadOption, "dim=2"),
        (lambda nn: nn.RGATConv(6, 4, 3, dropout=0.1, mod="scaled"), BadOption, "dropout=0.1 with mod='scaled'"),
        (lambda nn: nn.HGTConv(-1, 4, (TYPES, RELATIONS)), NotBuiltYet, "in_channels=-1"),
        (lambda nn: nn.HGTConv(6, 4, (TYPES, RELATIONS), 3), BadOption, "out_channels=4 with heads=3"),
        (lambda nn: nn.RGCNConv(6, 4, 3)(torch.zeros(5, 6), made("plain")), BadOption, "20 nodes and 4 relations"),
        (lambda nn: nn.RGCNConv(6, 4, 3)(torch.zeros(5, 6), torch.zeros(2, 1).long()), BadOption, "edge_type is missing"),
        (lambda nn: nn.RGATConv(6, 4, 4)(torch.zeros(20, 6), made("plain"), size=(2, 2)), NotBuiltYet, "size="),
    ],
)  # fmt: skip
def test_what_is_refused(call: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        call(wholestep.nn)


class Net(nn.Module):
    def __init__(self, nodes: int, relations: int, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.x = nn.Embedding(nodes, WIDE)
        self.first = pyg.RGCNConv(WIDE, 8, relations, num_bases=2)
        self.second = pyg.RGATConv(8, 3, relations, **more)
        nn.init.normal_(self.second.l2)

    def forward(self, *edges: Any) -> Tensor:
        return self.second(torch.relu(self.first(self.x.weight, *edges)), *edges)


def test_converted_layers_share_parameters_and_agree() -> None:
    index, etype, nodes, relations = edges("hubs")
    model = Net(nodes, relations, dropout=0.3)
    before, wanted = dict(model.named_parameters()), copy.deepcopy(model).eval()(index, etype)
    report = wholestep.nn.convert_relational(model)
    assert report.replaced == {"first": "RGCNConv", "second": "RGATConv"} and not report.left
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    torch.testing.assert_close(model.eval()(index, etype), wanted)
    assert isinstance(model.first, wholestep.nn.RGCNConv) and "forward" not in vars(model.first)
    assert all(p.grad is None for p in model.parameters()) and "2 replaced, 0 left" in str(report)


def test_what_is_left_and_why() -> None:
    hetero = pyg.HeteroConv({("a", "to", "a"): pyg.SAGEConv(4, 4)})
    model = nn.ModuleDict({
        "largest": pyg.RGCNConv(4, 4, 2, aggr="max"), "hetero": hetero, "turned": pyg.RGATConv(4, 4, 2, flow="target_to_source"),
        "late": pyg.HGTConv(-1, 4, (TYPES, RELATIONS)), "hooked": pyg.RGCNConv(4, 4, 2), "fast": pyg.FastRGCNConv(4, 4, 2),
        "hgt": pyg.HGTConv(4, 4, (TYPES, RELATIONS)),
    })  # fmt: skip
    model["hooked"].register_forward_hook(lambda *_: None)
    report = wholestep.nn.convert_relational(model)
    assert report.replaced == {"fast": "FastRGCNConv", "hgt": "HGTConv"}
    told = {
        "largest": "aggr='max'",
        "hetero": "one relation each",
        "turned": "flow=",
        "late": "in_channels=-1",
        "hooked": "hooks",
    }
    assert report.left.keys() == told.keys() and all(part in report.left[path] for path, part in told.items())
    assert all(
        isinstance(model[path], nn.Module) and "torch_geometric" in type(model[path]).__module__ for path in told
    )
    assert "largest: aggr='max'" in str(report)
    x, index = typed(torch.float32, dict.fromkeys(TYPES, 4))
    wanted = copy.deepcopy(model["hgt"])(x, index)
    hgt = model["hgt"]
    found = hgt(x, hgt.graph(x, index))
    assert "hgt" in report.replaced and model["hgt"] is hgt and "forward" not in vars(hgt)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)
    assert wholestep.nn.convert_relational(nn.Linear(2, 2)) == converting.Report()


@pytest.mark.parametrize("fault", ["output", "gradient"])
def test_the_original_comes_back_where_numbers_differ(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index, etype, nodes, relations = edges("plain")
    model = Net(nodes, relations)
    wanted, first = model(index, etype), model.first
    whole = wholestep.nn.RGCNConv._gathered

    def wrong(self: Any, graph: RelGraph, x: Tensor) -> Tensor:
        out = whole(self, graph, x)
        return out * 1.01 if fault == "output" else out.detach()

    monkeypatch.setattr(wholestep.nn.RGCNConv, "_gathered", wrong)
    report = wholestep.nn.convert_relational(model)
    other = copy.deepcopy(model)
    for _ in range(2):
        torch.testing.assert_close(model(index, etype), wanted)
    torch.testing.assert_close(other(made("plain")) if fault == "gradient" else other(index, etype), wanted)
    assert type(other.first) is type(first) and other.first is not first
    torch.testing.assert_close(model(index, etype), wanted)
    assert model.first is first and report.replaced == {"second": "RGATConv"}
    assert ("output" if fault == "output" else "gradient") in report.left["first"]


def test_the_original_comes_back_where_ours_refuses_a_call() -> None:
    index, etype, nodes, relations = edges("plain")
    model = nn.ModuleList([pyg.RGATConv(WIDE, OUT, relations)])
    layer, x = model[0], torch.randn(nodes, WIDE)
    wanted = layer(x, index, etype, return_attention_weights=True)
    report = wholestep.nn.convert_relational(model)
    found = model[0](x, index, etype, return_attention_weights=True)
    assert model[0] is layer and "return_attention_weights=True" in report.left["0"] and not report.replaced
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1][1], wanted[1][1])


@pytest.mark.parametrize("called", [True, False], ids=["called before", "not called before"])
def test_two_layers_as_a_whole_step(called: bool) -> None:
    index, etype, nodes, relations = edges("hubs")
    graph, labels = made("hubs"), torch.arange(nodes) % 3
    plain = Net(nodes, relations)
    model = copy.deepcopy(plain)
    report = wholestep.nn.convert_relational(model)
    if called:
        model(index, etype)
    assert not report.left

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(graph), batch["labels"])

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    step = wholestep.compile(model, loss, optimizers[0], {"labels": labels}, backend="interpret", cache=False)
    for _ in range(3):
        optimizers[1].zero_grad()
        wanted = F.cross_entropy(plain(index, etype), labels)
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(step({"labels": labels}), wanted.detach())
    assert step.rung == "whole step" and not step.falls


def test_edges_as_tensors_train_in_eager_pytorch_and_the_reason_names_the_way_out() -> None:
    index, etype, nodes, relations = edges("hubs")
    plain = Net(nodes, relations)
    model = copy.deepcopy(plain)
    wholestep.nn.convert_relational(model)
    model(index, etype)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["index"], batch["etype"]).square().mean()

    batch = {"index": index, "etype": etype}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]
    step = wholestep.compile(model, loss, optimizers[0], batch, backend="interpret", cache=False)
    for _ in range(2):
        optimizers[1].zero_grad()
        wanted = loss(plain, batch)
        wanted.backward()
        optimizers[1].step()
        torch.testing.assert_close(step(batch), wanted.detach())
    assert any("make a relational.RelGraph of them, once" in str(note) for note in step.notes), step.notes
