"""Sums by a shared index: against scatter_add, awkward shapes, the Triton body under its interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.ops.interpreter import assert_equal_when_interpreted

from wholestep.ops.scatter_shared import reference

SHAPES = [((4, 5, 7), 3), ((2, 3, 20, 33), 40), ((1, 1, 1), 1), ((0, 4, 4), 4), ((9, 4, 0), 4), ((8, 2, 6), 9)]


def operands(
    shape: tuple[int, ...], size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    index = torch.randint(0, size, shape[-2:])
    if index.numel():
        index.view(-1)[0], index.view(-1)[-1] = 0, size - 1
    return index, torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "size"), SHAPES, ids=str)
def test_the_sums(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    index, src = operands(shape, size, dtype)
    expected = torch.zeros(*shape[:-1], size, dtype=torch.float64).scatter_add(-1, index.expand(shape), src.double())
    found = torch.ops.ws.scatter_shared(index, src, size)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_the_operator_is_well_made() -> None:
    torch.library.opcheck(torch.ops.ws.scatter_shared, (*operands((4, 5, 7), 3), 3))


INTERPRETED = """
import torch
from tests.ops.test_scatter_shared import SHAPES, operands
from wholestep.ops import scatter_shared, scatter_shared_triton as kernel

kernel.BATCH = kernel.PLACES = kernel.DEPTH = 16
kernel.PART = kernel.tl.float32
for shape, size in SHAPES:
    index, src = operands(shape, size)
    expected = scatter_shared.reference(index, src, size)
    torch.testing.assert_close(kernel.launch(index, src, size), expected)
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (index, src)]
    torch.testing.assert_close(kernel.launch(*turned, size), expected)
print("equal")
"""


def test_triton_body_under_its_interpreter() -> None:
    assert_equal_when_interpreted(INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "size"), [((24, 128, 130), 96), ((2, 12, 64, 64), 200)], ids=str)
def test_cuda(shape: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    """Against sums in float32; the same bits every time."""
    index, src = (t.cuda() for t in operands(shape, size, dtype))
    expected, tolerance = reference(index, src, size), 1e-4 if dtype == torch.float32 else 1e-2
    for given in (src, src.transpose(-1, -2).contiguous().transpose(-1, -2)):
        found = torch.ops.ws.scatter_shared(index, given, size)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(found, torch.ops.ws.scatter_shared(index, given, size))
