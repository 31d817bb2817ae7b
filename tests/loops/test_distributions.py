"""Losses made of torch.distributions, whose arguments are validated as by default: whole steps that train as eager does.

What a loss only evaluates is trained beside eager PyTorch. What it draws differs between the two, so those losses are
compared by `wholestep.verify`, which gives both sides the same draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, eager_update
from torch import nn

import wholestep

Batch = dict[str, torch.Tensor]
ROWS, SEEN, OUT = 5, 6, 4


def batch(number: int, rows: int = ROWS) -> Batch:
    source = torch.Generator().manual_seed(number)
    return {
        "seen": torch.randn(rows, SEEN, generator=source), "action": torch.randint(0, OUT, (rows,), generator=source),
        "advantage": torch.rand(rows, generator=source),
    }  # fmt: skip


BATCHES = [batch(number) for number in range(4)]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SEEN, 8), nn.Tanh(), nn.Linear(8, OUT))


def gaussian(model: Any, seen: torch.Tensor) -> D.Normal:
    mean, log_deviation = model(seen).chunk(2, dim=1)
    return D.Normal(mean, log_deviation.exp())


# ---- evaluated only ----


def policy_gradient(model: Any, b: Batch) -> torch.Tensor:
    choice = D.Categorical(logits=model(b["seen"]))
    return -(choice.log_prob(b["action"]) * b["advantage"]).mean() - 0.01 * choice.entropy().mean()


def from_probabilities(model: Any, b: Batch) -> torch.Tensor:
    return -D.Categorical(probs=model(b["seen"]).softmax(-1)).log_prob(b["action"]).mean()


def continuous_policy(model: Any, b: Batch) -> torch.Tensor:
    choice = D.Independent(gaussian(model, b["seen"]), 1)
    return -(choice.log_prob(b["seen"][:, :2]) * b["advantage"]).mean() - 0.01 * choice.entropy().mean()


def covariance(model: Any, b: Batch) -> torch.Tensor:
    """Symmetry and positive definiteness are looked at, one after the other."""
    mean, log_deviation = model(b["seen"]).chunk(2, dim=1)
    factor = torch.diag_embed(log_deviation.exp())
    return -D.MultivariateNormal(mean, covariance_matrix=factor @ factor.mT).log_prob(b["seen"][:, :2]).mean()


def mixture(model: Any, b: Batch) -> torch.Tensor:
    weights, means = model(b["seen"]).chunk(2, dim=1)
    density = D.MixtureSameFamily(D.Categorical(logits=weights), D.Normal(means, torch.ones_like(means)))
    return -density.log_prob(b["seen"][:, 0]).mean()


def squashed(model: Any, b: Batch) -> torch.Tensor:
    density = D.TransformedDistribution(gaussian(model, b["seen"]), [D.TanhTransform(cache_size=1)])
    return -density.log_prob(0.9 * b["seen"][:, :2].tanh()).mean()


def on_the_simplex(model: Any, b: Batch) -> torch.Tensor:
    positive = F.softplus(model(b["seen"])) + 0.1
    ends = D.Beta(positive[:, :2], positive[:, 2:]).log_prob(b["seen"][:, :2].sigmoid())
    shares = D.Dirichlet(positive).log_prob(b["seen"][:, :4].softmax(-1))
    return -ends.mean() - shares.mean() - D.Gamma(positive, 1.0).log_prob(b["seen"][:, :4].exp()).mean()


def counts(model: Any, b: Batch) -> torch.Tensor:
    rates, seen = model(b["seen"]), b["action"][:, None].float()
    return -D.Poisson(rates.exp()).log_prob(seen).mean() - D.NegativeBinomial(3.0, logits=rates).log_prob(seen).mean()


def divergence(model: Any, b: Batch) -> torch.Tensor:
    posterior = gaussian(model, b["seen"])
    prior = D.Normal(torch.zeros_like(posterior.loc), torch.ones_like(posterior.scale))
    return D.kl_divergence(posterior, prior).sum(-1).mean() + D.kl_divergence(posterior, D.Normal(0.0, 2.0)).mean()


EVALUATED = [
    policy_gradient,
    from_probabilities,
    continuous_policy,
    covariance,
    mixture,
    squashed,
    on_the_simplex,
    counts,
    divergence,
]


def adam(loss: Callable[..., torch.Tensor]) -> Side:
    model = network()
    return Side(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss)


@pytest.mark.parametrize("loss", EVALUATED)
def test_trains_as_in_eager(loss: Callable[..., torch.Tensor]) -> None:
    twins = Twins(lambda: adam(loss), BATCHES[0])
    twins.train([*BATCHES, batch(9, rows=1)], tolerance=1e-6)
    assert twins.step.rung == "whole step", twins.step.explain()


@pytest.mark.slow
@pytest.mark.parametrize("loss", [policy_gradient, divergence])
def test_compiled_trains_as_in_eager(loss: Callable[..., torch.Tensor]) -> None:
    twins = Twins(lambda: adam(loss), BATCHES[0], backend="inductor")
    twins.train(BATCHES, tolerance=1e-5)
    assert twins.step.rung == "whole step", twins.step.explain()


# ---- drawn from ----


def autoencoder(model: Any, b: Batch) -> torch.Tensor:
    posterior = gaussian(model, b["seen"])
    code = posterior.rsample()
    drawn = D.Bernoulli(logits=code.repeat(1, 3)).log_prob((b["seen"] > 0).float()).sum(-1)
    return (D.kl_divergence(posterior, D.Normal(torch.zeros_like(code), torch.ones_like(code))).sum(-1) - drawn).mean()


def soft_actor(model: Any, b: Batch) -> torch.Tensor:
    density = D.TransformedDistribution(gaussian(model, b["seen"]), [D.TanhTransform(cache_size=1)])
    action = density.rsample()
    return (0.2 * density.log_prob(action) - action).sum(-1).mean()


def reinforce(model: Any, b: Batch) -> torch.Tensor:
    choice = D.Categorical(logits=model(b["seen"]))
    coins = D.Bernoulli(logits=model(b["seen"]))
    return -(choice.log_prob(choice.sample()) * b["advantage"]).mean() - coins.log_prob(coins.sample()).mean()


def relaxed(model: Any, b: Batch) -> torch.Tensor:
    logits = model(b["seen"])
    soft = D.RelaxedOneHotCategorical(torch.tensor(0.7), logits=logits).rsample()
    hard = D.OneHotCategoricalStraightThrough(logits=logits).rsample()
    return ((soft + hard) * b["seen"][:, :4]).mean()


def by_rejection(model: Any, b: Batch) -> torch.Tensor:
    positive = F.softplus(model(b["seen"])) + 0.5
    drawn = D.Gamma(positive, 1.0).rsample() + D.Dirichlet(positive).rsample() + D.StudentT(positive).rsample().tanh()
    rate = D.Poisson(positive)
    return (
        drawn.mean() + D.Beta(positive[:, :2], positive[:, 2:]).rsample().mean() - rate.log_prob(rate.sample()).mean()
    )


def heavy_tails(model: Any, b: Batch) -> torch.Tensor:
    place = model(b["seen"])
    tails = D.Cauchy(place, 1.0).rsample().tanh() + D.Laplace(place, 1.0).rsample() + D.LogNormal(place, 0.5).rsample()
    times = D.Geometric(logits=place)
    return tails.mean() - times.log_prob(times.sample()).mean()


DRAWN = [autoencoder, soft_actor, reinforce, relaxed, by_rejection, heavy_tails]


@pytest.mark.parametrize("loss", DRAWN)
def test_equals_eager_with_the_same_draws(loss: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    side = adam(loss)
    report = wholestep.verify(side.model, loss, side.optimizer, BATCHES, steps=3, backend="interpret")
    assert report.rung == "whole step" and report.ok, str(report)


# ---- validation ----


def outside(model: Any, b: Batch) -> torch.Tensor:
    """Of what the batch brings: a value that is not in the support, or a deviation that is not positive."""
    density = D.Normal(model(b["seen"]).mean(-1), b["advantage"])
    return (
        -density.log_prob(b["seen"][:, 0]).mean()
        - D.Bernoulli(logits=model(b["seen"])).log_prob(b["seen"][:, :4]).mean()
    )


@pytest.mark.parametrize("where", ["parameter", "sample", "not a number"])
def test_invalid_values_raise_as_eager_and_train_nothing(where: str) -> None:
    good = [{**b, "seen": (b["seen"] > 0).float()} for b in BATCHES]
    bad = {
        "parameter": {**good[0], "advantage": -good[0]["advantage"]}, "sample": BATCHES[0],
        "not a number": {**good[0], "seen": good[0]["seen"] * float("nan")},
    }[where]  # fmt: skip
    twins = Twins(lambda: adam(outside), good[0])
    twins.train(good[:2], tolerance=1e-6)
    with pytest.raises(ValueError) as ours:
        twins.step(bad)
    with pytest.raises(ValueError) as theirs:
        eager_update(twins.theirs, bad)
    assert str(ours.value) == str(theirs.value) and "found invalid values" in str(ours.value)
    twins.assert_same_state(1e-6)
    twins.train(good[2:], tolerance=1e-6)
    assert twins.step.rung == "whole step"


def test_validation_stays_on_for_the_program_around() -> None:
    assert D.Distribution._validate_args
    with pytest.raises(ValueError, match="scale"):
        D.Normal(torch.zeros(2), -torch.ones(2))
    assert isinstance(D.Categorical.probs, D.utils.lazy_property)


def test_switching_validation_is_followed() -> None:
    good = [{**b, "seen": (b["seen"] > 0).float()} for b in BATCHES]
    twins = Twins(lambda: adam(outside), good[0])
    try:
        D.Distribution.set_default_validate_args(False)
        twins.train(good[:2], tolerance=1e-6)
        D.Distribution.set_default_validate_args(True)
        with pytest.raises(ValueError, match="found invalid values"):
            twins.step(BATCHES[0])
        with pytest.raises(ValueError, match="found invalid values"):
            eager_update(twins.theirs, BATCHES[0])
        D.Distribution.set_default_validate_args(False)
        twins.train(BATCHES, tolerance=1e-6)
    finally:
        D.Distribution.set_default_validate_args(True)
    assert twins.step.rung == "whole step"


def test_weights_that_nothing_can_be_drawn_from_raise() -> None:
    def loss(model: Any, b: Batch) -> torch.Tensor:
        chosen = torch.multinomial(b["advantage"], 2)
        return model(b["seen"])[chosen].square().mean()

    side = adam(loss)
    step = wholestep.compile(side.model, loss, side.optimizer, BATCHES[0], backend="interpret", cache=False)
    step(BATCHES[0])
    before = [p.detach().clone() for p in side.model.parameters()]
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        step({**BATCHES[0], "advantage": BATCHES[0]["advantage"] * float("nan")})
    assert all(torch.equal(a, b) for a, b in zip(before, side.model.parameters(), strict=True))
    assert step.rung == "whole step"
