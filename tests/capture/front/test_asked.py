"""Whether it is compiled: the code that is trained is answered as eager answers, libraries are told the truth."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.capture.front.asked import QUESTIONS

BATCH = torch.randn(4, 3), torch.randn(4, 2)


def asked_by(package: str) -> Any:
    """Functions as if a package had them: one asks, one is a question."""
    module = types.ModuleType(f"{package}.helpers")
    exec(
        "import torch\ndef is_compiled(): return torch.compiler.is_compiling()\n"
        "def factor(): return 0.5 if torch.compiler.is_compiling() else 1.0\n"
        "def factor_by_question(): return 0.5 if is_compiled() else 1.0\n",
        module.__dict__,
    )
    return module


def losses(factor: Callable[[], float]) -> tuple[float, float]:
    """Captured, and in eager."""
    model = nn.Linear(3, 2)
    loss = lambda m, b: F.mse_loss(m(b[0]), b[1]) * factor()  # noqa: E731
    plain = loss(model, BATCH).item()
    step = wholestep.compile(
        model, loss, torch.optim.SGD(model.parameters(), lr=0.1), BATCH, backend="interpret", cache=False, check="off"
    )
    ours = step(BATCH).item()
    assert step.rung == "whole step"
    return ours, plain


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: f"{question.__module__}.{question.__name__}")
def test_own_code_is_answered_as_in_eager(question: Callable[[], bool]) -> None:
    ours, plain = losses(lambda: 0.5 if question() else 1.0)
    assert ours == pytest.approx(plain)


@pytest.mark.parametrize("name", ["factor", "factor_by_question"])
def test_a_library_is_told_the_truth(name: str) -> None:
    ours, plain = losses(getattr(asked_by("transformers"), name))
    assert ours == pytest.approx(plain / 2)


@pytest.mark.parametrize("name", ["factor", "factor_by_question"])
def test_another_library_is_answered_as_in_eager(name: str) -> None:
    ours, plain = losses(getattr(asked_by("somebody"), name))
    assert ours == pytest.approx(plain)


def test_a_question_of_a_library_asked_by_own_code() -> None:
    question = asked_by("transformers").is_compiled
    ours, plain = losses(lambda: 0.5 if question() else 1.0)
    assert ours == pytest.approx(plain)
