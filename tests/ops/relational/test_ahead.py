"""Every kernel of relational layers compiles for a Hopper GPU, whatever the widths, heads, degrees and dtypes are."""

from __future__ import annotations

import pytest
import torch
from tests.ops.ahead import Launches
from torch import Tensor


def ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


FEW = [((4, 16), 20, torch.bfloat16)]
MANY = [
    (shape, degree, dtype)
    for shape in ((64,), (4, 16), (1,), (200,), (16, 1), (3, 5))
    for degree in (1, 3, 5, 20, 5000)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


def compiled(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], degree: int, dtype: torch.dtype
) -> int:
    from wholestep.ops import grouped_narrow_triton as products
    from wholestep.ops.relational import cells_triton, gather_triton, linear_sum_triton, softmax_triton

    nodes = 4 if degree > 1000 else 1000
    x, entries = torch.randn(nodes, *shape).to(dtype), nodes * degree
    ptr, index, heads = ids(nodes + 1), ids(entries), shape[:-1]
    weight = torch.randn(entries, *heads)
    for few in (0, 1 << 16):
        monkeypatch.setattr(gather_triton, "FEW_PROGRAMS", few)
        gather_triton.gather_sum(x, None, ptr, index, None)
        gather_triton.gather_sum(x, weight, ptr, index, index)
        gather_triton.gather_dot(x, x, weight, ptr, index, index)
    gather_triton.take_rows(x, index)
    softmax_triton.softmax(weight.to(dtype), ptr)
    softmax_triton.softmax_backward(weight, weight, ptr)
    wide = min(shape[-1], 128)
    rows, matrices, ends = torch.randn(500, wide).to(dtype), torch.randn(96, wide, 64).to(dtype), ids(96)
    for precision in ("bf16x6", "tf32"):
        for taken in (None, ids(700)):
            out = products.rows_product(rows, matrices, ends, precision, taken)
            products.weights_product(out, rows, ends, precision, taken)
        monkeypatch.setattr(linear_sum_triton, "narrow_precision", lambda precision=precision: precision)
        side, factors = (rows, ids(501), ids(700), ids(700)), torch.randn(700)
        out = linear_sum_triton.summed_mm(*side[:1], factors, *side[1:], matrices, ends)
        linear_sum_triton.summed_mm_weights(side, (out, *side[1:3], None), factors, ends)
        monkeypatch.setattr(cells_triton, "narrow_precision", lambda precision=precision: precision)
        cell = ids(96 * 500 + 1), ids(700), ids(700), ids(700)
        out = cells_triton.cell_mm(rows, factors, matrices, *cell)
        cells_triton.cell_mm(rows, None, matrices[:, :, :16], *cell[:3], None)
        cells_triton.cell_mm_weights(rows, factors, out, *cell)
        cells_triton.cell_mm_both(rows, None, matrices, out, *cell[:3], None)
    return len(launches.done)


@pytest.mark.parametrize(("shape", "degree", "dtype"), FEW)
def test_kernels_compile(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], degree: int, dtype: torch.dtype
) -> None:
    assert compiled(launches, monkeypatch, shape, degree, dtype) >= 26


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "degree", "dtype"), MANY)
def test_all_kernels_compile(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], degree: int, dtype: torch.dtype
) -> None:
    assert compiled(launches, monkeypatch, shape, degree, dtype) >= 26
