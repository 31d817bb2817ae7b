"""Grouped products: forward, gradients and awkward groups against one product per group, and inside a captured step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wholestep
from wholestep.kernels import grouped_mm

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
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), (x, w)), torch.autograd.grad((theirs * weight).sum(), (x, w))):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_the_operator_is_well_made() -> None:
    torch.library.opcheck(torch.ops.ws.grouped_mm, operands([2, 2, 9]))
    assert grouped_mm.reference(*operands([9])).shape == (9, 3)


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
        model, lambda m, b: m(b).square().mean(), torch.optim.AdamW(model.parameters(), 1e-2), batches, steps=3, backend=backend
    )
    assert report.ok and report.rung == "whole step", str(report)
