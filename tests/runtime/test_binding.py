"""Storage that moves between steps: checkpoints loaded, `.data` replaced, buffers re-assigned, dtypes changed."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, assert_same_tree, class_batches, classify, eager_update, interpreted
from torch import nn

import wholestep
from wholestep.errors import WholestepWarning
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role
from wholestep.runtime.binding import Binding

BATCHES = class_batches(8)


def make(kind: str = "adamw") -> Side:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=0.01)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), 0.1, 0.9)
    )
    return Side(model, optimizer, classify)


def load_model(side: Side) -> None:
    state = {k: v.clone() + 0.25 if v.is_floating_point() else v.clone() for k, v in side.model.state_dict().items()}
    side.model.load_state_dict(state)


def assign_buffers(side: Side) -> None:
    """Other tensors in the place of all buffers."""
    state = {k: v.clone() + 0.25 if v.is_floating_point() else v.clone() for k, v in side.model.state_dict().items()}
    for name in dict(side.model.named_buffers()):
        owner, _, key = name.rpartition(".")
        setattr(side.model.get_submodule(owner), key, state[name])


def load_optimizer(side: Side) -> None:
    state = copy.deepcopy(side.optimizer.state_dict())
    for entry in state["state"].values():
        for key, value in entry.items():
            if key != "step" and value is not None:
                value.mul_(0.5)
    side.optimizer.load_state_dict(state)


def move_data(side: Side) -> None:
    for p in side.model.parameters():
        p.data = p.data.clone() * 1.5


def clear_optimizer(side: Side) -> None:
    side.optimizer.state.clear()


def write_in_place(side: Side) -> None:
    with torch.no_grad():
        side.model[0].weight.mul_(0.5)
        for state in side.optimizer.state.values():
            if "exp_avg" in state:
                state["exp_avg"].zero_()


MOVES: dict[str, Callable[[Side], None]] = {
    "model.load_state_dict": load_model,
    "buffers re-assigned": assign_buffers,
    "optimizer.load_state_dict": load_optimizer,
    "p.data = ...": move_data,
    "optimizer.state cleared": clear_optimizer,
    "written in place": write_in_place,
}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("move", MOVES)
def test_moved_storage_is_followed(move: str, kind: str) -> None:
    """Guard: identities and addresses are compared before each step and bound anew."""
    twins = Twins(lambda: make(kind), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(MOVES[move])
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 1


@pytest.mark.parametrize("move", ["p.data = ...", "optimizer.load_state_dict"])
def test_without_looking_the_old_storage_would_be_trained(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard taken out: `Binding._unmoved` always says yes."""
    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setattr(Binding, "_unmoved", lambda self: True)
    twins.both(MOVES[move])
    twins.losses(BATCHES[2:5])
    with pytest.raises(AssertionError):
        twins.assert_same_state()


def test_another_dtype_is_captured_anew() -> None:
    twins = Twins(lambda: make("sgd"), BATCHES[0], check="off")
    twins.train(BATCHES[:2])

    def to_double(side: Side) -> None:
        side.model.to(torch.float64)
        for state in side.optimizer.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].double()

    twins.both(to_double)
    twins.train([(x.double(), y) for x, y in BATCHES[2:4]])
    assert any("captured anew because" in note for note in twins.step.notes)


def test_a_step_of_the_users_own_between_ours() -> None:
    """optimizer.step() called by hand advances Adam's count; the next compiled step must know."""
    twins = Twins(make, BATCHES[0], check="off")

    def by_hand(side: Side) -> None:
        eager_update(side, BATCHES[-1])

    twins.train(BATCHES[:4], after=by_hand, tolerance=1e-7)
    assert {float(s["step"]) for s in twins.ours.optimizer.state.values()} == {8.0}


