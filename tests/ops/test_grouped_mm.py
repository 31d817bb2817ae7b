"""Grouped products: forward, gradients and awkward groups against one product per group, and inside a captured step."""

from __future__ import annotations

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep
from wholestep.ops import grouped_mm
from wholestep.ops.call import read_call
from wholestep.ops.record import record_of

CASES = {
    "several rows": [2, 5, 9],
    "an empty group first, in the middle and last": [0, 4, 4, 9, 9],
    "one group": [9],
    "rows of no group": [3, 6],
    "one row": [1],
}


def operands(ends: list[int], dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    rows = max(9, ends[-1])
    x = torch.randn(rows, 4, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(len(ends), 4, 3, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
    return x, w, torch.tensor(ends)


def by_hand(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same by autograd: every row with the matrix of its group, or with zeros."""
    group = torch.searchsorted(ends, torch.arange(len(x)), right=True)
    matrices = torch.cat([w, torch.zeros_like(w[:1])])[group]
    return (x.unsqueeze(1) @ matrices).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", CASES.values(), ids=CASES)
def test_forward_and_gradients(ends: list[int], dtype: torch.dtype) -> None:
    x, w, last = operands(ends, dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    ours, theirs = torch.ops.ws.grouped_mm(x, w, last), by_hand(x, w, last)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    weight = torch.linspace(-1, 1, ours.numel(), dtype=dtype).reshape(ours.shape)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), (x, w)), torch.autograd.grad((theirs * weight).sum(), (x, w))
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_operator_is_well_made() -> None:
    torch.library.opcheck(torch.ops.ws.grouped_mm, operands([2, 2, 9]))
    assert grouped_mm.reference(*operands([9])).shape == (9, 3)


def test_copies_for_tf32_are_told_to_the_plan() -> None:
    x, w, last = torch.randn(9, 200), torch.randn(3, 200, 3), torch.tensor([2, 2, 9])
    graph = make_fx(lambda x, w, last: torch.ops.ws.grouped_mm(x, w, last))(x.detach(), w.detach(), last).graph
    call = next(node for node in graph.nodes if node.op == "call_function")
    call.meta["val"], kept = torch.empty(9, 3), torch.get_float32_matmul_precision()
    for node, value in zip(graph.nodes, (x, w, last), strict=False):
        node.meta["val"] = value
    try:
        for precision, wanted in (("highest", 0), ("high", 4 * (x.numel() + w.numel()))):
            torch.set_float32_matmul_precision(precision)
            assert record_of(call).scratch(read_call(call)) == wanted  # type: ignore[misc]
    finally:
        torch.set_float32_matmul_precision(kept)


INTERPRETED = """
import torch
from wholestep.ops import grouped_mm, grouped_mm_triton as kernels, grouped_narrow_triton as narrow

kernels.ROWS = kernels.COLUMNS = narrow.ROWS = 16
narrow.split_of, narrow.BLOCK, narrow.PARTS = (lambda rows: 8), 64, 2
kernels._depth, kernels.narrow_precision = lambda x: 16, lambda: "ieee"
for ends in ([2, 5, 9], [0, 4, 4, 9, 9], [9], [3, 6], [1], [0], [20, 20, 37], [0, 1, 2, 3, 3, 3, 30, 30, 31, 70]):
    for transposed, grouped_mm.NARROW in ((False, 0), (True, 0), (False, 128), (True, 128)):
        torch.manual_seed(0)
        x, w, grad = torch.randn(max(9, ends[-1]), 21), torch.randn(len(ends), 21, 18), torch.randn(max(9, ends[-1]), 18)
        if transposed:
            x, w = x.T.contiguous().T, w.transpose(1, 2).contiguous().transpose(1, 2)
        last = torch.tensor(ends, dtype=torch.int32 if transposed else torch.int64)
        grad_x, grad_w = grouped_mm.reference(grad, w.transpose(1, 2), last), grouped_mm.weights_reference(grad, x, last)
        pairs = [(kernels.rows_product(x, w, last), grouped_mm.reference(x, w, last)),
                 (kernels.rows_product(grad, w.transpose(1, 2), last), grad_x),
                 (kernels.weights_product(grad, x, last), grad_w)]
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            assert got.stride() == want.stride()
torch.set_float32_matmul_precision("high")
kernels.TILE = 16
for operand in (torch.randn(37, 21), torch.randn(3, 18, 40).transpose(1, 2), torch.randn(21, 37).T):
    for summed in (-1, -2):
        ready = kernels._ready(operand, summed)
        assert ready.shape == operand.shape and ready.stride(summed) == 1
        assert (ready.view(torch.int32) & 0x1FFF == 0).all() and ((ready - operand).abs() <= operand.abs() * 2**-11).all()
odd = torch.tensor([[float("inf"), -float("inf"), float("nan"), -0.0]])
assert torch.equal(kernels._ready(odd, -1).view(torch.int32)[:, [0, 1, 3]], odd.view(torch.int32)[:, [0, 1, 3]])
assert kernels._ready(odd, -1)[0, 2].isnan()
print("equal")
"""


def test_triton_bodies_under_their_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [200, 120])
@pytest.mark.parametrize(
    "ends",
    [[700, 700, 1531], [0, 3, 2048], [128, 256, 1000], [*range(0, 1000, 7), 1900, 1900]],
    ids=lambda ends: str(ends[:4]),
)
def test_cuda(ends: list[int], dtype: torch.dtype, precision: str, wide: int) -> None:
    """Against one product per group in float64: the error is that of torch's own products, up to the order of the sums."""
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        source = torch.Generator("cuda").manual_seed(0)
        x = torch.randn(2048, wide, generator=source, device="cuda", dtype=dtype)
        w = torch.randn(len(ends), 100, wide, generator=source, device="cuda", dtype=dtype).transpose(1, 2)
        grad, last = (
            torch.randn(2048, 100, generator=source, device="cuda", dtype=dtype),
            torch.tensor(ends, device="cuda"),
        )
        turned = w.transpose(1, 2)
        ours = [*(torch.ops.ws.grouped_mm(*pair, last) for pair in ((x, w), (grad, turned)))]
        ours.append(torch.ops.ws.grouped_mm_weights(grad, x, last))
        torchs = [*(grouped_mm.reference(*pair, last) for pair in ((x, w), (grad, turned)))]
        torchs.append(grouped_mm.weights_reference(grad, x, last))
        exact = [*(grouped_mm.reference(a.double(), b.double(), last) for a, b in ((x, w), (grad, turned)))]
        exact.append(grouped_mm.weights_reference(grad.double(), x.double(), last))
    finally:
        torch.set_float32_matmul_precision(kept)
    for mine, theirs, truth in zip(ours, torchs, exact, strict=True):
        error, torchs_error = ((found - truth).square().mean().sqrt() for found in (mine, theirs))
        assert mine.stride() == theirs.stride() and error <= 3 * torchs_error + 1e-7 * truth.abs().max()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.choose, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.choose(x).argmax(1)
        order = expert.argsort(stable=True)
        ends = torch.nn.functional.one_hot(expert, 3).sum(0).cumsum(0)
        out = torch.ops.ws.grouped_mm(x[order], self.weight, ends)
        return torch.zeros_like(out).index_copy(0, order, out)


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_three_steps_of_a_captured_mixture(backend: str) -> None:
    torch.manual_seed(0)
    model = Experts()
    batches = [torch.randn(10, 4) for _ in range(3)]
    report = wholestep.verify(
        model,
        lambda m, b: m(b).square().mean(),
        torch.optim.AdamW(model.parameters(), 1e-2),
        batches,
        steps=3,
        backend=backend,
    )
    assert report.ok and report.rung == "whole step", str(report)


def test_few_rows_are_cut_into_parts_enough_for_a_gpu() -> None:
    """Powers of two from 128 to 1024: 62,000 rows in 485 parts, where 61 parts of 1,024 would leave half of the SMs idle."""
    assert [grouped_mm.split_of(rows) for rows in (0, 1, 62_000, 65_537, 200_000, 300_000, 2_000_000)] == [
        128, 128, 128, 256, 512, 1024, 1024,
    ]  # fmt: skip
    assert all(
        grouped_mm.splits_of(rows) <= rows // grouped_mm.SPLIT + grouped_mm.PARTS for rows in range(1, 700_000, 997)
    )
