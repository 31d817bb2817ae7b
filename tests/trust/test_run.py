"""The runner of the battery sees what it must see: each kind of fault, made on purpose, gets its verdict."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.trust.case import Case, Made, Net, at, mse, train
from tests.trust.run import Stepper, eager, judge

from wholestep.errors import BadLoss, WholestepWarning


def weighted() -> Made:
    model, calls = Net(), []
    model.weight = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        calls.append(m.weight)
        if len(calls) == 5:
            raise ValueError("the fifth")
        return mse(m, b) * m.weight

    change = at(3, setattr, model, "weight", 0.1)
    return train(loss, change, model=model, state=lambda: calls, raises={4: ValueError})


CASE = Case("weighted", "faults", weighted, slow=False)


class Step:
    """A right step, in plain PyTorch, with the marks of a compiled one."""

    def __init__(self, made: Made) -> None:
        self.made, self.call, self.falls, self.rung = made, eager(made), (), "whole step"

    def __call__(self, batch: Any) -> Any:
        return self.call(batch)


class Burned(Step):
    def __call__(self, batch: Any) -> Any:
        self.made.model.weight = 1.0
        return self.call(batch)


class CountsTwice(Step):
    def __call__(self, batch: Any) -> Any:
        result = self.call(batch)
        self.made.loss_fn(self.made.model, batch)
        return result


class Swallows(Step):
    def __call__(self, batch: Any) -> Any:
        try:
            return self.call(batch)
        except ValueError:
            return None


class Mute(Step):
    def __call__(self, batch: Any) -> Any:
        self.rung = "eager"
        return self.call(batch)


class Loud(Mute):
    def __call__(self, batch: Any) -> Any:
        warnings.warn("the step runs in eager PyTorch: a reason", WholestepWarning, stacklevel=2)
        return super().__call__(batch)


class Falls(Mute):
    def __call__(self, batch: Any) -> Any:
        self.falls = ("whole step: a reason",)
        return super().__call__(batch)


class Fails(Step):
    def __call__(self, batch: Any) -> Any:
        raise KeyError("nobody knows why")


class LeavesAHook(Step):
    def __init__(self, made: Made) -> None:
        super().__init__(made)
        made.model.a.register_forward_hook(lambda module, args, out: None)


class LeavesAnAttribute(Step):
    def __init__(self, made: Made) -> None:
        super().__init__(made)
        made.model.cache = None


class RunsTheLoss(Step):
    def __init__(self, made: Made) -> None:
        super().__init__(made)
        made.loss_fn(made.model, made.batches[0])


class Draws(Step):
    def __init__(self, made: Made) -> None:
        super().__init__(made)
        random.random()


class TurnsCompilersOff(Step):
    def __call__(self, batch: Any) -> Any:
        torch.compiler.set_stance("force_eager")
        return self.call(batch)


def refuses(made: Made) -> Stepper:
    raise BadLoss("this loss cannot be")


@pytest.mark.parametrize(
    ("maker", "verdict", "words"),
    [
        (Step, "whole", ""),
        (Burned, "WRONG", "step 3: returned[0]"),
        (CountsTwice, "WRONG", "step 0: state: 2 entries against 1"),
        (Swallows, "WRONG", "step 4: eager raised ['ValueError'], ours [None]"),
        (Mute, "WRONG", "left the whole step for 'eager' without a word"),
        (Loud, "loud", "a reason"),
        (Falls, "loud", "a reason"),
        (refuses, "refused", "BadLoss: this loss cannot be"),
        (Fails, "error", "step 0: KeyError: 'nobody knows why'"),
        (LeavesAHook, "WRONG", "compile left something behind: modules[0].a.hooks._forward_hooks"),
        (LeavesAnAttribute, "WRONG", "compile left something behind: modules[0].root.attributes"),
        (RunsTheLoss, "WRONG", "compile left something behind: loss_fn"),
        (TurnsCompilersOff, "WRONG", "the run left something behind: stance of torch.compile"),
        (Draws, "WRONG", "compile left something behind: random"),
    ],
)
def test_verdicts(maker: Callable[[Made], Stepper], verdict: str, words: str) -> None:
    found = judge(CASE, maker)
    assert found.verdict == verdict and words in found.detail, f"{found.verdict}: {found.detail}"


def test_a_case_that_fails_in_eager_is_broken() -> None:
    broken = Case("broken", "faults", lambda: train(lambda m, b: mse(m, b[0])), slow=False)
    assert judge(broken, alone=True).verdict == "broken"
