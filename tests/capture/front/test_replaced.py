"""Functions of torch's that Dynamo does not trace as they are: whole steps all the same, equal to eager."""

from __future__ import annotations

import bisect
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, eager_update, interpreted
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from wholestep.capture.front.replaced import SKIPPED

SOURCE = torch.Generator().manual_seed(3)
BATCHES = [(torch.randn(4, 6, generator=SOURCE), torch.rand(4, 5, generator=SOURCE) + 0.1) for _ in range(3)]


def gaussian(model: Any, batch: Any) -> torch.Tensor:
    return F.gaussian_nll_loss(model(batch[0]), batch[1], batch[1] - 0.05)


def in_segments(model: Any, batch: Any) -> torch.Tensor:
    return checkpoint_sequential(model, 2, batch[0], use_reentrant=False).square().mean()


def covariances(model: Any, batch: Any) -> torch.Tensor:
    """As VICReg has it; and with weights of observations, of one row, of correlations."""
    found = model(batch[0])
    counts, weights = torch.tensor([1, 2, 1, 3]), torch.tensor([0.5, 1.0, 0.2, 0.7])
    weighted = torch.cov(found.T, correction=0, fweights=counts) + torch.cov(found.T, aweights=weights)
    both = torch.cov(found[:, 0], fweights=counts, aweights=weights) + torch.corrcoef(found[:, 1])
    return torch.cov(found.T).square().sum() + weighted.sum() + both + torch.corrcoef(found.T).square().mean()


def divergence(model: Any, batch: Any) -> torch.Tensor:
    """torch.distributions asks for a broadcast shape in C."""
    normal = torch.distributions.MultivariateNormal(model(batch[0]), torch.eye(5))
    return torch.distributions.kl_divergence(
        normal, torch.distributions.MultivariateNormal(torch.zeros(5), torch.eye(5))
    ).mean()


def by_expert(model: Any, batch: Any) -> torch.Tensor:
    """Rows sorted by who takes them, and cut: data tells how many each one takes, some none."""
    chosen = (batch[0][:, 0] > 0).long() + (batch[0][:, 1] > 0).long()
    parts = batch[0][chosen.argsort(stable=True)].split(torch.bincount(chosen, minlength=4).tolist())
    counts = chosen.bincount(minlength=3).float()
    return torch.cat([model(part) * (i + 1) for i, part in enumerate(parts)]).square().mean() * counts[1:].sum()


def made(loss: Any) -> Side:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)


@pytest.mark.parametrize("loss", [gaussian, in_segments, covariances, divergence, by_expert])
def test_a_whole_step_as_in_eager(loss: Any) -> None:
    twins = Twins(lambda: made(loss), BATCHES[0], check="off")
    ours, theirs = twins.losses(BATCHES)
    assert twins.step.rung == "whole step", twins.step.explain()
    assert ours == pytest.approx(theirs, rel=1e-6)
    for a, b in zip(twins.ours.model.parameters(), twins.theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_variance_below_zero_raises_and_changes_nothing() -> None:
    side = made(gaussian)
    step = interpreted(side, BATCHES[0], check="off")
    step(BATCHES[0])
    before = copy.deepcopy(side.model.state_dict())
    with pytest.raises(ValueError, match="var has negative entry/entries"):
        step((BATCHES[1][0], -BATCHES[1][1]))
    assert all(torch.equal(value, before[name]) for name, value in side.model.state_dict().items())
    other = made(gaussian)
    other.model.load_state_dict(before)
    step(BATCHES[2])
    eager_update(other, BATCHES[2])
    assert step.rung == "whole step"
    assert all(map(torch.equal, side.model.parameters(), other.model.parameters()))


def test_bisection_finds_the_same_place() -> None:
    """In lists that are not sorted, too."""
    lists = [list(rows) for n in range(5) for rows in itertools.product(range(3), repeat=n)]
    for function in (bisect.bisect_right, bisect.bisect_left):
        ours = SKIPPED[function]
        assert all(ours(rows, x) == function(rows, x) for rows in lists for x in (-1, 0, 0.5, 1, 2, 3))
        assert ours([1, 2, 2, 3], 2, 1, 3) == function([1, 2, 2, 3], 2, 1, 3)


def test_more_numbers_than_are_counted_for_are_eagers() -> None:
    def counting(model: Any, batch: Any) -> Any:
        counts = torch.bincount(batch[1], minlength=3)
        return model(batch[0]).square().mean() * counts.sum() ** 2, {"counts": counts}

    side = made(counting)
    batches = [(BATCHES[0][0], torch.tensor(chosen)) for chosen in ([0, 2, 1, 2], [0, 5, 1, 2], [1, 1, 1, 1])]
    step = interpreted(side, batches[0], check="off")
    assert [len(step(batch)[1]["counts"]) for batch in batches] == [3, 6, 3]
    assert step.rung == "whole step"
    with pytest.raises(RuntimeError, match="non-negative"):
        step((BATCHES[0][0], torch.tensor([-1, 0, 0, 0])))
