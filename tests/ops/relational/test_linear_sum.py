"""Sums of rows times matrices without the rows between: against row sums that are kept, gradients too, and on the Triton bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted
from tests.relational.graphs import made
from torch import Tensor, nn

import wholestep
from wholestep import relational as rel
from wholestep.capture.dry import dry_capture
from wholestep.ops import grouped_mm
from wholestep.ops.relational import linear_sum
from wholestep.relational import RelGraph, spaces

CASES = list(linear_sum._linear_cases())


@pytest.mark.parametrize("case", CASES[len(CASES) // 2 :], ids=["bare", "edges", "edges on one side"])
def test_gradients_are_those_of_rows_that_are_kept(case: tuple[Any, ...]) -> None:
    """In float64, of x, of the matrices and of weights."""
    x, weight, w, ends, *tables = case
    leaves = [t.clone().requires_grad_() for t in (x, w) if t is not None]
    learned = None if weight is None else weight.clone().requires_grad_()
    leaves += [] if learned is None else [learned]

    def sums(of: Tensor, ids: list[Any]) -> Tensor:
        return torch.ops.ws.gather_sum(of, None if ids[2] is None else learned, *ids)

    kept = sums(torch.ops.ws.grouped_mm(sums(leaves[0], tables[:6]), leaves[1], ends), tables[6:])
    found = torch.ops.ws.linear_sum(leaves[0], learned, leaves[1], ends, *tables)
    torch.testing.assert_close(found, kept)
    pull = torch.randn_like(found)
    for one, other in zip(*(torch.autograd.grad(out, leaves, pull) for out in (found, kept)), strict=True):
        torch.testing.assert_close(one, other)


def mean_message(e: Any, p: Any) -> Tensor:
    return (e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)


class Net(nn.Module):
    def __init__(self, graph: RelGraph) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(graph.num_relations, 6, 6) / 3)
        self.x = nn.Parameter(torch.randn(graph.num_nodes, 6))
        self.mean = rel.layer(mean_message, aggregate="mean per relation")

    def forward(self, graph: RelGraph) -> Tensor:
        hidden = self.mean(graph, {"x": self.x}, {"W": self.weight}).relu()
        return self.mean(graph, {"x": hidden}, {"W": self.weight})


def mean_loss(model: Net, graph: RelGraph) -> Tensor:
    return (model(graph) - 1).square().mean()


def trained(graph: RelGraph) -> tuple[list[float], wholestep.Step]:
    model = Net(graph)
    step = wholestep.compile(
        model, mean_loss, torch.optim.Adam(model.parameters(), lr=0.1), graph,
        backend="interpret", cache=False,
    )  # fmt: skip
    return [float(step(graph)) for _ in range(3)], step


def test_a_step_that_keeps_no_rows_trains_as_one_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = made("hubs")
    wanted, plain = trained(graph)
    monkeypatch.setattr(spaces, "pays", lambda *_: True)
    found, step = trained(graph)
    assert found == pytest.approx(wanted, rel=1e-5) and found[0] > found[-1]
    names = [[str(node.target) for node in one.graph.operations()] for one in (plain, step)]
    assert not any("linear_sum" in name for name in names[0])
    assert sum("linear_sum" in name for name in names[1]) == 2 and not any("grouped_mm" in name for name in names[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_capture_without_a_gpu_takes_what_a_gpu_would(precision: str) -> None:
    """Though its tensors are on the CPU; one for a CPU keeps its rows."""
    torch.manual_seed(0)
    nodes = torch.randperm(40)
    graph = rel.RelGraph(nodes, nodes.flip(0), torch.arange(40) % 3, num_nodes=40, num_relations=3)

    def names(device: str) -> list[str]:
        model = Net(graph)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        captured = dry_capture(model, mean_loss, optimizer, graph, precision=precision, device=device)
        return [str(node.target) for node in captured.graph.operations()]

    assert sum("linear_sum" in name for name in names("cuda")) == 2
    assert not any("linear_sum" in name for name in names("cpu"))


def test_it_is_for_short_sums_of_narrow_rows_on_a_gpu() -> None:
    def asked(
        entries: int = 20, wide: int = 64, device: str = "meta", learned: bool = False, on_gpu: bool = False
    ) -> bool:
        x, w = (torch.empty(*shape, device=device) for shape in ((5, wide), (3, wide, wide)))
        return linear_sum.pays(x, torch.empty(40, device=device, requires_grad=learned), w, 10, entries, on_gpu)

    assert asked() and not asked(device="cpu") and asked(device="cpu", on_gpu=True) and not asked(learned=True)
    assert not asked(entries=21) and not asked(wide=grouped_mm.NARROW + 1)


TRIED = """
import itertools, torch
from wholestep.ops.relational import gather_triton, linear_sum, linear_sum_triton as kernels, segments_triton

