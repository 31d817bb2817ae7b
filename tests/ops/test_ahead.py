"""Every kernel outside of relational layers compiles for a Hopper GPU, and fits: shared memory, registers."""

from __future__ import annotations

import pytest
import torch
from tests.ops.ahead import Launches

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
FEW = [(49, 32, torch.bfloat16), (49, 32, torch.float32)]
MANY = [
    (length, width, dtype)
    for length, width in ((49, 32), (64, 32), (64, 64), (128, 32), (128, 64), (100, 64), (16, 128), (32, 128), (1, 1))
    for dtype in DTYPES
]


@pytest.mark.parametrize(
    ("length", "width", "dtype"),
    [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY if case not in FEW)],
)
def test_attention_with_a_bias(launches: Launches, length: int, width: int, dtype: torch.dtype) -> None:
    """Whatever `takes` says yes to."""
    from wholestep.ops.attention import biased, biased_triton

    q, bias = torch.randn(4, 3, length, width).to(dtype), torch.randn(2, 3, length, length)
    if biased.takes(q, q, q, bias):
        out, logsumexp = biased_triton.forward(q, q, q, bias, 0.1)
        biased_triton.backward(out, q, q, q, out, bias, logsumexp, 0.1)
        assert len(launches.done) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_by_a_shared_index(launches: Launches, dtype: torch.dtype) -> None:
    from wholestep.ops import scatter_shared_triton

    scatter_shared_triton.launch(torch.zeros(50, 9, dtype=torch.int64), torch.randn(4, 50, 9).to(dtype), 17)
    assert len(launches.done) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float32, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.bfloat16, torch.float16))]
)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_of_groups(launches: Launches, dtype: torch.dtype, precision: str) -> None:
    from wholestep.ops import grouped_mm_triton

    x, w, ends = torch.randn(300, 256).to(dtype), torch.randn(8, 256, 384).to(dtype), torch.zeros(8, dtype=torch.int32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        grad = grouped_mm_triton.rows_product(x, w, ends)
        grouped_mm_triton.weights_product(grad, x, ends)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(launches.done) >= 2


@pytest.mark.parametrize(("vocabulary", "smoothing"), [(100, 0.0), (50257, 0.1)])
def test_chunks_of_a_loss(launches: Launches, vocabulary: int, smoothing: float) -> None:
    from wholestep.ops import linear_cross_entropy_triton
    from wholestep.ops.linear_cross_entropy import Rule

    logits, rows = torch.randn(4, vocabulary).bfloat16(), torch.zeros(4)
    rule = Rule(ignore_index=-100, label_smoothing=smoothing, z_loss=smoothing, softcap=30.0 * smoothing)
    linear_cross_entropy_triton.launch(logits, rows.long(), rule, lse=rows, losses=rows, scale=torch.ones(()))
    assert len(launches.done) == 1


def test_updates(launches: Launches) -> None:
    from wholestep.ops import adamw_triton, sgd_triton

    few, numbers = [torch.randn(100), torch.randn(7, 5)], torch.zeros(6, dtype=torch.float64)
    adamw_triton.launch(few, few, [few, few, few], numbers, None, maximize=False, decoupled=True)
    sgd_triton.launch(few, few, [few], numbers[:4], torch.ones(()), maximize=False, nesterov=True)
    assert len(launches.done) == 2
