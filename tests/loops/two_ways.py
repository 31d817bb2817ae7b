"""How a loop of this folder is run twice: it asks a `MakeStep` for its training step and never learns which one it got.

In: a loop `train(make_step) -> Run`. Out: the run in eager PyTorch and the run with Wholestep, compared: every parameter,
every buffer, the optimizers' states, and all that the loop logged. Afterwards no fake tensor may be left in the loop's
own variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from tests.runtime.twins import assert_same_tree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import wholestep

LossFn = Callable[[Any, Any], Any]
MakeStep = Callable[..., Callable[[Any], Any]]
"""(model, loss_fn, optimizer, example_batch, clip_norm=None, accumulate=1) -> step(batch) -> loss or (loss, aux)."""
ROUNDING = 1e-6
"""Sums may be taken in another order; over a few steps of a tiny net that is all the difference there may be."""


@dataclasses.dataclass(slots=True)
class Run:
    """What is left of a loop when it ends."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    log: list[dict[str, Any]]
    """A line per step or evaluation: numbers by name."""
    kept: Any = None
    """What the loop carried from step to step in variables of its own."""


class EagerStep:
    """The body of a loop in plain PyTorch."""

    def __init__(
        self, model: Any, loss_fn: LossFn, optimizer: torch.optim.Optimizer, example_batch: Any, *,
        clip_norm: float | None = None, accumulate: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.clip_norm, self.accumulate = clip_norm, accumulate

    def __call__(self, batch: Any) -> Any:
        self.optimizer.zero_grad(set_to_none=True)
        losses, aux = [], None
        for micro in batch if self.accumulate > 1 else [batch]:
            result = self.loss_fn(self.model, micro)
            loss, aux = result if isinstance(result, tuple) else (result, None)
            (loss / self.accumulate).backward()
            losses.append(loss.detach())
        if self.clip_norm is not None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean()
        return loss if aux is None else (loss, {name: value.detach() for name, value in aux.items()})


class WholeSteps:
    """Makes compiled steps, and keeps them to be asked about afterwards."""

    def __init__(self, backend: str = "interpret") -> None:
        self.backend = backend
        self.made: list[wholestep.Step] = []

    def __call__(self, model: Any, loss_fn: LossFn, optimizer: Any, example_batch: Any, **options: Any) -> Any:
        step = wholestep.compile(
            model, loss_fn, optimizer, example_batch, backend=self.backend, check="first", cache=False, **options
        )
        self.made.append(step)
        return step


def both_ways(train: Callable[[MakeStep], Run], tolerance: float = ROUNDING) -> tuple[Run, WholeSteps]:
    """Run the loop in eager PyTorch and with Wholestep, from the same seed; they must agree in everything."""
    torch.manual_seed(0)
    theirs = train(EagerStep)
    torch.manual_seed(0)
    makes = WholeSteps()
    ours = train(makes)
    assert len(theirs.log) >= 6
    assert_same_log(ours.log, theirs.log, tolerance)
    for name, model in theirs.models.items():
        assert_same_tree(ours.models[name].state_dict(), model.state_dict(), tolerance)
    for name, optimizer in theirs.optimizers.items():
        assert_same_tree(ours.optimizers[name].state_dict(), optimizer.state_dict(), tolerance)
    assert not fake_tensors_in(ours.kept), "the capture left fake tensors in the loop's variables"
    return ours, makes


def assert_same_log(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    assert [list(line) for line in ours] == [list(line) for line in theirs], "the loops logged other things"
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        for name, value in its.items():
            assert isinstance(mine[name], type(value)), f"line {number}: {name} is {mine[name]!r}, in eager {value!r}"
            same = abs(mine[name] - value) <= tolerance * max(1.0, abs(value))
            assert same, f"line {number}: {name} is {mine[name]!r}, in eager {value!r}"


def assert_whole(makes: WholeSteps) -> None:
    """Every step the loop asked for was captured whole."""
    assert makes.made
    for step in makes.made:
        assert step.rung == "whole step", step.explain()


def fake_tensors_in(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(fake_tensors_in, value.values()))
    if isinstance(value, list | tuple):
        return any(map(fake_tensors_in, value))
    return isinstance(value, FakeTensor)
