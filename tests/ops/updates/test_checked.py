"""The first-step check sees the gradient in what each optimizer writes; verification and a memory plan know them all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.ops.updates.settings import PLAIN, SETTINGS, matrices
from tests.passes import test_recompute
from tests.runtime.twins import assert_same_tree
from tests.verify.small_models import Normed, batches, everything, loss_fn
from tests.verify.test_first_step import compiled, leanly, wrong_runner

import wholestep
from wholestep.errors import FirstStepDiffers
from wholestep.ops import IN_PLACE
from wholestep.passes.update_early import update_early

SIGNS_UNSEEN = ("adafactor",)
"""It keeps squares only, and the size of its step is a norm: what is negated looks the same there."""
TOLD = (
    "adagrad, all", "adagrad, maximize", "rmsprop", "rmsprop, momentum", "rmsprop, centered", "nadam, decay", "nadam, decoupled",
    "adafactor", "adafactor, foreach", "muon", "lion, all",
)  # fmt: skip


def made(name: str) -> tuple[Normed, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Normed()
    return model, SETTINGS[name](matrices(name, list(model.parameters())))


@pytest.mark.parametrize("factor", [1.1, -1.0])
@pytest.mark.parametrize("name", TOLD)
def test_a_wrong_gradient_is_found_and_the_state_put_back(name: str, factor: float) -> None:
    model, optimizer = made(name)
    step = compiled(model, optimizer)
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    wrong_runner(step, "body.weight", factor)
    if factor < 0 and name.startswith(SIGNS_UNSEEN):
        step(batches(1)[0])
        return
    with pytest.raises(FirstStepDiffers, match=r"compiled step: the gradient of body\.weight"):
        step(batches(1)[0])
    assert_same_tree([model.state_dict(), optimizer.state_dict()], kept)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_a_right_step_passes(name: str, lean: bool) -> None:
    model, optimizer = made(name)
    step = compiled(model, optimizer)
    step = leanly(step, interpret=False) if lean else step
    for batch in batches(2):
        step(batch)
    assert step.rung == "whole step"


def test_bf16_parameters_that_hardly_move_are_judged_by_the_squares() -> None:
    """A step of Adagrad's is then less than the rounding of its parameter."""
    model, optimizer = made("adagrad")
    model.bfloat16()
    batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batches(1)[0].items()}
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-3)
    step = wholestep.compile(model, loss_fn, optimizer, batch, backend="interpret", cache=False)
    wrong_runner(step, "body.weight", 1.5)
    with pytest.raises(FirstStepDiffers, match=r"the gradient of body\.weight"):
        step(batch)


@pytest.mark.parametrize("name", [*PLAIN, "rmsprop, momentum"])
def test_verification(name: str) -> None:
    model, optimizer = made(name)
    kept = everything(model, optimizer)
    report = wholestep.verify(model, loss_fn, optimizer, batches(2), steps=2, clip_norm=0.5, backend="interpret")
    assert report.ok and report.bitwise, str(report)
    assert any(row.kind == "state" for row in report.rows)
    assert_same_tree(everything(model, optimizer), kept)


@pytest.mark.parametrize("name", ["adagrad", "adafactor"])
def test_within_a_memory_plan(name: str) -> None:
    """Early updates and recomputation change no bit of the training."""
    outcomes: list[Any] = []
    for memory in (None, "64MiB"):
        model, optimizer = made(name)
        options = dict(memory=memory, backend="interpret", cache=False)
        step = wholestep.compile(model, loss_fn, optimizer, batches(1)[0], **options)  # type: ignore[arg-type]
        for batch in batches(2):
            step(batch)
        outcomes.append([model.state_dict(), optimizer.state_dict()])
    assert_same_tree(*outcomes)


@pytest.mark.parametrize("name", ["nadam", "adafactor"])
def test_an_update_may_be_cut_into_parts(name: str) -> None:
    """Nodes behind the layer whose gradients they take (update_early), where bits stay the same."""
    outcomes, nodes = [], []
    for passes in ([], [lambda graph: update_early(graph, min_bytes=1)]):
        torch.manual_seed(0)
        model = test_recompute.Small(layers=2, width=8)
        optimizer = SETTINGS[name](matrices(name, list(model.parameters())))
        step = wholestep.compile(
            model, test_recompute.loss_fn, optimizer, test_recompute.batches(1)[0],
            passes=passes, backend="interpret", cache=False, check="off",
        )  # fmt: skip
        step(test_recompute.batches(1)[0])
        outcomes.append([model.state_dict(), optimizer.state_dict()])
        nodes.append(sum(node.target in IN_PLACE for node in step.graph.operations()))
    assert_same_tree(*outcomes)
    assert nodes[1] > nodes[0]
