"""Texts of numbers that vary: written at every step without a capture, and captured by value where the loss looks into them."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp
from torch import nn

import wholestep

BATCHES = class_batches(6)
LINES = {
    "by its format": lambda step, loss: f"{step:03d} {loss.item():.3f}",
    "as it is": lambda step, loss: f"step {step}",
    "as str": lambda step, loss: str(step),
    "by format()": lambda step, loss: format(step, "4d"),
    "as repr": lambda step, loss: f"{step!r}",
}


def counting(act: Callable[[int, torch.Tensor], Any]) -> Callable[[], Side]:
    def make() -> Side:
        model, texts = small_mlp(), []
        model.steps = 0

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            model.steps += 1
            loss = classify(model, batch)
            texts.append(act(model.steps, loss))
            return loss

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, texts)

    return make


@pytest.mark.parametrize("way", LINES)
def test_a_text_of_a_counter_is_made_at_every_step(way: str) -> None:
    twins = Twins(counting(LINES[way]), BATCHES[0], check="off")
    twins.train(BATCHES)
    assert twins.ours.extra == twins.theirs.extra
    assert twins.step.rung == "whole step" and twins.step.captures <= 3, twins.step.explain()


def test_a_line_with_numbers_as_arguments_is_logged(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="tests.texts")
    logger = logging.getLogger("tests.texts")
    twins = Twins(counting(lambda step, loss: logger.info("%d: %.3f", step, loss.item())), BATCHES[0], check="off")
    twins.train(BATCHES)
    ours, theirs = caplog.messages[::2], caplog.messages[1::2]
    assert ours == theirs and len(ours) == len(BATCHES)


READ: list[Callable[[float], float]] = [
    lambda n: float(f"{n:.1f}"),
    lambda n: {"0.5": 1.0}.get(f"{n}", 2.0),
    lambda n: 1.0 if f"{n}" == "0.5" else 2.0,
    lambda n: 1.0 if operator.ne("0.5", repr(n)) else 2.0,
    lambda n: 1.0 if f"share {n:.1f}" in ("share 0.5", "share 0.6") else 2.0,
]


@pytest.mark.parametrize("read", READ)
def test_a_text_that_the_loss_reads_is_captured_by_value(read: Callable[[float], float]) -> None:
    def make() -> Side:
        model = small_mlp()
        model.share = 0.0
        return Side(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: classify(m, b) * read(m.share), model
        )

    twins = Twins(make, BATCHES[0], check="off")
    for batch, share in zip(BATCHES, [0.55, 0.5, 0.5, 1.16, 0.55, 0.5]):
        for side in (twins.ours, twins.theirs):
            side.extra.share = share
        twins.train([batch])
    assert twins.step.rung == "whole step", twins.step.explain()


def test_nothing_is_logged_about_an_operator_that_takes_no_symbol(capfd: Any) -> None:
    """The order of a norm is a plain number: found out by an error of torch's, which it logs in sixty lines."""
    model = small_mlp()
    model.order = 0.5
    step = wholestep.compile(
        model,
        lambda m, b: classify(m, b) + m[0].weight.norm(m.order),
        torch.optim.SGD(model.parameters(), lr=0.1),
        BATCHES[0],
        backend="interpret",
        check="off",
        cache=False,
    )
    for order in (0.5, 1.5, 2.5):
        model.order = order
        step(BATCHES[0])
    assert step.rung == "whole step", step.explain()
    assert capfd.readouterr().err == ""
