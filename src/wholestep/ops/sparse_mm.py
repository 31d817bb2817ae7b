"""ws::sparse_mm: a sparse matrix, given by its parts, times a dense one; with it graph convolutions are whole steps.

Legend: the matrix A is (M, N) with E entries; x (N, K), or (M, K) where A is read transposed. COO: `index` (2, E) and no `crow`;
CSR: `crow` (M + 1,) and `index` (E,), the columns. values (E,). Out: A @ x (M, K), or A.T @ x (N, K). `coalesced`: COO
entries are sorted, and none is there twice.

Why by parts: tracing and compilers know dense tensors only, and a graph of other edges at every step is then a tensor of another
size. The product itself is torch's, in the layout that the user chose. The gradient of the values is taken at the entries of
A alone; eager PyTorch makes the whole product and picks from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.amounts import numel
from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "sparse_mm(Tensor? crow, Tensor index, Tensor values, Tensor x, SymInt rows, SymInt columns, bool coalesced, "
    "bool transposed) -> Tensor"
)


def reference(
    crow: Tensor | None,
    index: Tensor,
    values: Tensor,
    x: Tensor,
    rows: int,
    columns: int,
    coalesced: bool,
    transposed: bool,
) -> Tensor:
    """By torch's sparse tensors."""
    if crow is None:
        matrix = torch.sparse_coo_tensor(index, values, (rows, columns), is_coalesced=coalesced, check_invariants=False)
    else:
        matrix = torch.sparse_csr_tensor(crow, index, values, (rows, columns), check_invariants=False)
    return torch.mm(matrix.t() if transposed else matrix, x).contiguous()


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("sparse_mm", reference, _device)


@torch.library.register_fake("ws::sparse_mm", lib=LIBRARY)
def _fake(
    crow: Tensor | None,
    index: Tensor,
    values: Tensor,
    x: Tensor,
    rows: int,
    columns: int,
    coalesced: bool,
    transposed: bool,
) -> Tensor:
    return x.new_empty(columns if transposed else rows, x.shape[1])


def row_of_entries(crow: Tensor | None, index: Tensor) -> tuple[Tensor, Tensor]:
    """(row, column) of every entry."""
    if crow is None:
        return index[0], index[1]
    rows = torch.arange(crow.shape[0] - 1, device=crow.device)
    return torch.repeat_interleave(rows, crow.diff(), output_size=index.shape[0]), index


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    crow, index, values, x, *ctx.facts = inputs
    ctx.save_for_backward(crow, index, values, x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    crow, index, values, x = ctx.saved_tensors
    rows, columns, coalesced, transposed = ctx.facts
    grad_values = grad_x = None
    if ctx.needs_input_grad[2]:
        row, column = row_of_entries(crow, index)
        out_at, in_at = (column, row) if transposed else (row, column)
        grad_values = (grad[out_at] * x[in_at]).sum(1)
    if ctx.needs_input_grad[3]:
        grad_x = torch.ops.ws.sparse_mm(
            crow, index, values, grad.contiguous(), rows, columns, coalesced, not transposed
        )
    return None, None, grad_values, grad_x, None, None, None, None


torch.library.register_autograd("ws::sparse_mm", _backward, setup_context=_setup_context, lib=LIBRARY)


def _cases() -> Iterator[tuple[Any, ...]]:
    dense = torch.randn(3, 4) * (torch.rand(3, 4) < 0.5)
    coo, csr = dense.to_sparse(), dense.to_sparse_csr()
    for transposed in (False, True):
        x = torch.randn(3 if transposed else 4, 5)
        yield None, coo.indices().clone(), coo.values().clone(), x, 3, 4, True, transposed
        yield csr.crow_indices().clone(), csr.col_indices().clone(), csr.values().clone(), x, 3, 4, True, transposed


record(
    "ws::sparse_mm",
    reference=reference,
    cases=_cases,
    kind="matmul",
    flops=lambda call: 2 * numel(call.tensor("values")) * call.shape("x")[1],
    compiled=False,  # compilers know dense tensors only
    unordered=frozenset({"cuda"}),
)
