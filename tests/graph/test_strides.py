"""Orders of dimensions in memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from wholestep.graph.strides import inverse, is_dense_in, laid_out, memory_order


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_copy_lies_as_asked(order):
    tensor = torch.arange(24.0).view(2, 3, 4)
    made = laid_out(tensor, order)
    assert torch.equal(made, tensor)
    assert memory_order(made) == list(order)
    assert is_dense_in(made, order)
    assert made.permute(order).permute(inverse(order)).stride() == made.stride()
    assert laid_out(made, order) is made


def test_dimensions_of_size_one_and_gaps():
    assert is_dense_in(torch.empty(1, 3, 1, 4), memory_order(torch.empty(1, 3, 1, 4)))
    gaps = torch.empty(2, 3, 8)[..., ::2]
    assert not is_dense_in(gaps, memory_order(gaps))
    assert not is_dense_in(torch.empty(1, 3).expand(2, 3), [0, 1])
    assert laid_out(torch.tensor(1.0), []).item() == 1.0
