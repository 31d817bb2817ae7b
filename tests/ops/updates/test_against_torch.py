"""Captured updates are the optimizer's own, bit for bit on the CPU: losses, parameters, state, over a moving learning rate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.ops.updates.settings import PLAIN, SETTINGS, mean_square, odd_batches, odd_side
from tests.runtime.twins import Twins, assert_same_tree, classify, eager_update, small_mlp
from torch import nn

import wholestep
from wholestep.capture import optimizers
from wholestep.ops.updates import UPDATES, update_of
from wholestep.optim import Lion

BATCHES = odd_batches(5)


def scheduled(side: Any) -> None:
    side.extra.step()


def assert_captured(step: Any, optimizer: torch.optim.Optimizer) -> None:
    update = update_of(optimizer)
    assert update is not None and step.rung == "whole step" and step.captures == 1
    assert all(note.startswith("pass ") for note in step.notes), step.notes
    assert any(node.target is update.operator for node in step.graph.operations())


@pytest.mark.parametrize("name", SETTINGS)
def test_five_steps_are_bitwise_torchs(name: str) -> None:
    twins = Twins(odd_side(name), BATCHES[0])
    twins.train(BATCHES, after=scheduled)
    assert_captured(twins.step, twins.ours.optimizer)


@pytest.mark.parametrize(
    "name", [*PLAIN, "adagrad, foreach", "rmsprop, foreach", "nadam, foreach", "adafactor, foreach"]
)
def test_so_they_are_in_bf16(name: str) -> None:
    batches = odd_batches(4, torch.bfloat16)
    twins = Twins(odd_side(name, torch.bfloat16), batches[0])
    twins.train(batches, after=scheduled)
    assert_captured(twins.step, twins.ours.optimizer)


@pytest.mark.parametrize("name", PLAIN)
def test_clipped_and_accumulated(name: str) -> None:
    twins = Twins(odd_side(name), BATCHES[0], clip_norm=0.05)
    twins.train(BATCHES[:3], after=scheduled, tolerance=2e-6)
    ours, theirs = odd_side(name)(), odd_side(name)()
    theirs.model.load_state_dict(ours.model.state_dict())
    step = wholestep.compile(
        ours.model, mean_square, ours.optimizer, BATCHES[:2], accumulate=2, backend="interpret", cache=False
    )
    for _ in range(2):
        step(BATCHES[:2])
        for batch in BATCHES[:2]:
            (mean_square(theirs.model, batch) / 2).backward()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
    assert_same_tree(ours.model.state_dict(), theirs.model.state_dict(), 1e-6)


@pytest.mark.parametrize("name", [*PLAIN, "rmsprop, momentum", "adagrad, all"])
def test_state_goes_from_torch_to_us_and_back(name: str) -> None:
    """Two steps in torch, loaded into a new optimizer; two here; saved, loaded by torch again, two more: the same as six."""
    twins = Twins(odd_side(name), BATCHES[0])
    other, straight = twins.ours, twins.theirs
    for batch in BATCHES[:2]:
        eager_update(straight, batch)
    other.model.load_state_dict(straight.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(straight.optimizer.state_dict()))
    for batch in BATCHES[2:4]:
        twins.step(batch)
        eager_update(straight, batch)
    twins.assert_same_state()
    torch_again = odd_side(name)()
    torch_again.model.load_state_dict(other.model.state_dict())
    torch_again.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
    for batch in BATCHES[:2]:
        eager_update(torch_again, batch)
        eager_update(straight, batch)
    assert_same_tree(torch_again.model.state_dict(), straight.model.state_dict())


@pytest.mark.parametrize("name", ["adagrad, all", "nadam, decay", "adafactor", "lion"])
def test_an_update_left_out_changes_nothing(name: str) -> None:
    side = odd_side(name)()
    step = wholestep.compile(
        side.model, mean_square, side.optimizer, BATCHES[0], nonfinite="skip", backend="interpret", cache=False
    )
    step(BATCHES[0])
    state = side.optimizer.state_dict()["state"]
    kept = copy.deepcopy(
        [side.model.state_dict(), {i: {k: v for k, v in s.items() if k != "step"} for i, s in state.items()}]
    )
    step(BATCHES[1] * float("nan"))
    now = [side.model.state_dict(), {i: {k: v for k, v in s.items() if k != "step"} for i, s in state.items()}]
    assert_same_tree(now, kept)
    assert step(BATCHES[1]).isfinite()


@pytest.mark.parametrize("name", ["adagrad", "nadam", "adafactor"])
def test_a_step_that_overflows_is_not_counted_in_fp16(name: str) -> None:
    """The first steps overflow at the scale of 2^16 that begins; then it is as if they had not been."""
    torch.manual_seed(0)
    model = small_mlp()
    twin = copy.deepcopy(model)
    ours, theirs = (SETTINGS[name](list(m.parameters())) for m in (model, twin))
    batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
    options: dict[str, Any] = dict(backend="interpret", cache=False, precision="fp16", check="off")
    step = wholestep.compile(model, classify, ours, batch, **options)
    step((batch[0] * 1e6, batch[1]))  # inf in fp16
    assert step.state_dict()["loss_scale"]["skipped"] == 1
    again = wholestep.compile(twin, classify, theirs, batch, **options)
    for _ in range(2):
        step(batch)
        again(batch)
    assert_same_tree(model.state_dict(), twin.state_dict(), 1e-6)


@pytest.mark.parametrize("name", PLAIN)
def test_compiled_code_within_rounding(name: str) -> None:
    """One small model for all, so that its regions are compiled once."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 4, bias=not name.startswith("muon"))
        return model, SETTINGS[name](list(model.parameters()))

    (ours, optimizer), (theirs, reference) = built(), built()
    step = wholestep.compile(ours, mean_square, optimizer, BATCHES[0])
    for batch in BATCHES[:3]:
        step(batch)
        mean_square(theirs, batch).backward()
        reference.step()
        reference.zero_grad()
    assert step.options.backend == "inductor" and step.rung == "whole step"
    assert_same_tree(ours.state_dict(), theirs.state_dict(), 1e-5)


