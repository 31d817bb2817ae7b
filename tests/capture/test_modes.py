"""Random numbers of a step: torch's are keyed, reproducible, different at every step and site; Python's are drawn live."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, eager_update, interpreted, small_mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wholestep import Step
from wholestep.capture.modes import FunctionLevel, Sites
from wholestep.errors import WholestepWarning

BATCHES = class_batches()
ONES = torch.ones(6, 50)


class Noisy(nn.Module):
    """Returns what `draw(x)` gives, so that a test can look at it."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(x)


def seen_by(model: Noisy, x: torch.Tensor) -> Any:
    drawn = model(x)
    return model.weight * drawn.float().mean(), {"drawn": drawn}


def noisy_step(draw: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Any:
    model = Noisy(draw)
    return interpreted(Side(model, torch.optim.SGD(model.parameters(), lr=0.0), seen_by), ONES, **options)


def drawn(step: Any, steps: int = 1) -> list[torch.Tensor]:
    return [step(ONES)[1]["drawn"] for _ in range(steps)]


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "module dropout": lambda x: nn.Dropout(0.4)(x),
    "dropout1d": lambda x: F.dropout1d(x.reshape(6, 5, 10), 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "rand": lambda x: torch.rand(x.shape) * x,
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(6, 50) * x,
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 1000, (6, 50)) * x,
    "randint from": lambda x: torch.randint(-5, 500, (6, 50)) * x,
    "bernoulli": lambda x: torch.bernoulli(x * 0.3),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 3.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "randperm": lambda x: torch.randperm(50) * x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, tau=0.5),
    "rrelu": lambda x: F.rrelu(-x, 0.1, 0.5, training=True),
    "rrelu_": lambda x: F.rrelu_(-x, 0.1, 0.5, training=True),
    "randint_like": lambda x: torch.randint_like(x, -5, 500),
    "random_": lambda x: torch.empty_like(x).random_(),
    "normal": lambda x: torch.normal(0.0, 1.0, size=(6, 50)) * x,
    "normal_around": lambda x: torch.normal(torch.ones_like(x), 3.0),
    "multinomial": lambda x: torch.multinomial(torch.arange(1.0, 5.0).expand(60, 4), 5, replacement=True).float(),
    "without_replacement": lambda x: torch.multinomial(torch.ones(60, 4), 4).float(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(1.0, 2.0).clamp(-9, 11),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.25),
    "gamma": lambda x: torch._standard_gamma(torch.full_like(x, 4.0)),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 9.0)),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 8.0), torch.full_like(x, 0.5)),
    "dirichlet": lambda x: torch._sample_dirichlet(torch.ones(300, 2)),
}
NO_KEYED_FORM = {"random_"}


@pytest.mark.parametrize("name", [n for n in DRAWS if n not in NO_KEYED_FORM])
def test_draws_differ_by_step_and_repeat_with_the_seed(name: str) -> None:
    one, same, other = (noisy_step(DRAWS[name], seed=seed, check="off") for seed in (3, 3, 4))
    assert one.rung == "whole step", one.explain()
    first, second = drawn(one, 2)
    torch.manual_seed(99)  # torch's own generator has no say
    again = drawn(same, 2)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, second) and not torch.equal(first, drawn(other)[0])


@pytest.mark.parametrize("name", sorted(NO_KEYED_FORM))
def test_draws_without_a_keyed_form_are_right_or_in_eager(name: str) -> None:
    with pytest.warns(WholestepWarning, match=r"has no keyed form yet \(at test_modes\.py:\d+\)"):
        step = noisy_step(DRAWS[name], guards="off")  # Dynamo refuses it in words of its own
    first, second = drawn(step, 2)
    assert not torch.equal(first, second)


MOMENTS = {
    "rand": (0.5, 12**-0.5), "randn": (0.0, 1.0), "randint": (499.5, 288.7), "bernoulli": (0.3, 0.458),
    "uniform_": (0.5, 3 * 12**-0.5), "normal_": (1.0, 3.0), "exponential_": (0.5, 0.5), "dropout": (1.0, 0.816),
    "normal": (0.0, 1.0), "normal_around": (1.0, 3.0), "multinomial": (2.0, 1.0), "without_replacement": (1.5, 1.25**0.5),
    "cauchy_": (1.0, 4.669), "log_normal_": (1.1331, 0.6039), "geometric_": (4.0, 12**0.5), "gamma": (4.0, 2.0),
    "rrelu": (-0.3, 0.4 * 12**-0.5), "randint_like": (247.0, 145.8),
    "poisson": (9.0, 3.0), "binomial": (4.0, 2**0.5), "dirichlet": (0.5, 12**-0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS)
def test_draws_have_the_right_distribution(name: str) -> None:
    values = torch.cat([d.flatten() for d in drawn(noisy_step(DRAWS[name], seed=0, check="off"), 30)]).float()
    mean, deviation = MOMENTS[name]
    assert float(values.mean()) == pytest.approx(mean, abs=0.06 * deviation)
    assert float(values.std()) == pytest.approx(deviation, rel=0.06)


def test_sites_differ_from_each_other() -> None:
    twice = lambda x: torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5), torch.rand_like(x)])  # noqa: E731
    first, second, third = drawn(noisy_step(twice))[0]
    assert not torch.equal(first, second) and not torch.equal(second, third)


