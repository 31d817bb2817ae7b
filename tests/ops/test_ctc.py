"""ws::ctc against F.ctc_loss: losses and gradients, targets side by side and one after the other, lengths of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from wholestep.ops import ctc

FRAMES, ROWS, CLASSES = 7, 3, 5
PADDED = torch.tensor([[1, 2, 2, 0], [3, 4, 0, 0], [1, 1, 1, 1]])  # four equal ones need seven frames


def scores(dtype: torch.dtype = torch.float32, *shape: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randn(*(shape or (FRAMES, ROWS, CLASSES)), generator=source).to(dtype)


def assert_equal(
    call: tuple[Any, ...], x: torch.Tensor, reduction: str, tolerance: float = 1e-6, **options: Any
) -> torch.Tensor:
    """Ours and torch's on the same scores; the loss."""
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    got = ctc.ctc_loss(mine.log_softmax(-1), *call, reduction=number, **options)
    expected = F.ctc_loss(theirs.log_softmax(-1), *call, reduction=reduction, **options)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    weights = torch.linspace(-1, 2, expected.numel()).reshape(expected.shape).to(x.dtype)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=tolerance, atol=tolerance, equal_nan=True)
    return expected


LENGTHS = {
    "all frames": ([7, 7, 7], [3, 2, 4]), "some frames": ([7, 3, 5], [3, 1, 2]), "nothing said": ([7, 1, 5], [3, 0, 2]),
    "one frame": ([1, 1, 1], [1, 1, 0]), "too long": ([7, 1, 5], [3, 2, 4]),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_equals_torch(lengths: tuple[list[int], list[int]], reduction: str) -> None:
    frames, said = map(torch.tensor, lengths)
    for zero_infinity in (False, True):
        assert_equal((PADDED, frames, said), scores(), reduction, zero_infinity=zero_infinity)
    one_after_the_other = torch.cat([row[:n] for row, n in zip(PADDED, said.tolist(), strict=True)])
    assert_equal((one_after_the_other, frames, said), scores(), reduction, zero_infinity=True)
    assert_equal(
        (one_after_the_other, tuple(frames.tolist()), tuple(said.tolist())), scores(), reduction, zero_infinity=True
    )


def test_a_transcript_that_does_not_fit_is_infinite_or_zero() -> None:
    call = (PADDED, torch.tensor([7, 1, 5]), torch.tensor([3, 2, 4]))
    assert assert_equal(call, scores(), "none", zero_infinity=True)[1] == 0
    assert ctc.reference(scores().log_softmax(-1), *call)[1] == float("inf")


def test_another_blank_other_types_and_one_recording() -> None:
    lengths = torch.tensor([7, 6, 7]), torch.tensor([3, 2, 2])
    assert_equal((PADDED.clamp(max=3), *lengths), scores(), "mean", blank=4)
    assert_equal((PADDED.int(), *(length.int() for length in lengths)), scores(torch.float64), "mean", 1e-12)
    assert_equal((PADDED[0, :3], torch.tensor(7), torch.tensor(3)), scores(torch.float32, FRAMES, CLASSES), "mean")
    assert_equal((PADDED[0, :3], (7,), (3,)), scores(torch.float32, FRAMES, CLASSES), "none")


def test_narrow_numbers_count_as_autocast_has_them() -> None:
    call = (PADDED, torch.tensor([7, 6, 7]), torch.tensor([3, 2, 2]))
    narrow = scores().log_softmax(-1).bfloat16()
    torch.testing.assert_close(ctc.ctc_loss(narrow, *call), F.ctc_loss(narrow.float(), *call))


def test_the_operator_is_well_made() -> None:
    x = scores().log_softmax(-1).requires_grad_()
    torch.library.opcheck(
        torch.ops.ws.ctc.default, (x, PADDED, torch.tensor([7, 7, 7]), torch.tensor([3, 2, 4]), 0, True)
    )
