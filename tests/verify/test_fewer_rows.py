"""The check on a few rows: right steps pass untouched, wrong compiled code is named, and what says nothing is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.verify.small_models import Mlp, Normed, batches, everything, loss_fn
from tests.verify.test_first_step import OPTIMIZERS, wrong_runner
from torch import nn

import wholestep
from wholestep.errors import CaptureRefused, FirstStepDiffers
from wholestep.lower.runner import Runner
from wholestep.verify.fewer_rows import NotComparable, check_on_rows
from wholestep.verify.first_step import Lean


def compiled(model: nn.Module, optimizer: Any, rows: int, loss: Any = loss_fn, **options: Any) -> Any:
    """A step whose check is that on `rows` of six rows."""
    step = wholestep.compile(model, loss, optimizer, batches(1)[0], backend="interpret", cache=False, seed=5, **options)

    def check(run: Any, variant: Any, *rest: Any) -> None:
        check_on_rows(run, variant, *rest, rows=rows, lean=Lean(0, False))

    step.check = check
    return step


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rows", [2, 3])
def test_a_right_step_passes_and_nothing_is_left_behind(kind: str, rows: int) -> None:
    ours, unchecked = Normed(), Normed()
    unchecked.load_state_dict(ours.state_dict())
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in (ours, unchecked)]
    steps = [
        compiled(ours, optimizers[0], rows),
        wholestep.compile(
            unchecked, loss_fn, optimizers[1], batches(1)[0], backend="interpret", cache=False, seed=5, check="off"
        ),
    ]
    for batch in batches(3):
        assert torch.equal(*(step(batch)[0] for step in steps))
    kept = [everything(m, o) for m, o in zip((ours, unchecked), optimizers)]
    assert all(torch.equal(v, kept[1][n]) for n, v in kept[0].items() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_planted_miscompile_is_found(kind: str) -> None:
    model = Normed()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = compiled(model, optimizer, rows=3)
    wrong_runner(step, "body.weight")
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(FirstStepDiffers, match=r"the compiled step: the gradient of body.weight .*\(at body\)"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items()) and step.count == 0


def test_so_is_code_that_is_wrong_on_rows_that_eager_has_not_seen() -> None:
    """The rows over and over fill the whole batch: a kernel that forgets its last row is seen."""
    model = Normed()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), rows=3)
    variant = step._latest
    right, at = variant.runner, next(i for i, e in enumerate(variant.capture.graph.inputs) if "x" in e.name)

    def forgets(inputs: list[Any]) -> tuple[Any, ...]:
        inputs = [*inputs]
        inputs[at] = inputs[at].clone()
        inputs[at][-1] = 0
        return tuple(right(inputs))

    variant.runner = Runner(forgets, right.num_inputs, right.describe())
    with pytest.raises(FirstStepDiffers, match="the compiled step"):
        step(batches(1)[0])


def contrastive(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every row against all others."""
    logits = model(batch["x"])
    return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


def test_a_loss_that_counts_rows_says_nothing() -> None:
    model = Normed()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), rows=3, loss=contrastive)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(NotComparable, match="another one when rows are repeated"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("build", "rows", "options", "message"),
    [
        (Mlp, 3, {}, "draws random numbers"),
        (Normed, 3, {"accumulate": 2}, "gradients add up"),
        (Normed, 1, {}, "eager fails on so few: ValueError: Expected more than 1 value per channel"),
    ],
)
def test_what_cannot_be_compared_is_told(build: Any, rows: int, options: dict[str, Any], message: str) -> None:
    model = build()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), rows, **options)
    with pytest.raises(NotComparable, match=message):
        step(batches(1)[0])


def test_tensors_that_share_no_rows_cannot_be_cut() -> None:
    def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=batch["weight"])

    batch = {**batches(1)[0], "weight": torch.ones(4)}
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, weighted, optimizer, batch, backend="interpret", cache=False)
    step.check = lambda *given: check_on_rows(*given, rows=3, lean=Lean(0, False))
    with pytest.raises(NotComparable, match="do not share a first dimension"):
        step(batch)


def chosen(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the rows that a mask names."""
    return F.cross_entropy(model(batch["x"])[batch["y"] > 0], batch["y"][batch["y"] > 0])


def test_sizes_that_a_mask_decides_are_no_obstacle() -> None:
    model = Normed()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), rows=3, loss=chosen)
    wrong = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), rows=3, loss=chosen)
    assert float(step(batches(1)[0])) > 0
    wrong_runner(wrong, "body.weight")
    with pytest.raises(FirstStepDiffers):
        wrong(batches(1)[0])


def test_rows_without_a_loss_prove_nothing() -> None:
    model = Normed()
    step = compiled(model, None, rows=3, loss=chosen)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(NotComparable, match="the loss of so few is not finite"):
        step({"x": batches(1)[0]["x"], "y": torch.tensor([0, 0, 0, 1, 2, 3])})
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())


def test_what_is_taken_for_granted_of_the_batch_may_not_hold_for_few_rows() -> None:
    model = Normed()
    step = compiled(model, None, rows=3)

    def refuses(*args: Any) -> Any:
        raise CaptureRefused("a condition on data, which is taken for granted, does not hold")

    step._latest.micro = refuses
    with pytest.raises(NotComparable, match="taken for granted"):
        step(batches(1)[0])
