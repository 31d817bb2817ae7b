"""Sums into repeated places: torch's own result, in an order that does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.ops import add_rows

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("one_thread")
"""With one thread torch's own kernels have an order too, and can be compared with."""


def places(size: int, *shape: int) -> Tensor:
    return torch.randint(-size, size, shape)


SHAPE = (7, 5, 3)
CASES: dict[str, Callable[[], tuple[list[Tensor | None], tuple[int, ...]]]] = {
    "first": lambda: ([places(7, 20)], (20, 5, 3)),
    "of two dimensions": lambda: ([places(7, 4, 6)], (4, 6, 5, 3)),
    "second": lambda: ([None, places(5, 20)], (7, 20, 3)),
    "last": lambda: ([None, None, places(3, 4, 6)], (7, 5, 4, 6)),
    "neighbours": lambda: ([None, places(5, 4, 1), places(3, 1, 6)], (7, 4, 6)),
    "apart": lambda: ([places(7, 4, 1), None, places(3, 1, 6)], (4, 6, 5)),
    "all": lambda: ([places(7, 50), places(5, 50), places(3, 50)], (50,)),
    "one value for all": lambda: ([places(7, 20)], ()),
    "one place": lambda: ([places(7)], (5, 3)),
    "no place": lambda: ([places(7, 0)], (0, 5, 3)),
    "narrow numbers": lambda: ([places(7, 20).int(), places(5, 20).int()], (20, 3)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_index_put_has_the_bits_and_strides_of_torchs_own(case: str, dtype: torch.dtype, transposed: bool) -> None:
    indices, shape = CASES[case]()
    start = torch.randn(SHAPE[::-1], dtype=dtype).permute(2, 1, 0) if transposed else torch.randn(SHAPE, dtype=dtype)
    values = torch.randn(shape, dtype=dtype)
    kept = start.clone()
    ours, theirs = (
        add_rows.index_put(start, indices, values, accumulate=True),
        aten.index_put(start, indices, values, True),
    )
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    assert torch.equal(start, kept)


def test_the_others_have_the_bits_of_torchs_own() -> None:
    start, values, index = torch.randn(6, 5), torch.randn(4, 6), torch.randint(-30, 30, (4, 6))
    for put_into in (start, start.t()):
        ours, theirs = add_rows.put(put_into, index, values, True), aten.put(put_into, index, values, True)
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    rows, mask = torch.randint(-20, 20, (9,)), torch.rand(9, 1) < 0.5
    mask &= ((rows >= -6) & (rows < 6))[:, None]
    values = torch.randn(9, 5)
    ours = add_rows.masked_index_put(start, mask, [rows], values)
    assert torch.equal(ours, aten._unsafe_masked_index_put_accumulate(start, mask, [rows], values))


@pytest.mark.parametrize(
    "start", [torch.zeros(()).expand(7, 5), torch.ones(1, 5).expand(7, 5), torch.ones(5, 14)[:, ::2].t()]
)
def test_a_start_that_has_no_memory_of_its_own(start: Tensor) -> None:
    index, values = [torch.tensor([0, 0, 6])], torch.randn(3, 5)
    ours, theirs = add_rows.index_put(start, index, values, accumulate=True), aten.index_put(start, index, values, True)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize("indices", [[7], [-8], [0, 5], [0, -6]])
def test_an_index_out_of_range_is_an_error_as_it_is_in_torch(indices: list[int]) -> None:
    given, start = [torch.tensor([index]) for index in indices], torch.zeros(7, 5)
    for put in (add_rows.index_put, aten.index_put):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            put(start, given, torch.zeros(()), True)


def test_what_needs_no_order_is_left_alone() -> None:
    index, mask = [torch.tensor([0, 0])], [torch.tensor([True, False])]
    calls: list[tuple[Any, ...]] = [
        (torch.zeros(2), index, torch.ones(2), False),
        (torch.zeros(2, dtype=torch.int64), index, torch.ones(2, dtype=torch.int64), True),
        (torch.zeros(2), mask, torch.ones(1), True),
        (torch.zeros(2, device="meta"), index, torch.ones(2), True),
    ]
    assert all(add_rows.index_put(*call) is NotImplemented for call in calls)
