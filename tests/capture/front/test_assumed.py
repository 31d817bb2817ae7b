"""Conditions on data of which one side raises: whole steps, eager's own error where one does not hold, nothing left behind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, eager_update
from torch import nn

import wholestep
from wholestep.errors import WholestepWarning
from wholestep.runtime.step import MOST_WRONG

BATCHES = class_batches()
BAD = (BATCHES[0][0] * 1e9, BATCHES[0][1])


class Normed(nn.Module):
    """A BatchNorm counts in front of the line that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        self.seen += 1
        if (x.abs() > 1e6).any():
            raise ValueError(f"too large: {x.abs().max():.3g}")
        return self.head(h)


def asserted(model: Any, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    assert (batch[0].abs() < 1e6).all(), f"inputs up to {batch[0].max():.2f}"
    return loss


def read_as_number(model: Any, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    if batch[0].abs().max().item() > 1e6:
        raise OverflowError("inputs are too large")
    return loss


def one_of_two(model: Any, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    if torch.isnan(loss) or (batch[0].abs() > 1e6).any():
        raise RuntimeError("nan" if torch.isnan(loss) else "large")
    return loss


def asserted_by_torch(model: Any, batch: Any) -> torch.Tensor:
    torch._assert((batch[0].abs() < 1e6).all(), "inputs are too large")
    return classify(model, batch)


def caught(model: Any, batch: Any) -> torch.Tensor:
    try:
        asserted(model, batch)
        scale = 1.0
    except AssertionError:
        scale = 0.5
    return scale * classify(model, (batch[0].clamp(-1, 1), batch[1]))


def adam(model: nn.Module, loss: Any = classify) -> Side:
    return Side(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss)


def fail_both(twins: Twins, batch: Any) -> tuple[Exception, Exception]:
    """The error of our step and that of the eager loop."""
    with pytest.raises(Exception) as ours:
        twins.step(batch)
    with pytest.raises(Exception) as theirs:
        eager_update(twins.theirs, batch)
    return ours.value, theirs.value


@pytest.mark.parametrize("loss", [asserted, read_as_number, one_of_two, asserted_by_torch])
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}], ids=["plain", "clipped"])
def test_a_condition_that_fails_raises_as_eager_and_changes_nothing(loss: Any, options: dict[str, Any]) -> None:
    twins = Twins(lambda: adam(nn.Linear(4, 3), loss), BATCHES[0], **options)
    twins.train(BATCHES[:3])
    for _ in range(MOST_WRONG + 1):  # an error is no reason to leave the whole step
        ours, theirs = fail_both(twins, BAD)
        assert type(ours) is type(theirs)
        assert str(ours).splitlines()[0] == str(theirs).splitlines()[0]  # pytest adds lines to that of an assert
        twins.assert_same_state()
    assert twins.step.count == 3
    twins.train(BATCHES[3:])
    assert twins.step.rung == "whole step" and twins.step.captures == 1, twins.step.explain()


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_buffers_and_counters_are_as_eager_leaves_them(backend: str) -> None:
    twins = Twins(lambda: adam(Normed()), BATCHES[0], backend=backend)
    twins.train(BATCHES[:3], tolerance=1e-6)
    ours, theirs = fail_both(twins, BAD)
    assert isinstance(ours, ValueError) and str(ours) == str(theirs)
    assert twins.ours.model.seen == twins.theirs.model.seen == 4
    assert twins.ours.model.norm.num_batches_tracked == twins.theirs.model.norm.num_batches_tracked
    twins.train(BATCHES[3:], tolerance=1e-6)
    assert twins.step.rung == "whole step"


def test_a_first_step_that_raises_is_taken_later() -> None:
    twins = Twins(lambda: adam(nn.Linear(4, 3), one_of_two), BATCHES[0])
    ours, theirs = fail_both(twins, BAD)
    assert str(ours) == str(theirs) == "large"
    twins.train(BATCHES)
    assert twins.step.rung == "whole step"