def test_micro_batches_differ_from_each_other() -> None:
    step = noisy_step(DRAWS["dropout"], accumulate=2)
    masks = step([ONES, ONES])[1]["drawn"]
    assert not torch.equal(masks[0], masks[1])


def test_state_dict_restores_the_draws() -> None:
    step = noisy_step(DRAWS["randn"])
    drawn(step, 2)
    state = step.state_dict()
    expected = drawn(step, 2)
    fresh = noisy_step(DRAWS["randn"], seed=12345)
    fresh.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(drawn(fresh, 2), expected, strict=True))


def test_the_seed_is_torchs_unless_given() -> None:
    torch.manual_seed(41)
    one = drawn(noisy_step(DRAWS["rand"]))[0]
    torch.manual_seed(41)
    assert torch.equal(one, drawn(noisy_step(DRAWS["rand"]))[0])


def test_a_step_leaves_torchs_generator_alone() -> None:
    step = noisy_step(DRAWS["dropout"])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    step(ONES)
    assert torch.equal(torch.rand(3), expected)


def test_dropout_is_differentiated_through_its_own_mask() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    x = nn.Parameter(torch.ones(200))
    holder = nn.ParameterDict({"x": x})

    def loss_fn(holder: Any, scale: torch.Tensor) -> Any:
        out = model(holder["x"]) * scale
        return out.sum(), {"out": out}

    step = interpreted(Side(holder, None, loss_fn), torch.tensor(1.0))
    out = step(torch.tensor(1.0))[1]["out"]
    assert torch.equal(x.grad, out), "the gradient is the mask that the forward used"


def test_in_place_dropout_and_probability_edges() -> None:
    assert drawn(noisy_step(lambda x: F.dropout(x * 1, 0.4, inplace=True)))[0].eq(0).any()
    assert torch.equal(drawn(noisy_step(lambda x: F.dropout(x, 0.0)))[0], ONES)
    assert torch.equal(drawn(noisy_step(lambda x: F.dropout(x, 1.0)))[0], ONES * 0)
    assert torch.equal(drawn(noisy_step(lambda x: F.dropout(x, 0.5, training=False)))[0], ONES)


def test_a_generator_of_the_users_is_left_to_eager() -> None:
    source = torch.Generator().manual_seed(0)
    step = noisy_step(lambda x: torch.rand(x.shape, generator=source))
    with pytest.warns(WholestepWarning, match=r"the step runs in eager PyTorch.*\(at test_modes\.py:\d+\)"):
        first, second = drawn(step, 2)
    same = torch.Generator().manual_seed(0)
    assert torch.equal(first, torch.rand(ONES.shape, generator=same)), "tracing drew nothing from it"
    assert torch.equal(second, torch.rand(ONES.shape, generator=same)) and step.rung == "eager"


# ---- Python's and numpy's generators ----


def seed_all(seed: int) -> None:
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)


def follows_eager(make: Callable[[], Side], **options: Any) -> Step:
    """Train both from the same state of every generator: the losses, and where the generators are afterwards."""
    seed_all(0)
    ours = make()
    seed_all(0)
    theirs = make()
    step = interpreted(ours, BATCHES[0], **options)
    seed_all(1)
    losses = [float(step(b)) for b in BATCHES]
    after = random.random(), np.random.rand()
    seed_all(1)
    assert losses == pytest.approx([float(eager_update(theirs, b)[0]) for b in BATCHES], rel=1e-6)
    assert after == (random.random(), np.random.rand())
    return step


def stochastic_depth(draw: Callable[[], float]) -> Callable[[], Side]:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if draw() < 0.5:
                return self.first(x)
            return self.first(x) + self.second(x)

    def make() -> Side:
        model = Skips()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)

    return make


def scaled_at_random(draw: Callable[[], float]) -> Callable[[], Side]:
    def make() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: classify(m, b) * draw())

    return make


bare_random = random.random  # as `from random import random` gives it


SOURCES: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "random.uniform": lambda: random.uniform(0, 1),
    "random.randint": lambda: random.randint(0, 1),
    "random.gauss": lambda: random.gauss(0.5, 0.1),
    "imported by name": lambda: bare_random(),
    "numpy.random.rand": lambda: float(np.random.rand()),
    "numpy.random.binomial": lambda: float(np.random.binomial(1, 0.5)),
}


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("name", ["random.uniform", "random.randint"])
def test_python_random_numbers_are_drawn_live(name: str, check: str) -> None:
    """The drawn number is an input of the captured step."""
    step = follows_eager(scaled_at_random(SOURCES[name]), check=check)
    assert (step.rung, step.captures) == ("whole step", 1), step.explain()


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
def test_python_random_numbers_follow_eager_however_they_are_used(name: str) -> None:
    follows_eager(scaled_at_random(SOURCES[name]))
    follows_eager(scaled_at_random(lambda: 0.5 + SOURCES[name]()))
    step = follows_eager(stochastic_depth(SOURCES[name]))
    assert step.rung == "eager" and step.falls[0].where.startswith("test_modes.py:"), step.explain()


