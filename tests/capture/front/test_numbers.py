"""Python numbers that change from step to step: inputs of one graph, computed with on the host, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp
from torch import nn

BATCHES = class_batches(8)
CHECKS = pytest.mark.parametrize("check", ["first", "off"])


def sgd(model: nn.Module, extra: Any = None) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify, extra)


def scheduled(scale: Callable[[dict[str, Any]], Any]) -> Callable[[], Side]:
    """A loss that counts its calls and is scaled by what `scale` makes of the count."""

    def make() -> Side:
        side = sgd(small_mlp(), {"step": 0, "told": []})

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            side.extra["step"] += 1
            return classify(model, batch) * scale(side.extra)

        side.loss_fn = loss_fn
        return side

    return make


@CHECKS
def test_a_counter_is_returned_as_an_int(check: str) -> None:
    twins = Twins(scheduled(lambda state: 1.0), BATCHES[0], check=check)
    twins.train(BATCHES)
    assert twins.ours.extra["step"] == len(BATCHES) and type(twins.ours.extra["step"]) is int
    assert twins.step.rung == "whole step" and twins.step.captures <= 2


@pytest.mark.parametrize(
    "scale",
    [
        lambda state: max(0.1, 1.0 - 0.1 * state["step"]),
        lambda state: 0.9 ** state["step"],
        lambda state: 1.0 + (state["step"] // 3),
        lambda state: 1.0 + (state["step"] % 3) / 3,
        lambda state: state["step"] / 8,
        lambda state: 1 / state["step"],
        lambda state: 0.5 * (1 + math.cos(math.pi * state["step"] / 8)),
        lambda state: min(state["step"], 4),
        lambda state: float(state["step"]) ** 0.5,
        lambda state: 1.0 + 0.1 * (-1) ** state["step"],  # the base has a sign
    ],
)  # fmt: skip
def test_schedules_of_a_count_follow(scale: Callable[[dict[str, Any]], Any]) -> None:
    twins = Twins(scheduled(scale), BATCHES[0])
    twins.train(BATCHES, tolerance=1e-6)
    assert twins.ours.extra["step"] == len(BATCHES)
    assert twins.step.rung == "whole step" and twins.step.captures <= 4, twins.step.explain()


def test_an_annealed_float_costs_two_captures() -> None:
    def make() -> Side:
        side = sgd(small_mlp(), {"temperature": 2.0})
        side.loss_fn = lambda m, b: torch.nn.functional.cross_entropy(m(b[0]) / side.extra["temperature"], b[1])
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(
        BATCHES, after=lambda side: side.extra.update(temperature=side.extra["temperature"] * 0.8), tolerance=1e-6
    )
    assert (twins.step.rung, twins.step.captures) == ("whole step", 2)


def test_a_number_that_the_loss_changes_itself_is_exact() -> None:
    """Kept in double precision, on the host: after many steps not a bit off."""

    def make() -> Side:
        side = sgd(small_mlp(), {"beta": 1.0, "big": 2**40})

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            side.extra["beta"] *= 0.999
            side.extra["big"] += 3
            return classify(model, batch) * side.extra["beta"]

        side.loss_fn = loss_fn
        return side

    twins = Twins(make, BATCHES[0], check="off")
    twins.train([*BATCHES, *BATCHES], tolerance=1e-6)
    assert twins.ours.extra == twins.theirs.extra
    assert [type(value) for value in twins.ours.extra.values()] == [float, int]


def test_an_operator_that_takes_plain_numbers_only_has_a_graph_for_each() -> None:
    def make() -> Side:
        side = sgd(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), {"smoothing": 0.0})
        side.loss_fn = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], label_smoothing=side.extra["smoothing"])
        return side

    twins = Twins(make, BATCHES[0])

    def alternate(side: Side) -> None:
        side.extra["smoothing"] = 0.1 if side.extra["smoothing"] == 0.0 else 0.0

    twins.train(BATCHES, after=alternate, tolerance=1e-6)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_numbers_are_not_read_off_a_device() -> None:
    """A counter and its schedule are numbers on the host; the graph gets one of them, and reads no tensor."""
    twins = Twins(scheduled(lambda state: 1.0 / (1 + state["step"])), BATCHES[0], check="off")
    twins.train(BATCHES[:4], tolerance=1e-6)
    graph = twins.step.front.entries[0].graph
    assert any(returned.kind == "number" for returned in graph.returned) and len(graph.host.integer) == 1
    assert [entry.name for entry in twins.step.graph.inputs if entry.name.startswith("number")] == ["number0"]
    assert not any("_local_scalar_dense" in str(node.target) for node in twins.step.graph.operations())
    args = [5 if argument.kind == "number" else None for argument in graph.arguments]
    numbers, results = graph.host(args)
    assert numbers == [1.0 / (1 + 6)] and list(results.values()) == [6], "no tensor is needed"


def test_what_a_number_switches_on_stays_in_the_graph() -> None:
    """`vmap` in chunks of a size that varies enters a level for every chunk."""

    def make() -> Side:
        side = sgd(small_mlp(), {"step": 0})

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            side.extra["step"] += 1
            chunks = 2 + side.extra["step"] % 2
            return torch.vmap(lambda x: model(x).square().sum(), chunk_size=chunks)(batch[0]).mean()

        side.loss_fn = loss_fn
        return side

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:4])
    assert twins.step.rung == "whole step"
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
