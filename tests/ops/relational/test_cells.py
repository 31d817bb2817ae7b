"""Sums over all relations of a node at once: against rows that are kept, gradients too, in a layer, and on the Triton bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted
from tests.relational.graphs import NAMES, edges_of, made
from torch import Tensor

from wholestep import relational as rel
from wholestep.capture.dry import dry_capture
from wholestep.ops import grouped_mm
from wholestep.ops.relational import cells
from wholestep.relational import RelGraph

CASES = list(cells._cases())


@pytest.mark.parametrize("case", CASES[len(CASES) // 2 :], ids=["bare", "edges"])
@pytest.mark.parametrize("columns", [2, 7], ids=["narrower", "wider"])
def test_gradients_are_those_of_plain_sums(case: tuple[Any, ...], columns: int) -> None:
    """In float64, of x, of weights and of the matrices."""
    x, weight, w, ptr, index, target, edge, *_ = case
    w = torch.randn(2, 5, columns, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, w, weight) if t is not None]
    group = torch.repeat_interleave(torch.arange(6), torch.diff(ptr).long()) // 3
    rows = (leaves[0][index.long()].unsqueeze(1) @ leaves[1][group]).squeeze(1)
    if weight is not None:
        rows = rows * leaves[2][edge.clamp(min=0).long()].where(edge >= 0, 1.0)[:, None]
    plain = torch.zeros(3, columns, dtype=torch.float64).index_add(0, target.long(), rows)
    found = torch.ops.ws.cell_mm(leaves[0], None if weight is None else leaves[2], leaves[1], *case[3:])
    torch.testing.assert_close(found, plain)
    pull = torch.randn_like(plain)
    for one, other in zip(*(torch.autograd.grad(out, leaves, pull) for out in (found, plain)), strict=True):
        torch.testing.assert_close(one, other)


def message(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


def scaled(e: Any, p: Any) -> Tensor:
    return e.x[:, None] * (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mean", [False, True])
def test_a_layer_whose_cells_are_mostly_pairs(name: str, mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a graph is like."""
    monkeypatch.setattr("wholestep.relational.building.MOST_CELLS", 1 << 20)
    graph = RelGraph(*edges_of(name)[:3], num_nodes=edges_of(name)[3], num_relations=edges_of(name)[4])
    assert (graph.cells is None) == (graph.num_edges == 0)
    monkeypatch.setattr(cells, "pays", lambda *_: True)
    x = torch.randn(graph.num_nodes, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(graph.num_relations, 6, 4, dtype=torch.float64, requires_grad=True)
    own = torch.rand(graph.num_edges, dtype=torch.float64)
    layer = rel.layer(message if mean else scaled, aggregate="mean per relation" if mean else "sum")
    found, wanted = (f(graph, {"x": x}, {"W": w}, {} if mean else {"x": own}) for f in (layer, layer.reference))
    torch.testing.assert_close(found, wanted)
    pull = torch.randn_like(wanted)
    for one, other in zip(*(torch.autograd.grad(out, [x, w], pull) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_for_graphs_with_most_pairs_on_a_gpu() -> None:
    assert made("loops, edges twice").cells is not None and made("many relations").cells is None
    x, w = torch.empty(5, 64, device="meta"), torch.empty(3, 64, 64, device="meta")
    assert cells.pays(x, None, w) and not cells.pays(x, torch.empty(4, requires_grad=True), w)
    assert not cells.pays(torch.empty(5, 64), None, torch.empty(3, 64, 64))
    assert cells.pays(torch.empty(5, 64), None, torch.empty(3, 64, 64), on_gpu=True)
    assert not cells.pays(x, None, torch.empty(3, 64, grouped_mm.NARROW + 1, device="meta"))


def test_a_capture_without_a_gpu_takes_what_a_gpu_would() -> None:
    graph = made("loops, edges twice")
    layer = rel.layer(message, aggregate="mean per relation")
    model = torch.nn.ParameterDict({"x": torch.randn(graph.num_nodes, 6), "W": torch.randn(graph.num_relations, 6, 4)})

    def loss(m: Any, g: RelGraph) -> Tensor:
        return layer(g, {"x": m["x"]}, {"W": m["W"]}).square().mean()

    names = {}
    for device in ("cuda", "cpu"):
        captured = dry_capture(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), graph, device=device)
        names[device] = [str(node.target) for node in captured.graph.operations()]
    assert {name for name in names["cuda"] if "cell" in name} == {"ws.cell_mm.default", "ws.cell_mm_both.default"}
    assert not any("cell" in name for name in names["cpu"])


TRIED = """
import torch
from wholestep.ops.relational import cells, cells_triton as kernels, gather_triton, segments_triton

# groups, nodes, the most entries of a cell, those of one: cells without any, a hub of many chunks
TABLES = [(3, 37, 3, 40), (4, 16, 1, 1), (1, 5, 2, 0)]


def try_one(groups, nodes, most, hub, inner, columns, dtype, device="cpu"):
    counts = torch.randint(0, most + 1, (groups * nodes,))
    counts[groups * nodes // 2] = hub
    ptr = torch.tensor([0, *counts]).cumsum(0)
    entries = int(ptr[-1])
    target = torch.repeat_interleave(torch.arange(groups * nodes), counts) % nodes
    table = [t.int().to(device) for t in (ptr, torch.randint(0, 11, (entries,)), target, torch.randint(-1, 50, (entries,)))]
    x, w, grad, weight = (
        t.to(dtype).to(device)
        for t in (torch.randn(11, inner), torch.randn(groups, inner, columns), torch.randn(nodes, columns), torch.rand(50))
    )
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for given, edge in ((None, None), (weight, table[3])):
        wide = [None if t is None else t.double() for t in (x, given, w, grad)]
        wanted = cells.both_reference(*wide, *table[:3], edge)
        for run in (
            lambda: kernels.cell_mm_both(x, given, w, grad, *table[:3], edge),
            lambda: (
                kernels.cell_mm(x, given, w, *table[:3], edge), kernels.cell_mm_weights(x, given, grad, *table[:3], edge)
            ),
        ):
            for found, again, other in zip(run(), run(), wanted):
                assert found.dtype == dtype and torch.equal(found, again)
                torch.testing.assert_close(found.double(), other, rtol=limit, atol=limit * max(1.0, float(other.abs().max())))


def try_not_finite(what, device="cpu"):
    # A number that is not finite shows where an entry multiplies by it, and nowhere else.
    table = [torch.tensor(ids).int().to(device) for ids in ([0, 2, 2, 3, 4, 4, 5], [0, 2, 1, 1, 2], [0, 0, 2, 0, 2])]
    x, w, grad = (torch.randn(*shape).to(device) for shape in ((4, 5), (2, 5, 2), (3, 2)))
    {"x": x[3], "w": w[1, 2], "grad": grad[1]}[what].fill_(float("inf"))
    out, of_w = kernels.cell_mm_both(x, None, w, grad, *table, None)
    rows, group = x[table[1].long()], torch.tensor([0, 0, 0, 1, 1])
    wanted = torch.zeros(3, 2).index_add(0, table[2].cpu().long(), (rows.unsqueeze(1) @ w[group]).squeeze(1).cpu())
    of_matrices = torch.zeros(2, 5, 2).index_add(0, group, (rows[:, :, None] * grad[table[2].long()][:, None]).cpu())
    for found, other in ((out, wanted), (kernels.cell_mm(x, None, w, *table, None), wanted), (of_w, of_matrices)):
        torch.testing.assert_close(found.cpu(), other, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out.isfinite().all() == (what != "w") and of_w.isfinite().all()


torch.manual_seed(0)
"""
INTERPRETED = (
    TRIED
    + """
segments_triton.CHUNK, gather_triton.TILE, gather_triton.COLUMNS = 8, 256, 32
kernels.ROWS, kernels.AGAIN_ROWS, cells.ROOM = 16, 16, 4096
assert cells.product_first(100, 100, 5, 2) and not cells.product_first(100, 100, 5, 5)
kernels.narrow_precision = lambda: "ieee"
for table in TABLES:
    try_one(*table, 5, 2, torch.float32)
    try_one(*table, 3, 5, torch.float32)
try_one(*TABLES[0], 16, 20, torch.float16)
for what in ("x", "w", "grad"):
    try_not_finite(what)
nothing = torch.zeros(0).int()
none = torch.zeros(9).int(), nothing, nothing, None
assert not kernels.cell_mm(torch.randn(5, 3), None, torch.randn(2, 3, 4), *none).any()
assert not kernels.cell_mm_weights(torch.randn(5, 3), None, torch.randn(4, 4), *none).any()
print("equal")
"""
)


def test_triton_bodies_under_their_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
def test_cuda() -> None:
    names: dict[str, Any] = {}
    exec(TRIED, names)
    for dtype in (torch.float32, torch.bfloat16):
        for table in [*names["TABLES"], (16, 5000, 3, 70_000)]:
            for inner, columns in ((64, 64), (64, 32), (5, 3), (128, 128)):
                names["try_one"](*table, inner, columns, dtype, "cuda")
    for what in ("x", "w", "grad"):
        names["try_not_finite"](what, "cuda")