@pytest.mark.parametrize("check", ["first", "off"])
def test_a_generator_object_of_pythons_is_drawn_from_at_every_step(check: str) -> None:
    def make() -> Side:
        source = random.Random(3)
        side = scaled_at_random(lambda: source.random())()
        side.extra = source
        return side

    twins = Twins(make, BATCHES[0], check=check)
    twins.train(BATCHES, tolerance=1e-6)
    assert twins.ours.extra.getstate() == twins.theirs.extra.getstate()


def test_capture_leaves_python_generators_as_they_were() -> None:
    random.seed(3), np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3), np.random.seed(3)
    interpreted(stochastic_depth(SOURCES["random.random"])(), BATCHES[0])
    random.seed(3), np.random.seed(3)
    model = small_mlp()
    interpreted(Side(model, torch.optim.SGD(model.parameters()), classify), BATCHES[0])
    assert (random.random(), np.random.rand()) == expected


class LayerDrop(nn.Module):
    """As Hugging Face writes it."""

    def __init__(self, layerdrop: float) -> None:
        super().__init__()
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), layerdrop
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = layer(x).tanh()
        return self.head(x)


def layerdrop_side(p: float) -> Callable[[], Side]:
    def make() -> Side:
        model = LayerDrop(p)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)

    return make


def test_layerdrop_of_zero_is_captured() -> None:
    twins = Twins(layerdrop_side(0.0), BATCHES[0])
    assert twins.step.rung == "whole step"
    twins.train(BATCHES[:3])


def test_layerdrop_falls_back_by_name() -> None:
    with pytest.warns(WholestepWarning, match=r"a layer is skipped at random.*test_modes"):
        step = follows_eager(layerdrop_side(0.5))
    assert step.rung == "eager"


USES: list[Callable[[Any], Any]] = [
    lambda d: d * 2, lambda d: 1.0 - d, lambda d: d.exp() / d, lambda d: torch.where(d > 0.5, d, 0.0), lambda d: d <= 0.5,
    lambda d: torch.add(d, d),
]  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_scalar_draw_used_as_a_number(use: Callable[[Any], Any]) -> None:
    step = noisy_step(lambda x: x * use(torch.rand(())), seed=0, check="off")
    assert step.rung == "whole step", step.explain()
    assert len({float(d[0, 0]) for d in drawn(step, 12)}) > 1


@pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
def test_a_scalar_draw_as_layerdrop_writes_it_may_run_in_eager() -> None:
    """`torch.rand([])` is taken for the draw of a layerdrop; in arithmetic it is right all the same."""
    step = noisy_step(lambda x: x * torch.rand([]) * 2, seed=0, check="off")
    assert len({float(d[0, 0]) for d in drawn(step, 12)}) > 1


class Devices(TorchDispatchMode):
    """In the place of CTC: where its arguments are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_ctc_loss" not in str(func):
            return func(*args, **(kwargs or {}))
        self.seen = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        return args[0].new_empty(2), args[0].new_empty(2)


@pytest.mark.parametrize("named", [False, True])
def test_lengths_of_ctc_go_where_the_rest_is(named: bool) -> None:
    """Eager takes them from the CPU; under a mode torch does not, and the check of the first step has one in force."""
    lengths = {"input_lengths": torch.full((2,), 4), "target_lengths": torch.tensor([2, 3])}
    inputs = torch.empty(4, 2, 5, device="meta"), torch.ones(2, 3, dtype=torch.int64)
    with Devices() as devices, FunctionLevel(Sites([])):
        F.ctc_loss(*inputs, **lengths) if named else F.ctc_loss(*inputs, *lengths.values())
    assert devices.seen == {"meta"}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(50, 50), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


@pytest.mark.parametrize("by", ["module", "rand_like", "attention"])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_rows_of_vmap_draw_as_they_are_told(by: str, randomness: str) -> None:
    """Operators of ours would be called row by row, all with one key."""
    model = Dropping()

    def row(x: torch.Tensor) -> torch.Tensor:
        if by == "attention":
            x = model.linear(x).reshape(1, 5, 10)
            return F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5)
        return model(x) if by == "module" else torch.rand_like(x) * model.linear(x).sum().square().clamp(1, 1)

    def loss(_: Any, x: torch.Tensor) -> Any:
        drawn = torch.func.vmap(row, randomness=randomness)(x)
        return drawn.square().mean(), {"drawn": drawn.detach()}

    step = interpreted(Side(model, torch.optim.SGD(model.parameters(), lr=0.0), loss), ONES, check="off")
    rows = drawn(step)[0]
    assert step.rung == "whole step", step.explain()
    alike = (torch.allclose(rows[0], other, atol=1e-6) for other in rows[1:])  # a row of a product rounds by its place
    assert all(alike) == (randomness == "same")
    assert not torch.equal(drawn(step)[0], rows)
