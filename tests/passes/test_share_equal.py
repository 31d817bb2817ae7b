"""share_equal: equal values are computed once, where that keeps nothing alive for longer."""

from __future__ import annotations

import torch
from tests.passes.small_graphs import in_backward, module, operators, rewritten, traced

from wholestep.passes.share_equal import share_equal

X = torch.randn(20, 30)  # 600 elements: not small


def test_a_value_still_read_is_shared() -> None:
    graph = traced(lambda x: ((x.exp() + x.exp()).sum(),), X)
    assert operators(rewritten(share_equal, graph, X)) == ["exp", "add", "sum"]


def test_a_value_that_has_died_is_computed_again() -> None:
    """exp, used up; a long stretch; exp again: sharing would keep it all that time."""
    graph = traced(lambda x: (x.exp().sum() + x.sin().cos().sum() + x.exp().mean(),), X)
    before = operators(graph)
    assert operators(rewritten(share_equal, graph, X)) == before


def test_a_value_kept_alive_through_a_view_is_shared() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        kept = x.exp().view(600)
        return (x.exp().t() @ x).sum() + kept.mean()

    assert operators(rewritten(share_equal, traced(step, X), X)).count("exp") == 1


def test_views_and_small_values_are_shared_always() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        first = x.t().sum(1).exp().sum()
        return first + x.sin().sum() + x.t().sum(1).exp().prod()

    left = operators(rewritten(share_equal, traced(step, X), X))
    assert left.count("t") == 1 and left.count("exp") == 1


def test_phases_are_kept_apart() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = (x.t().exp() * 2).sum()
        with in_backward():
            return loss, x.t().exp() * 3

    assert operators(rewritten(share_equal, traced(step, X), X)).count("exp") == 2


def test_layers_stay_equal() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with module("h.0"):
            a = (x.t() + x.t()).sum()
        with module("h.1"):
            return a + (x.t() + x.t()).sum()

    assert operators(rewritten(share_equal, traced(step, X), X)).count("t") == 2


def test_what_stands_before_the_layers_is_shared_by_them() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        with module("model"):
            a = x.t().sum()
        with module("h.0"):
            a = a + x.t().mean()
        with module("h.1"):
            return a + x.t().prod()

    assert operators(rewritten(share_equal, traced(step, X), X)).count("t") == 1


def test_random_values_and_numbers_of_other_types_are_not_equal() -> None:
    graph = traced(lambda x: (x.sum(), torch.rand(3) + torch.rand(3)), X)
    assert operators(share_equal(graph)).count("rand") == 2
    y = torch.arange(6)
    graph = traced(lambda t: (t.sum(), t * 2, t * 2.0, t * True), y)
    assert operators(rewritten(share_equal, graph, y)).count("mul") == 3


def test_gradients_and_boundaries_follow() -> None:
    graph = traced(lambda x: ((x.exp() + x.exp()).sum(),), X)
    graph.gradients, graph.boundaries = {"w": "exp_1"}, {"m": "exp_1"}
    rewritten(share_equal, graph, X)
    assert graph.gradients == {"w": "exp"} and graph.boundaries == {"m": "exp"}
