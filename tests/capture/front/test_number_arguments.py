"""Numbers that vary, given to functions of torch's that take Python numbers only: one graph serves them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins
from torch import nn

import wholestep

SOURCE = torch.Generator().manual_seed(0)
X, T = torch.randn(5, 4, generator=SOURCE), torch.randn(5, 4, generator=SOURCE)
CLASSES = torch.tensor([0, 3, -100, 1, 2])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1])

Loss = Callable[[torch.Tensor, float], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "huber": lambda h, v: F.huber_loss(h, T, delta=v),
    "smooth l1, summed": lambda h, v: F.smooth_l1_loss(h, T, reduction="sum", beta=v - 0.3),
    "label smoothing": lambda h, v: F.cross_entropy(h, CLASSES, label_smoothing=v),
    "label smoothing, weights": lambda h, v: F.cross_entropy(h, CLASSES, WEIGHT, label_smoothing=v),
    "label smoothing, summed": lambda h, v: F.cross_entropy(h, CLASSES, reduction="sum", label_smoothing=v),
    "label smoothing, of each place": lambda h, v: F.cross_entropy(
        h.t()[None], CLASSES[None], WEIGHT, reduction="none", label_smoothing=v
    ).sum(),
    "label smoothing, probabilities": lambda h, v: F.cross_entropy(h, T.softmax(1), WEIGHT, label_smoothing=v),
    "layer norm": lambda h, v: F.layer_norm(h, (4,), WEIGHT, WEIGHT, eps=v).sin().mean(),
    "attention": lambda h, v: F.scaled_dot_product_attention(h[None], h[None], h[None], scale=v).square().mean(),
    "margin ranking": lambda h, v: F.margin_ranking_loss(h[:, 0], h[:, 1], SIGNS, margin=v),
    "triplet": lambda h, v: F.triplet_margin_loss(h, T, T.flip(0), margin=v, swap=True),
    "hinge": lambda h, v: nn.HingeEmbeddingLoss(margin=v)(h, T.sign()),
    "cosine embedding": lambda h, v: F.cosine_embedding_loss(h, T, torch.tensor([1, -1, 0, -1, 1]), margin=v - 0.5),
    "tensor": lambda h, v: (h * torch.as_tensor(v)).square().mean(),
    "softshrink": lambda h, v: F.softshrink(h, v).square().mean(),
    "hardtanh": lambda h, v: F.hardtanh(h, -v, v).square().mean(),
    "deviation": lambda h, v: torch.std(h, 0, correction=2 * v).mean() + torch.var(h, correction=v),
}


@pytest.mark.parametrize("name", LOSSES)
def test_one_graph_for_all_numbers(name: str) -> None:
    def side() -> Side:
        model = nn.Linear(4, 4)
        loss = LOSSES[name]
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: loss(m(b[0]), b[1]))

    numbers = [0.3 + 0.07 * i for i in range(7)]
    twins = Twins(side, (X, numbers[0]))
    twins.train([(X, number) for number in numbers], tolerance=1e-5)
    assert twins.step.rung == "whole step" and twins.step.captures <= 3, twins.step.explain()


def test_a_threshold_below_zero_raises_as_in_eager() -> None:
    def side() -> Side:
        model = nn.Linear(4, 4)
        return Side(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: F.softshrink(m(b[0]), b[1]).square().mean()
        )

    twins = Twins(side, (X, 0.3), check="off")
    twins.train([(X, number) for number in (0.3, 0.2, 0.1, 0.0)], tolerance=1e-5)
    with pytest.raises(RuntimeError, match="lambda must be"):
        twins.step((X, -0.1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_momentum_that_is_annealed(precision: str) -> None:
    """As point clouds are trained; between two steps the layer is in eval mode for one."""

    def side() -> Side:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return Side(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: (m(b) - T).square().mean(), model[1]
        )

    tolerance = 1e-5 if precision == "fp32" else 0.1  # the other side has no autocast
    twins = Twins(side, X, precision=precision)
    for number in range(8):
        for one in (twins.ours, twins.theirs):
            one.extra.momentum = 0.5 * 0.7**number
            one.extra.train(number != 5)
        twins.train([X + number], tolerance=tolerance)
    assert torch.allclose(twins.ours.extra.running_var, twins.theirs.extra.running_var, rtol=tolerance)
    assert twins.step.rung == "whole step" and twins.step.captures <= 4, twins.step.explain()


def test_what_is_not_known_is_captured_anew() -> None:
    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.smooth_l1_loss(m(b[0]), T, reduce=False, beta=b[1]).sum()

    def side() -> Side:
        model = nn.Linear(4, 4)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.01), loss)

    twins = Twins(side, (X, 0.5))
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        twins.train([(X, number) for number in (0.5, 0.6, 0.7)], tolerance=1e-6)


def test_a_method_that_takes_numbers_only_is_captured_anew_without_a_word_of_torchs(caplog: Any) -> None:
    def side() -> Side:
        model = nn.Linear(4, 4)
        return Side(
            model, torch.optim.SGD(model.parameters(), lr=0.01), lambda m, b: m(b[0]).std(0, correction=b[1]).sum()
        )

    twins = Twins(side, (X, 0))
    twins.train([(X, number) for number in (0, 1, 2)], tolerance=1e-6)
    assert twins.step.rung == "whole step" and not caplog.records


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda out: F.smooth_l1_loss(out, out.detach() + 1, beta=-0.3), "negative values for beta"),
        (lambda out: nn.HuberLoss(delta=0.0)(out, out.detach() + 1), "non-positive values for delta"),
        (lambda out: F.softshrink(out, -0.1).sum(), "lambda must be"),
        (lambda out: F.cross_entropy(out, out.argmax(1), label_smoothing=1.5), "label_smoothing must be between"),
    ],
)
def test_numbers_that_eager_refuses_train_nothing_compiled(loss: Any, told: str) -> None:
    """Compiled code is made of decompositions, which compute with them."""
    model, batch = nn.Linear(3, 2), torch.randn(4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, lambda m, b: loss(m(b)), optimizer, batch, verbose=False, check="off", cache=False)
    with pytest.raises(RuntimeError, match=told):
        step(batch)
    assert all(map(torch.equal, before, model.parameters()))
