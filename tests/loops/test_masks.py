"""Losses and models that pick places by a boolean mask: how many is told by data, and the step is whole all the same.

Every loss is trained beside eager PyTorch on masks that pick some places, all, a single one and none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, eager_update
from torch import nn

import wholestep
from wholestep.errors import WholestepWarning

Batch = dict[str, torch.Tensor]
Loss = Callable[..., torch.Tensor]
ROWS, LENGTH, WIDTH, WORDS = 3, 5, 8, 11


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        self.mask_token = nn.Parameter(torch.zeros(WIDTH))

    def hidden(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(self.embedding(words)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(words))


def batch(number: int, mask: str = "some", rows: int = ROWS) -> Batch:
    source = torch.Generator().manual_seed(number)
    words, labels = (torch.randint(0, WORDS, (rows, LENGTH), generator=source) for _ in range(2))
    masks = {
        "some": torch.rand(rows, LENGTH, generator=source) < 0.4,
        "all": torch.ones(rows, LENGTH, dtype=torch.bool),
    }
    masks["none"] = ~masks["all"]
    masks["one"] = masks["none"].index_put((torch.tensor(0), torch.tensor(2)), torch.tensor(True))
    return {"words": words, "labels": labels, "mask": masks[mask]}


BATCHES = [batch(0), batch(1), batch(2, "all"), batch(3, "one"), batch(4, "some")]
EMPTY = batch(5, "none")


def side(loss: Loss) -> Side:
    model = Words()
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss)


# ---- picked, as a mask says: an empty one gives what eager gives, NaN or zero ----


def labels_of_masked(m: Any, b: Batch) -> torch.Tensor:
    return F.cross_entropy(m(b["words"])[b["mask"]], b["labels"][b["mask"]])


def head_on_masked(m: Any, b: Batch) -> torch.Tensor:
    """As BERT does: the large head sees only what is predicted."""
    return F.cross_entropy(m.head(m.hidden(b["words"])[b["mask"]]), b["labels"][b["mask"]])


def masks_of_their_own(m: Any, b: Batch) -> torch.Tensor:
    labels = torch.where(b["mask"], b["labels"], -100)
    return F.cross_entropy(m(b["words"])[labels != -100], labels[labels != -100])


def mean_of_masked(m: Any, b: Batch) -> torch.Tensor:
    return m(b["words"]).square()[b["mask"]].mean() + torch.masked_select(m(b["words"]).mean(-1), b["mask"]).sum()


def squares_of_masked(m: Any, b: Batch) -> torch.Tensor:
    scores = m(b["words"])
    return F.mse_loss(scores[b["mask"]], torch.ones_like(scores)[b["mask"]], reduction="sum") / max(len(b["mask"]), 1)


def by_numbers_of_places(m: Any, b: Batch) -> torch.Tensor:
    rows, columns = torch.nonzero(b["mask"], as_tuple=True)
    flat = b["mask"].flatten().nonzero().squeeze(-1)
    return F.cross_entropy(m(b["words"])[rows, columns], b["labels"].flatten()[flat])


def by_where(m: Any, b: Batch) -> torch.Tensor:
    return F.cross_entropy(m(b["words"])[torch.where(b["mask"])], b["labels"][torch.where(b["mask"])])


def whole_rows(m: Any, b: Batch) -> torch.Tensor:
    return m(b["words"])[b["mask"].any(1)].mean()


def written_with_a_number(m: Any, b: Batch) -> torch.Tensor:
    hidden = m.hidden(b["words"]).clone()
    hidden[b["mask"]] = 0.0
    return F.cross_entropy(m.head(hidden).flatten(0, 1), b["labels"].flatten())


def written_with_a_token(m: Any, b: Batch) -> torch.Tensor:
    hidden = m.embedding(b["words"]).clone()
    hidden[b["mask"]] = m.mask_token
    return F.cross_entropy(m.head(torch.tanh(m.inner(hidden))).flatten(0, 1), b["labels"].flatten())


def written_where_it_was_read(m: Any, b: Batch) -> torch.Tensor:
    hidden = m.hidden(b["words"])
    out = torch.zeros_like(hidden)
    out[b["mask"]] = torch.relu(hidden[b["mask"]])
    return F.cross_entropy(m.head(out).flatten(0, 1), b["labels"].flatten())


def divided_by_the_count(m: Any, b: Batch) -> torch.Tensor:
    picked = m(b["words"])[b["mask"]]
    return picked.square().sum() / max(picked.shape[0], 1) + picked.sum() / max(b["mask"].sum(), 1)


def class_by_class(m: Any, b: Batch) -> torch.Tensor:
    return sum(((c + 1) * m(b["words"])[b["labels"] == c].sum() for c in range(3)), torch.zeros(()))


def different_words(m: Any, b: Batch) -> torch.Tensor:
    words, place = torch.unique(b["words"], return_inverse=True)
    return m.head(m.embedding(words)[place])[b["mask"]].square().sum()


PICKED = [
    labels_of_masked, head_on_masked, masks_of_their_own, mean_of_masked, squares_of_masked, by_numbers_of_places, by_where,
    whole_rows, written_with_a_number, written_with_a_token, written_where_it_was_read, divided_by_the_count, class_by_class,
    different_words,
]  # fmt: skip


def assert_whole(twins: Twins, captures: int = 1) -> None:
    assert twins.step.rung == "whole step" and twins.step.captures == captures, twins.step.explain()


@pytest.mark.parametrize("loss", PICKED)
def test_trains_as_in_eager(loss: Loss) -> None:
    twins = Twins(lambda: side(loss), BATCHES[0])
    twins.train(BATCHES, tolerance=1e-6)
    ours, theirs = twins.losses([EMPTY])
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), equal_nan=True, rtol=1e-6, atol=1e-6)
    twins.assert_same_state(1e-6)  # perhaps NaN in both
    assert_whole(twins)
    assert not any("ran in eager" in note for note in twins.step.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [labels_of_masked, masks_of_their_own, written_where_it_was_read, divided_by_the_count]
)
def test_compiled_trains_as_in_eager(loss: Loss) -> None:
    twins = Twins(lambda: side(loss), BATCHES[0], backend="inductor")
    twins.train(BATCHES, tolerance=1e-5)
    ours, theirs = twins.losses([EMPTY])
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), equal_nan=True, rtol=1e-5, atol=1e-5)
    assert_whole(twins)
    assert not twins.step.regions["notes"], twins.step.regions["notes"]


def test_masks_of_several_sizes_share_one_graph() -> None:
    twins = Twins(lambda: side(head_on_masked), batch(0, rows=2))
    twins.train([batch(n, rows=rows) for n, rows in enumerate((2, 3, 4, 6, 7, 5))], tolerance=1e-6)
    assert_whole(twins, captures=3)


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"memory": "1GiB"}, {"precision": "bf16"}], ids=str)
def test_with_options(options: dict[str, Any]) -> None:
    model = side(labels_of_masked)
    report = wholestep.verify(model.model, model.loss_fn, model.optimizer, BATCHES, steps=3, backend="interpret", **{
        k: v for k, v in options.items() if k != "memory"
    })  # fmt: skip
    assert report.ok and report.rung == "whole step", str(report)
    twins = Twins(lambda: side(labels_of_masked), BATCHES[0], **options)
    if "precision" not in options:
        twins.train(BATCHES, tolerance=1e-6)
    else:
        twins.losses(BATCHES)
    assert_whole(twins)


# ---- where the loss asks whether there is anything to pick ----


def nothing_picked(m: Any, b: Batch) -> torch.Tensor:
    picked = m(b["words"])[b["mask"]]
    if picked.numel() == 0:
        return m(b["words"]).sum() * 0.1
    return picked.mean()


def any_place(m: Any, b: Batch) -> torch.Tensor:
    loss = m(b["words"]).square().mean()
    if b["mask"].any():
        loss = loss + m(b["words"])[b["mask"]].mean()
    return loss


def count_is_zero(m: Any, b: Batch) -> torch.Tensor:
    if b["mask"].sum() == 0:
        return m(b["words"]).sum() * 0.1
    return m(b["words"])[b["mask"]].mean()


def count_as_a_number(m: Any, b: Batch) -> torch.Tensor:
    count = int(b["mask"].sum())
    return m(b["words"])[b["mask"]].sum() / count if count > 0 else m(b["words"]).sum() * 0.1


def number_of_places(m: Any, b: Batch) -> torch.Tensor:
    places = b["mask"].nonzero()
    if len(places) == 0:
        return m(b["words"]).sum() * 0.1
    return m(b["words"])[places[:, 0], places[:, 1]].mean()


def one_or_none(m: Any, b: Batch) -> torch.Tensor:
    places = torch.where(b["mask"])
    if all(len(found) <= 1 for found in places):
        return m(b["words"]).sum() * 0.1
    return m(b["words"])[places].square().mean()


def more_than_one(m: Any, b: Batch) -> torch.Tensor:
    loss = m(b["words"]).square().mean()
    return loss + m(b["words"])[b["mask"]].mean() if b["mask"].sum() > 1 else loss


ASKING = [nothing_picked, any_place, count_is_zero, count_as_a_number, number_of_places, one_or_none, more_than_one]


@pytest.mark.parametrize("loss", ASKING)
def test_an_empty_mask_goes_the_other_way(loss: Loss) -> None:
    twins = Twins(lambda: side(loss), BATCHES[0])
    twins.train([*BATCHES, EMPTY, *BATCHES], tolerance=1e-6)
    assert_whole(twins)
    note = next(note for note in twins.step.notes if "ran in eager PyTorch" in note)
    assert "test_masks.py:" in note


# ---- operators that ask whether there is any place, or more than one ----

OF_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "deviation": lambda p: p.std() + torch.var_mean(p, 0)[0].sum(),
    "normalised": lambda p: ((p - p.mean()) / (p.std() + 1e-3)).pow(3).mean(),
    "running sum": lambda p: p.flip(0).cumsum(0).square().mean(),
    "product": lambda p: p.prod(0).sum() + p.roll(1, 0).mean(),
    "distances": lambda p: torch.cdist(p, p).mean() + F.cosine_similarity(p[:, None], p[None], dim=-1).mean(),
    "logsumexp": lambda p: p.logsumexp(0).sum() + torch.trapezoid(p, dim=0).sum(),
    "batch norm": lambda p: F.batch_norm(p, None, None, training=True).sin().sum(),
    "group norm": lambda p: F.group_norm(p[:, :10], 2).sin().mean(),
    "determinant": lambda p: (p @ p.t() + torch.eye(len(p))).logdet(),
    "pooled": lambda p: F.adaptive_avg_pool1d(p.t()[None], 2).square().mean(),
    "triplets": lambda p: F.triplet_margin_loss(p, p.flip(0), p.roll(1, 0)),
    "attention": lambda p: F.scaled_dot_product_attention(p[None], p[None], p[None]).square().mean(),
}


@pytest.mark.parametrize("name", OF_PLACES)
def test_operators_over_what_is_picked(name: str) -> None:
    """Where there is one place, or none, eager may give another result, NaN, or raise."""

    def loss(m: Any, b: Batch) -> torch.Tensor:
        picked = m(b["words"])[b["mask"]]
        return m(b["words"]).square().mean() + OF_PLACES[name](picked).nan_to_num(0.0, 0.0, 0.0)

    def outcome(act: Callable[[Batch], torch.Tensor], b: Batch) -> Any:
        try:
            return act(b)
        except (RuntimeError, ValueError, IndexError) as error:
            return type(error).__name__, str(error)

    twins = Twins(lambda: side(loss), BATCHES[0], check="off")
    many = [batch(20 + i) for i in range(4)]
    for b in [*many, BATCHES[2], BATCHES[3], *many, EMPTY, *many]:
        given = [outcome(twins.step, b), outcome(lambda b: eager_update(twins.theirs, b)[0], b)]
        if isinstance(given[1], tuple):
            assert given[0] == given[1]
        else:
            torch.testing.assert_close(*given, rtol=1e-5, atol=1e-6, equal_nan=True)
    for ours, theirs in zip(twins.ours.trained, twins.theirs.trained):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_whole(twins)


def test_a_count_that_is_the_width_of_heads_is_never_guessed() -> None:
    """The scale of an attention is computed from it."""

    def loss(m: Any, b: Batch) -> torch.Tensor:
        turned = m(b["words"])[b["mask"]].t()[None]
        return F.scaled_dot_product_attention(turned, turned, turned).square().mean()

    with pytest.warns(WholestepWarning, match=r"how many places a mask picks \(the number n\)"):
        twins = Twins(lambda: side(loss), BATCHES[0], check="off")
        twins.train(BATCHES, tolerance=1e-5)
    assert twins.step.rung == "eager"


@pytest.mark.slow
def test_an_empty_mask_goes_the_other_way_when_compiled() -> None:
    twins = Twins(lambda: side(nothing_picked), BATCHES[0], backend="inductor")
    twins.train([*BATCHES, EMPTY, BATCHES[0]], tolerance=1e-5)
    assert_whole(twins)


# ---- two masks that have to pick as many ----


def difference(m: Any, b: Batch) -> torch.Tensor:
    return (m(b["words"])[b["mask"]] - m(b["words"]).detach()[b["other"]]).square().sum() + m(b["words"]).mean()


def with_other(b: Batch, count: int | None = None) -> Batch:
    other = b["mask"].flip(1)
    if count is not None:
        other = (torch.arange(other.numel()) < count).view_as(other)
    return {**b, "other": other}


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_masks_that_do_not_fit_raise_as_eager_does(backend: str) -> None:
    """Compiled code, made for two masks of one count, would read past the end of the shorter one."""
    twins = Twins(lambda: side(difference), with_other(BATCHES[0]), backend=backend)
    twins.train([with_other(b) for b in BATCHES[:3]], tolerance=1e-5)
    for count in (2, 14):
        bad = with_other(BATCHES[2], count)
        with pytest.raises(RuntimeError, match="must match the size") as ours:
            twins.step(bad)
        with pytest.raises(RuntimeError) as theirs:
            eager_update(twins.theirs, bad)
        assert str(ours.value) == str(theirs.value)
    twins.train([with_other(BATCHES[2], 1), with_other(BATCHES[3])], tolerance=1e-5)  # eager stretches a single place
    assert_whole(twins)


def test_what_depends_on_the_count_is_refused_by_name() -> None:
    def by_half(m: Any, b: Batch) -> torch.Tensor:
        picked = m(b["words"])[b["mask"]]
        return picked.mean() if len(picked) > 7 else picked.square().mean()

    with pytest.warns(WholestepWarning, match=r"how many places a mask picks.*mask\.sum\(\)"):
        twins = Twins(lambda: side(by_half), BATCHES[0])
        twins.train(BATCHES[:2], tolerance=1e-6)
    assert twins.step.rung == "eager"