def test_micro_batches_before_the_failing_one_count_for_nothing() -> None:
    side = adam(nn.Linear(4, 3), asserted)
    step = wholestep.compile(
        side.model, asserted, side.optimizer, BATCHES[0], accumulate=2, backend="interpret", cache=False
    )
    step([BATCHES[0], BATCHES[1]])
    before = {n: p.detach().clone() for n, p in side.model.named_parameters()}
    with pytest.raises(AssertionError, match="inputs up to"):
        step([BATCHES[2], BAD])
    assert all(torch.equal(before[n], p) for n, p in side.model.named_parameters())
    assert step.rung == "whole step"


def test_an_error_that_the_loss_catches_is_followed() -> None:
    """Eager takes such a step; one that comes again and again ends the speculation, and the warning names the line."""
    twins = Twins(lambda: adam(nn.Linear(4, 3), caught), BATCHES[0])
    twins.train(BATCHES[:2])
    assert twins.step.rung == "whole step"
    twins.train([BAD, BATCHES[2]])
    assert twins.step.rung == "whole step"
    assert any("test_assumed.py" in note and "ran in eager PyTorch" in note for note in twins.step.notes)
    with pytest.warns(WholestepWarning, match=r"taken for granted.*test_assumed\.py:\d+"):
        twins.train([BAD] * MOST_WRONG)
    assert twins.step.rung == "eager"
    twins.train(BATCHES)


@pytest.mark.parametrize("how", ["isnan", "any", "not all finite"])
def test_numbers_are_finite_until_they_are_not(how: str) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = classify(model, batch)
        scores = model(batch[0])
        broken = {
            "isnan": torch.isnan(found),
            "any": torch.isnan(scores).any(),
            "not all finite": ~torch.isfinite(scores).all(),
        }
        if broken[how] if how != "not all finite" else not torch.isfinite(scores).all():
            return model(torch.ones(2, 4)).square().mean()
        return found

    twins = Twins(lambda: adam(nn.Linear(4, 3), loss), BATCHES[0])
    broken = (BATCHES[3][0] * float("nan"), BATCHES[3][1])
    twins.train([*BATCHES[:3], broken, *BATCHES[3:]])
    assert twins.step.rung == "whole step", twins.step.explain()


def test_a_branch_that_raises_on_neither_side_is_refused() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = classify(model, batch)
        return found * 2 if found > 1 else found

    with pytest.warns(WholestepWarning, match=r"torch\.where.*test_assumed\.py:\d+"):
        twins = Twins(lambda: adam(nn.Linear(4, 3), loss), BATCHES[0])
        twins.train(BATCHES)
    assert twins.step.rung == "eager"


def test_nothing_of_it_is_left_on_for_others() -> None:
    """torch.compile of the user's own breaks the graph at such a line, and goes on in Python."""

    def checked(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt()

    compiled = torch.compile(checked, backend="eager")
    assert compiled(torch.ones(3)).sum() == 3
    with pytest.raises(ValueError, match="negative"), contextlib.suppress(RuntimeError):
        compiled(-torch.ones(3))


class Counted(nn.Module):
    """Counts are broadcast where there is one of them: torch's tracing takes a size that data tells for any but 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        return (self.weight * (self.scale * torch.bincount(places))).sum()


ONE, TWO = torch.tensor([0, 0]), torch.tensor([0, 1])


@pytest.mark.parametrize("batches", [[ONE, ONE, TWO], [TWO, ONE, TWO]], ids=["first", "later"])
def test_a_size_of_one_that_is_broadcast_is_trained_by_eager(batches: list[torch.Tensor]) -> None:
    twins = Twins(lambda: adam(Counted(), lambda model, batch: model(batch)), batches[0])
    twins.train(batches)
    assert twins.step.rung == "whole step"
    assert any("ran in eager PyTorch" in note for note in twins.step.notes)


def test_verify_says_which_step_eager_takes() -> None:
    made = adam(Counted(), lambda model, batch: model(batch))
    report = wholestep.verify(made.model, made.loss_fn, made.optimizer, [TWO, ONE], steps=2, backend="interpret")
    assert report.ok and {row.step for row in report.rows} == {"0", "eval"}
    assert any("step 1 runs in eager PyTorch" in note for note in report.notes)