@pytest.mark.parametrize("rung", ["whole step", "eager"])
def test_a_step_by_hand_without_gradients_is_told(rung: str) -> None:
    """It changes nothing; in a loop of one's own the gradients of the last backward would be there."""

    def side() -> Side:
        return make() if rung == "whole step" else dataclasses.replace(make(), loss_fn=by_data)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)
        twins = Twins(side, BATCHES[0], check="off")
        twins.ours.optimizer.step()  # nothing has been updated yet: as in torch, no word
        twins.train(BATCHES[:2])
    assert twins.step.rung == rung
    before = copy.deepcopy(twins.ours.model.state_dict())
    with pytest.warns(WholestepWarning, match=r"optimizer.step\(\) by hand changes nothing") as told:
        twins.ours.optimizer.step()
    assert told[0].filename == __file__
    assert_same_tree(twins.ours.model.state_dict(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither the Step's own updates, nor those by hand that have gradients
        twins.train(BATCHES[2:4], after=lambda side: eager_update(side, BATCHES[-1]), tolerance=1e-7)


def by_data(model: Any, batch: Any) -> torch.Tensor:
    loss = classify(model, batch)
    return loss * 2 if loss > 1 else loss


def test_gradients_of_a_backward_by_hand_do_not_outlive_a_step() -> None:
    """As where a loop clears them: the next backward by hand must not add to them."""
    twins = Twins(make, BATCHES[0], check="off")

    def by_hand(side: Side) -> None:
        side.loss_fn(side.model, BATCHES[-1]).backward()

    twins.train(BATCHES[:2], after=by_hand)
    for ours, theirs in zip(twins.ours.trained, twins.theirs.trained, strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    twins.step(BATCHES[2])
    assert all(parameter.grad is None for parameter in twins.ours.trained)


def test_variants_share_the_count_of_steps() -> None:
    """Two batch sizes in turn are two variants over one optimizer."""
    short = class_batches(4, size=3)
    twins = Twins(make, BATCHES[0], check="off")
    twins.train([b for pair in zip(BATCHES, short) for b in pair])
    assert {float(s["step"]) for s in twins.ours.optimizer.state.values()} == {8.0}


def test_momentum_with_dampening_over_two_variants() -> None:
    """Only the very first step of a parameter takes its gradient undamped."""

    def damped() -> Side:
        side = make()
        side.optimizer = torch.optim.SGD(side.model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        return side

    short = class_batches(3, size=3)
    Twins(damped, BATCHES[0], check="off").train([b for pair in zip(BATCHES, short) for b in pair])
    Twins(damped, BATCHES[0]).train(BATCHES[:2])


# ---- checkpoints ----


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_dicts_are_those_of_an_eager_run(kind: str) -> None:
    """Same keys in the same order, values, dtypes, devices, after three steps."""
    twins = Twins(lambda: make(kind), BATCHES[0])
    twins.train(BATCHES[:3])
    ours, theirs = twins.ours.optimizer.state_dict(), twins.theirs.optimizer.state_dict()
    assert_same_tree(ours, theirs)
    step_dtypes = {s["step"].dtype for s in ours["state"].values() if "step" in s}
    assert step_dtypes <= {torch.float32}


def through_a_file(side: Side, path: Any) -> Any:
    torch.save({"model": side.model.state_dict(), "optimizer": side.optimizer.state_dict()}, path)
    return torch.load(path, weights_only=True)


def restored(side: Side, parts: Any) -> Side:
    side.model.load_state_dict(parts["model"])
    side.optimizer.load_state_dict(parts["optimizer"])
    return side


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_plain_checkpoint_resumes_here_and_ours_resumes_there(kind: str, tmp_path: Any) -> None:
    """Three steps there, three here, three there again: bit for bit nine eager steps."""
    torch.manual_seed(0)
    reference = make(kind)
    start = copy.deepcopy(reference.model.state_dict())
    expected = [float(eager_update(reference, b)[0]) for b in BATCHES[:6]]

    first = make(kind)
    first.model.load_state_dict(start)
    losses = [float(eager_update(first, b)[0]) for b in BATCHES[:2]]
    second = restored(make(kind), through_a_file(first, tmp_path / "a.pt"))
    step = interpreted(second, BATCHES[0])
    losses += [float(step(b)) for b in BATCHES[2:4]]
    third = restored(make(kind), through_a_file(second, tmp_path / "b.pt"))
    losses += [float(eager_update(third, b)[0]) for b in BATCHES[4:6]]
    assert losses == expected
    assert_same_tree(third.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"])


def test_a_checkpoint_saved_between_steps_is_not_changed_by_later_ones() -> None:
    """What state_dict() returned is as live as torch's; a deep copy of it stays."""
    side = make()
    step = interpreted(side, BATCHES[0], check="off")
    step(BATCHES[0])
    kept = copy.deepcopy(side.optimizer.state_dict())
    step(BATCHES[1])
    assert {float(s["step"]) for s in kept["state"].values()} == {1.0}
    assert {float(s["step"]) for s in side.optimizer.state_dict()["state"].values()} == {2.0}


def test_the_guard_of_state_on_the_host_is_no_step_hook_of_the_users() -> None:
    """It was taken for one: every second step was captured anew without its update, which torch then ran."""
    twins = Twins(make, BATCHES[0], plan=Plan(state={"*": "host"}), check="off")
    ours, theirs = twins.losses(BATCHES[:4])
    assert ours == theirs
    assert_same_tree(twins.ours.model.state_dict(), twins.theirs.model.state_dict())
    assert "1 capture," in twins.step.explain() and "captured anew" not in twins.step.explain()
    assert twins.step.graph is not None and twins.step.graph.indices(Role.STATE), "the update is in the graph"
    assert twins.ours.optimizer is not None
    twins.ours.optimizer.register_step_post_hook(lambda *_: None)
    twins.losses(BATCHES[4:5])
    assert "captured anew because the optimizer's groups or its step" in twins.step.explain()


class Replacing(nn.Module):
    """Statistics of activations in a buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        self.scale = 0.5 * self.scale + x.abs().max()
        return self.layer(x) / self.scale


@pytest.mark.parametrize("within", ["the model", "a module of the loss"])
@pytest.mark.parametrize("check", ["first", "off"])
def test_a_buffer_that_each_micro_batch_replaces_is_read_by_the_next(within, check):
    torch.manual_seed(0)
    batches = [torch.randn(rows, 6) * (i + 1) for i, rows in enumerate([4, 2, 4, 4, 2, 4])]
    nets = [Replacing()]
    nets.append(copy.deepcopy(nets[0]))
    made = []
    for net in nets:
        model = net if within == "the model" else net.layer
        made.append(
            (model, lambda model, x, net=net: net(x).square().mean(), torch.optim.SGD(net.layer.parameters(), lr=0.1))
        )
    step = wholestep.compile(*made[0], batches[:3], accumulate=3, check=check, backend="interpret", cache=False)
    model, loss_fn, optimizer = made[1]
    for part in (batches[:3], batches[3:]):
        optimizer.zero_grad()
        losses = [loss_fn(model, x) / 3 for x in part]
        torch.autograd.backward(losses)
        optimizer.step()
        torch.testing.assert_close(step(part), sum(losses).detach())
    assert step.rung == "whole step"
    for ours, theirs in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs)
