"""Speech recognition with CTC: lengths differ from batch to batch, in tensors or in tuples, and the step is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, eager_update
from torch import nn

ROWS, FRAMES, BINS, CLASSES = 3, 9, 6, 5
Batch = dict[str, Any]


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv1d(BINS, 8, 3, padding=1), nn.Linear(8, CLASSES)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """[rows, frames, bins] -> log-probabilities [frames, rows, classes]"""
        hidden = torch.tanh(self.convolution(sound.transpose(1, 2))).transpose(1, 2)
        return self.head(hidden).log_softmax(-1).transpose(0, 1)


def batch(number: int, said: tuple[int, ...], frames: tuple[int, ...] = (9, 8, 9)) -> Batch:
    source = torch.Generator().manual_seed(number)
    return {
        "sound": torch.randn(ROWS, FRAMES, BINS, generator=source), "text": torch.randint(1, CLASSES, (ROWS, 4), generator=source),
        "frames": torch.tensor(frames), "said": torch.tensor(said),
    }  # fmt: skip


SAID = [(4, 2, 3), (1, 2, 4), (0, 1, 2), (4, 4, 4), (1, 1, 1)]
BATCHES = [batch(number, said) for number, said in enumerate(SAID)]


def padded(model: Any, b: Batch) -> torch.Tensor:
    return F.ctc_loss(model(b["sound"]), b["text"], b["frames"], b["said"], zero_infinity=True)


criterion = nn.CTCLoss(blank=0, reduction="sum")


def by_module(model: Any, b: Batch) -> torch.Tensor:
    return criterion(model(b["sound"]), b["text"], b["frames"], b["said"]) / ROWS


def weighted_rows(model: Any, b: Batch) -> torch.Tensor:
    losses = torch.nn.functional.ctc_loss(model(b["sound"]), b["text"], b["frames"], b["said"], reduction="none")
    return (losses * torch.tensor([0.5, 1.0, 2.0])).mean()


def side(loss: Callable[..., torch.Tensor]) -> Side:
    model = Listener()
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss)


@pytest.mark.parametrize("loss", [padded, by_module, weighted_rows])
def test_trains_as_in_eager(loss: Callable[..., torch.Tensor]) -> None:
    twins = Twins(lambda: side(loss), BATCHES[0])
    twins.train(BATCHES, tolerance=1e-6)
    assert twins.step.rung == "whole step" and twins.step.captures == 1, twins.step.explain()


@pytest.mark.slow
def test_compiled_trains_as_in_eager() -> None:
    twins = Twins(lambda: side(padded), BATCHES[0], backend="inductor")
    twins.train(BATCHES, tolerance=1e-5)
    assert twins.step.rung == "whole step" and not twins.step.regions["notes"], twins.step.explain()


def test_texts_one_after_the_other() -> None:
    """As warp-ctc has them: their sum is the size of a tensor, another one at every step."""

    def joined(b: Batch) -> Batch:
        texts = torch.cat([row[:n] for row, n in zip(b["text"], b["said"].tolist(), strict=True)])
        return {**b, "text": texts}

    twins = Twins(lambda: side(padded), joined(BATCHES[0]))
    twins.train([joined(b) for b in (*BATCHES, *BATCHES)], tolerance=1e-6)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_lengths_in_tuples() -> None:
    """Numbers that vary become inputs: two captures, however many lengths there are."""
    numbers = [(6, 4, 3), (5, 2, 4), (7, 3, 2), (4, 4, 4), (9, 2, 3), (8, 3, 3)]

    def told(number: int, said: tuple[int, ...]) -> Batch:
        found = batch(number, (2, 2, 2))
        return {**found, "frames": (9, 8, said[0]), "said": (2, 3, min(said[1:]))}

    batches = [told(number, said) for number, said in enumerate(numbers)]
    twins = Twins(lambda: side(padded), batches[0])
    twins.train(batches, tolerance=1e-6)
    assert twins.step.rung == "whole step" and twins.step.captures <= 3, twins.step.explain()


def test_more_frames_than_there_are_raise_as_in_eager() -> None:
    twins = Twins(lambda: side(padded), BATCHES[0])
    twins.train(BATCHES[:2], tolerance=1e-6)
    bad = batch(7, (2, 2, 2), frames=(9, 8, 10))
    with pytest.raises(RuntimeError) as ours:
        twins.step(bad)
    with pytest.raises(RuntimeError) as theirs:
        eager_update(twins.theirs, bad)
    assert str(ours.value) == str(theirs.value)
    twins.train(BATCHES[2:], tolerance=1e-6)
