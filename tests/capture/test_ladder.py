"""The fallback ladder: which rung is taken, and that a fall is told with its reason and the user's source line."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, mlp_side, small_mlp
from torch import nn

from wholestep.errors import WholestepWarning

BATCHES = class_batches()


class Branches(nn.Module):
    """Data-dependent control flow that a graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda t: self.first(t), lambda t: self.second(t), (x,))


def side_of(model: nn.Module, momentum: float = 0.9) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1), classify)


def test_torch_cond_is_captured() -> None:
    def make() -> Side:
        return Side(model := Branches(), torch.optim.SGD(model.parameters(), lr=0.1), classify)

    assert len({bool(x.sum() > 0) for x, _ in BATCHES}) == 2, "both branches must run"
    twins = Twins(make, BATCHES[0])
    assert twins.step.rung == "whole step" and not twins.step.falls, twins.step.explain()
    twins.train(BATCHES, tolerance=1e-6)


def test_a_data_dependent_if_runs_in_eager() -> None:
    class Chooses(Branches):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return self.first(x)
            return self.second(x)

    twins = Twins(lambda: side_of(Chooses()), BATCHES[0])
    assert any(
        re.search(r"not captured yet; one step in eager .*test_ladder\.py:\d+", note) for note in twins.step.notes
    )
    assert twins.step.rung == "not captured yet" and not twins.step.falls
    twins.train(BATCHES[:1])
    with pytest.warns(WholestepWarning, match=r"the step runs in eager PyTorch: whole step: .*test_ladder\.py:\d+"):
        twins.train(BATCHES[1:2])
    assert twins.step.rung == "eager" and twins.step.graph is None
    assert twins.step.falls[0].where is not None and twins.step.falls[0].where.startswith("test_ladder.py:")
    assert "eager" in twins.step.explain() and "test_ladder.py" in twins.step.explain()
    twins.train(BATCHES)


class Prepares(nn.Module):
    """As libraries do it: the first forward reads a file, or installs something; later ones do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            with open(__file__) as file:
                self.scale = 1.0 + len(file.readline()) / 100
        return self.inner(x) * self.scale


def test_what_one_eager_step_cures_is_captured_then() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WholestepWarning)
        twins = Twins(lambda: side_of(Prepares()), BATCHES[0])
        assert twins.ours.model.scale is None, "compile prepares nothing"
        twins.train(BATCHES)
    assert any("one step in eager PyTorch comes first, then it is tried again" in note for note in twins.step.notes)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1) and not twins.step.falls


def test_graphs_that_are_there_are_used_after_a_fall() -> None:
    """Where only some batches cannot be captured, the others still are."""

    def make() -> Side:
        side = side_of(small_mlp())

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            if batch["kind"] == "picky" and bool(batch["x"].sum() > 0):
                return classify(model, (batch["x"], batch["y"])) * 2
            return classify(model, (batch["x"], batch["y"]))

        side.loss_fn = loss_fn
        return side

    plain, picky = ([{"x": x, "y": y, "kind": kind} for x, y in BATCHES] for kind in ("plain", "picky"))
    twins = Twins(make, plain[0])
    twins.train(plain[:2])
    with pytest.warns(WholestepWarning, match="steps that no captured graph holds for run in eager PyTorch"):
        twins.train(picky[:3])
    assert twins.step.rung == "whole step, else eager" and len(twins.step.falls) == 1
    variant = twins.step._latest
    before = variant.uses
    twins.train([*plain[:2], *picky[:2], *plain[:2]])
    assert twins.step._latest is variant and variant.uses == before + 4 and twins.step.captures == 1


def test_state_around_torch_cond_is_carried() -> None:
    class Remembers(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = torch.zeros(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x) + 0.5 * self.last
            self.last = out.detach()
            return out

    twins = Twins(lambda: side_of(Remembers()), BATCHES[0])
    twins.train(BATCHES[:4], tolerance=1e-6)
    assert twins.step.rung == "whole step"
    torch.testing.assert_close(twins.ours.model.last, twins.theirs.model.last, rtol=1e-6, atol=1e-6)


def test_an_error_of_the_users_is_the_users() -> None:
    """A model that fails in eager fails at the first call with its own error, and says so at compile."""
    side = mlp_side()
    step = interpreted(side, (torch.randn(5, 9), BATCHES[0][1]))
    assert any(re.search(r"not captured yet.*linear.*\(at twins\.py:\d+\)", note) for note in step.notes)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            step((torch.randn(5, 9), BATCHES[0][1]))
    assert step.count == 0


def test_item_in_the_loss_is_captured() -> None:
    """A number read off a tensor and computed with is a value of the graph."""

    def make() -> Side:
        side = side_of(small_mlp())
        side.loss_fn = lambda m, b: classify(m, b) * (1.0 + float(b[0].sum().item() > 0)) * b[1].sum().item()
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 1)


def test_sparse_gradients_run_in_eager() -> None:
    def make() -> Side:
        model = nn.Embedding(9, 3, sparse=True)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().sum())

    ids = torch.tensor([1, 2, 2])
    with pytest.warns(WholestepWarning, match="sparse"):
        twins = Twins(make, ids)
    twins.train([ids, ids])


@pytest.mark.parametrize("options", [{"clip_norm": 0.2}, {"accumulate": 3}])
def test_the_eager_rung_clips_and_accumulates(options: dict[str, Any]) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > -1e9 else x

    torch.manual_seed(0)
    ours = side_of(Chooses())
    torch.manual_seed(0)
    plain = side_of(nn.Linear(4, 3))
    step = interpreted(ours, tuple(t[:3] for t in BATCHES[0]), **options)
    captured = interpreted(plain, tuple(t[:3] for t in BATCHES[0]), **options)
    for batch in BATCHES[:3]:
        part = tuple(t[:3] for t in batch)
        assert float(step(part)) == pytest.approx(float(captured(part)), rel=1e-6)
        if "clip_norm" in options:
            assert float(step.grad_norm) == pytest.approx(float(captured.grad_norm), rel=1e-6)
    torch.testing.assert_close(ours.model.inner.weight, plain.model.weight, rtol=1e-6, atol=1e-7)
    assert step.rung == "eager" and captured.rung == "whole step"