REFUSED: dict[str, tuple[Any, str]] = {
    "differentiable": (lambda p: torch.optim.NAdam(p, differentiable=True), "differentiable"),
    "capturable": (lambda p: torch.optim.RMSprop(p, capturable=True), "capturable=True with parameters on the CPU"),
    "dtypes": (lambda p: torch.optim.Adafactor([*p, nn.Parameter(torch.ones(2).double())]), "several dtypes"),
    "bf16 muon": (lambda p: torch.optim.Muon([q.data.bfloat16() for q in p], nesterov=False), "bfloat16"),
    "subclass": (lambda p: type("Mine", (Lion,), {})(p), "Mine is not one of SGD, Adam, AdamW"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_named(name: str) -> None:
    make, reason = REFUSED[name]
    assert reason in (optimizers.supported(make([nn.Parameter(torch.ones(2, 2))])) or "")


def test_a_step_replaced_by_another_is_noticed() -> None:
    optimizer = Lion([nn.Parameter(torch.ones(2))])
    assert optimizers.supported(optimizer) is None
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert "replaced" in (optimizers.supported(optimizer) or "")


def test_the_table_is_consistent() -> None:
    for kind, update in UPDATES.items():
        names = [argument.name for argument in update.operator._schema.arguments]
        assert names[:2] == ["params", "grads"] and names[-1] == "implementation"
        assert names[2 : 2 + len(update.states)] == [f"{key}s" for key in update.states], kind
        assert names[2 + len(update.states) :][:2] == ["hyper", "scale"]
        assert (update.numbers[0] == "step") == update.counts_steps
        assert update.operator is getattr(torch.ops.ws, kind).default