# entries of every row, and where groups end: hubs, rows and groups without any, rows of no group, groups within a tile
TABLES = [([1, 2, 0, 3] * 5 + [40, 0, 3], [3, 3, 20, 23]), ([1] * 20, [4, 6, 13, 15]), ([2, 70], [1, 1, 2, 2]), ([5], [0, 0, 0, 1])]


def table(counts, nodes, device):
    ptr = torch.tensor([0, *counts]).cumsum(0)
    return [t.int().to(device) for t in (ptr, torch.randint(0, nodes, (int(ptr[-1]),)), torch.randint(-1, 50, (int(ptr[-1]),)))]


def close(found, wanted, dtype):
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit * max(1.0, float(wanted.abs().max())))


def try_one(counts, ends, inner, columns, dtype, device="cpu"):
    x, grad, w = (torch.randn(*size).to(dtype).to(device) for size in ((7, inner), (9, columns), (4, inner, columns)))
    ends, one, other = torch.tensor(ends).int().to(device), table(counts, 7, device), table(counts[::-1], 9, device)
    weight = torch.rand(50).to(dtype).to(device)
    for edge, named in ((None, None), (one[2], other[2]), (None, other[2])):
        left, right = (*one[:2], edge), (*other[:2], named)
        wide = [t.double() for t in (x, weight, w, grad)]
        given = None if edge is None else weight
        found = kernels.summed_mm(x, given, *left, w, ends)
        close(found, linear_sum.reference(*wide[:2], *left, wide[2], ends), dtype)
        assert torch.equal(found, kernels.summed_mm(x, given, *left, w, ends))
        found = kernels.summed_mm_weights((x, *left), (grad, *right), weight, ends)
        close(found, linear_sum.weights_reference(*wide[:2], *left, wide[3], *right, ends), dtype)


torch.manual_seed(0)
"""
INTERPRETED = (
    TRIED
    + """
segments_triton.CHUNK, gather_triton.TILE, gather_triton.COLUMNS = 8, 256, 32
kernels.rows_of, kernels.WEIGHTS_ROWS, kernels.split_of = lambda columns: 16, 16, lambda *_: 32
kernels.narrow_precision = lambda: "ieee"
for counts, ends in TABLES:
    try_one(counts, ends, 5, 3, torch.float32)
try_one([1, 9, 2], [1, 2, 2, 3], 16, 20, torch.float16)
w, ends, nothing = torch.randn(2, 3, 4), torch.zeros(2).int(), torch.zeros(0).int()
empty = kernels.summed_mm(torch.randn(5, 3), None, torch.zeros(4).int(), nothing, None, w, ends)
assert empty.shape == (3, 4) and not empty.any()
side = torch.randn(5, 3), torch.zeros(4).int(), nothing, None
assert not kernels.summed_mm_weights(side, side, None, ends).any()
print("equal")
"""
)


def test_triton_bodies_under_their_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
def test_cuda() -> None:
    """At the sizes that kernels really have, with rows that span many splits, and a hub of many chunks."""
    names: dict[str, Any] = {}
    exec(TRIED, names)
    for dtype in (torch.float32, torch.bfloat16):
        for counts, ends in [*names["TABLES"], ([1, 2, 0, 3] * 900 + [70_000, 5], [64, 2000, 2001, 3602])]:
            for inner, columns in ((64, 64), (64, 32), (5, 3), (128, 128)):
                names["try_one"](counts, ends, inner, columns, dtype, "cuda")
