"""ws::sparse_mm against dense products: forward and gradients, both layouts, both ways round, awkward matrices."""

from __future__ import annotations

import pytest
import torch

from wholestep.ops import sparse_mm

SHAPES = {"square": (5, 5, 8), "wide": (3, 6, 7), "tall": (6, 2, 5), "single": (1, 1, 1), "no entries": (4, 3, 0)}


def entries(rows: int, columns: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(rows + count)
    index = torch.stack([torch.randint(0, size, (count,), generator=source) for size in (rows, columns)])
    return index, torch.randn(count, generator=source, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("layout", ["coo, some twice", "coo", "csr"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward_and_gradients(shape: tuple[int, int, int], transposed: bool, layout: str) -> None:
    rows, columns, count = shape
    index, values = entries(rows, columns, count, torch.float64)
    if layout != "coo, some twice":
        matrix = torch.sparse_coo_tensor(index, values, (rows, columns)).coalesce()
        index, values = matrix.indices(), matrix.values()
    crow = None
    if layout == "csr":
        crow, index = matrix.to_sparse_csr().crow_indices(), matrix.to_sparse_csr().col_indices()
    x = torch.randn(rows if transposed else columns, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values, x = values.requires_grad_(), x.requires_grad_()

    def dense(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        row, column = sparse_mm.row_of_entries(crow, index)
        whole = torch.zeros(rows, columns, dtype=torch.float64).index_put((row, column), values, accumulate=True)
        return (whole.T if transposed else whole) @ x

    ours = torch.ops.ws.sparse_mm(crow, index, values, x, rows, columns, layout == "coo", transposed)
    theirs = dense(values, x)
    torch.testing.assert_close(ours, theirs)
    weight = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).reshape(ours.shape)
    for a, b in zip(*(torch.autograd.grad((out * weight).sum(), (values, x)) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_second_derivatives() -> None:
    index, values = entries(4, 4, 6, torch.float64)
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)

    def product(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.ws.sparse_mm(None, index, values, x, 4, 4, False, False)

    assert torch.autograd.gradgradcheck(product, (values.requires_grad_(), x))


def test_the_operator_is_well_made() -> None:
    index, values = entries(4, 4, 6, torch.float32)
    x = torch.randn(4, 2, requires_grad=True)
    torch.library.opcheck(torch.ops.ws.sparse_mm.default, (None, index, values.requires_grad_(), x, 4, 4, False, False))
