"""Recurrent networks over packed sequences: lengths come with the batch, and one graph serves all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, eager_update
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import wholestep

WORDS, TAGS, WIDTH = 11, 5, 8
Batch = dict[str, Any]


class Tagger(nn.Module):
    def __init__(self, kind: str = "LSTM", **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.layers = getattr(nn, kind)(6, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(2 * WIDTH if options.get("bidirectional") else WIDTH, TAGS)

    def forward(self, words: torch.Tensor, lengths: Any, **options: Any) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(words), lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.layers(packed)
        return self.head(pad_packed_sequence(states, batch_first=True, **options)[0])


def batch(number: int, rows: int = 4, steps: int = 6, lengths: list[int] | None = None, ordered: bool = False) -> Batch:
    source = torch.Generator().manual_seed(number)
    drawn = torch.randint(1, steps + 1, (rows,), generator=source)
    drawn[number % rows] = steps  # a loader pads to the longest
    found = torch.tensor(lengths) if lengths is not None else drawn
    found = found.sort(descending=True).values if ordered else found
    tags = torch.randint(0, TAGS, (rows, steps), generator=source)
    tags = tags.masked_fill(torch.arange(steps) >= found[:, None], -100)
    return {"words": torch.randint(0, WORDS, (rows, steps), generator=source), "tags": tags, "lengths": found}


BATCHES = [batch(0), batch(1), batch(2, lengths=[6, 6, 6, 6]), batch(3, lengths=[1, 6, 1, 1]), batch(4)]


def tagged(m: Any, b: Batch) -> torch.Tensor:
    return F.cross_entropy(m(b["words"], b["lengths"]).flatten(0, 1), b["tags"].flatten())


def last_state(m: Any, b: Batch) -> torch.Tensor:
    packed = pack_padded_sequence(m.embedding(b["words"]), b["lengths"], batch_first=True, enforce_sorted=False)
    _, (last, _) = m.layers(packed)
    return F.cross_entropy(m.head(last[-1]), b["tags"][:, 0])


def captions(m: Any, b: Batch) -> torch.Tensor:
    """As in image captioning: targets are packed too, and the loss is taken over the data."""
    packed = pack_padded_sequence(m.embedding(b["words"]), b["lengths"], batch_first=True)
    targets = pack_padded_sequence(b["tags"], b["lengths"], batch_first=True)[0]
    states, _ = m.layers(packed)
    return F.cross_entropy(m.head(states.data), targets)


def total_length(m: Any, b: Batch) -> torch.Tensor:
    scores = m(b["words"], b["lengths"], total_length=b["words"].shape[1] + 1, padding_value=0.5)
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), b["tags"].flatten()) + scores[:, -1].square().mean()


def side(loss: Callable[..., torch.Tensor], *args: Any, **options: Any) -> Side:
    model = Tagger(*args, **options)
    return Side(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss)


def assert_whole(twins: Twins, captures: int = 1) -> None:
    assert twins.step.rung == "whole step" and twins.step.captures == captures, twins.step.explain()
    assert not any("ran in eager" in note or "unrolled" in note for note in twins.step.notes)


LAYERS = {
    "lstm": ("LSTM", {}), "two layers of gru, both ways": ("GRU", {"num_layers": 2, "bidirectional": True}),
    "rnn": ("RNN", {"nonlinearity": "relu", "bias": False}), "lstm, both ways": ("LSTM", {"bidirectional": True}),
}  # fmt: skip


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_trains_as_in_eager(layers: tuple[str, dict[str, Any]]) -> None:
    twins = Twins(lambda: side(tagged, layers[0], **layers[1]), BATCHES[0])
    twins.train(BATCHES, tolerance=1e-5)
    assert_whole(twins)


@pytest.mark.parametrize("loss", [last_state, total_length])
def test_other_uses(loss: Callable[..., torch.Tensor]) -> None:
    shorter = [batch(number, lengths=[3, 2, 5, 1]) for number in range(2)]  # padded beyond the longest
    twins = Twins(lambda: side(loss), BATCHES[0])
    twins.train([*BATCHES, *shorter], tolerance=1e-5)
    assert_whole(twins)


def test_losses_over_packed_data() -> None:
    batches = [batch(number, ordered=True) for number in range(4)]
    twins = Twins(lambda: side(captions), batches[0])
    twins.train(batches, tolerance=1e-5)
    assert_whole(twins)


def test_batches_of_other_lengths_share_one_graph() -> None:
    sizes = [(2, 5), (3, 6), (4, 7), (3, 4), (5, 8), (2, 3)]
    twins = Twins(lambda: side(tagged), batch(0, *sizes[0]))
    twins.train([batch(number, *size) for number, size in enumerate(sizes)], tolerance=1e-5)
    assert_whole(twins, captures=3)


def test_lengths_in_a_list() -> None:
    batches = [
        {**b, "lengths": b["lengths"].tolist()} for b in (batch(n, lengths=[6, 2 + n, 3, 5 - n]) for n in range(3))
    ]
    twins = Twins(lambda: side(tagged), batches[0])
    twins.train(batches, tolerance=1e-5)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_dropout_between_layers_equals_eager_with_the_same_draws() -> None:
    torch.manual_seed(0)
    mine = side(tagged, num_layers=2, dropout=0.4)
    report = wholestep.verify(mine.model, tagged, mine.optimizer, BATCHES, steps=3, backend="interpret")
    assert report.rung == "whole step" and report.ok, str(report)


@pytest.mark.slow
def test_compiled_trains_as_in_eager() -> None:
    twins = Twins(lambda: side(tagged), BATCHES[0], backend="inductor")
    twins.train(BATCHES, tolerance=1e-5)
    assert_whole(twins)


def test_a_padded_output_that_is_shorter_is_taken_by_eager() -> None:
    """Nothing but data tells its length; the mean of what is there does not mind."""

    def loss(m: Any, b: Batch) -> torch.Tensor:
        return m(b["words"], b["lengths"]).square().mean()

    twins = Twins(lambda: side(loss), BATCHES[0])
    twins.train([*BATCHES, batch(7, lengths=[3, 2, 5, 1]), BATCHES[0]], tolerance=1e-5)
    assert twins.step.rung == "whole step"
    assert any("ran in eager" in note and "test_packed_sequences.py" in note for note in twins.step.notes)


@pytest.mark.parametrize("lengths", [[6, 0, 1, 2], [6, 7, 1, 1], [2, 6, 1, 1]], ids=["zero", "too long", "not sorted"])
def test_lengths_that_are_not_valid_raise_as_in_eager(lengths: list[int]) -> None:
    loss = captions if lengths == [2, 6, 1, 1] else tagged
    batches = [batch(number, ordered=True) for number in range(2)]
    twins = Twins(lambda: side(loss), batches[0])
    twins.train(batches, tolerance=1e-5)
    bad = {**batches[0], "lengths": torch.tensor(lengths)}
    with pytest.raises(Exception) as ours:
        twins.step(bad)
    with pytest.raises(Exception) as theirs:
        eager_update(twins.theirs, bad)
    assert type(ours.value) is type(theirs.value) and str(ours.value) == str(theirs.value)
    twins.assert_same_state(1e-5)
