"""Values that a captured graph has fixed are read again before every step: flags, probabilities, closures, structure.

The guard under test is `Guards`; `frozen_guards` takes it out, and the wrong result is shown next to the right one.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn

import wholestep
from wholestep.capture.guards import Guards
from wholestep.errors import WholestepWarning

BATCHES = class_batches(10)


@pytest.fixture
def frozen_guards(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make every later reading equal to the first."""

    def freeze() -> None:
        monkeypatch.setattr(Guards, "values", lambda self: [])
        monkeypatch.setattr(Guards, "restructured", lambda self: False)

    return freeze


def with_batch_norm() -> Side:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


def with_option() -> Side:
    """The loss reads a closure variable, a dict, an object and a keyword's default."""
    model, smoothing, options, settings = small_mlp(), 0.0, {"scale": 1.0}, types.SimpleNamespace(power=1, steps=0)

    def loss_fn(model: nn.Module, batch: Any, offset: float = 0.5) -> torch.Tensor:
        logits = model(batch[0]) * options["scale"]
        return F.cross_entropy(logits, batch[1], label_smoothing=smoothing) ** settings.power + offset

    def set_smoothing(value: float) -> None:
        nonlocal smoothing
        smoothing = value

    def replace_options() -> None:
        nonlocal options
        options = {"scale": 3.0}

    extra = types.SimpleNamespace(set=set_smoothing, options=options, settings=settings, replace=replace_options)
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, extra)


def freeze_first_layer(side: Side) -> None:
    side.model[0].requires_grad_(False)


def replace_activation(side: Side) -> None:
    side.model[2] = nn.Tanh()


CHANGES: dict[str, tuple[Callable[[], Side], Callable[[Side], Any]]] = {
    "eval flag": (with_batch_norm, lambda side: side.model.eval()),
    "eval flag of one module": (with_batch_norm, lambda side: side.model[1].eval()),
    "plain attribute": (with_batch_norm, lambda side: setattr(side.model[1], "eps", 2.0)),
    "requires_grad": (with_batch_norm, freeze_first_layer),
    "submodule": (with_batch_norm, replace_activation),
    "closure variable": (with_option, lambda side: side.extra.set(0.3)),
    "dict in the closure": (with_option, lambda side: side.extra.options.update(scale=2.0)),
    "another dict in the closure": (with_option, lambda side: side.extra.replace()),
    "object in the closure": (with_option, lambda side: setattr(side.extra.settings, "power", 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_value_is_seen(change: str, frozen_guards: Callable[[], None]) -> None:
    make, act = CHANGES[change]
    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(act)
    twins.train(BATCHES[2:5])
    assert twins.step.captures == 2 and any("captured anew because" in note for note in twins.step.notes)
    frozen_guards()
    unguarded = Twins(make, BATCHES[0], check="off")
    unguarded.losses(BATCHES[:2])
    unguarded.both(act)
    ours, theirs = unguarded.losses(BATCHES[2:5])
    assert ours != theirs, "the test would pass without the guard"


def test_a_value_put_back_needs_no_third_capture() -> None:
    twins = Twins(with_batch_norm, BATCHES[0], check="off")
    for index in range(3):
        twins.both(lambda side, index=index: side.model.train(index % 2 == 0))
        twins.train(BATCHES[index : index + 1])
    twins.both(lambda side: side.model.train())
    twins.train(BATCHES[3:5])
    assert twins.step.captures == 2


def test_evaluation_between_steps_is_no_change() -> None:
    twins = Twins(with_batch_norm, BATCHES[0], check="off")

    def evaluate(side: Side) -> None:
        side.model.eval()(BATCHES[-1][0])
        side.model.train()

    twins.train(BATCHES[:3], after=evaluate)
    assert twins.step.captures == 1


def test_dropout_probability_changed_between_steps() -> None:
    """The fraction of zeros follows `p`."""
    model = nn.Sequential(nn.Dropout(0.2), nn.Linear(400, 1))
    seen = lambda m, b: (m(b).sum(), {"kept": (m[0](b) != 0).float().mean()})  # noqa: E731
    step = interpreted(Side(model, torch.optim.SGD(model.parameters(), lr=0.0), seen), torch.ones(8, 400))
    assert float(step(torch.ones(8, 400))[1]["kept"]) == pytest.approx(0.8, abs=0.05)
    model[0].p = 0.7
    assert float(step(torch.ones(8, 400))[1]["kept"]) == pytest.approx(0.3, abs=0.05)
    model.eval()
    assert float(step(torch.ones(8, 400))[1]["kept"]) == 1.0


def test_a_value_that_changes_at_every_step_ends_in_eager() -> None:
    twins = Twins(with_option, BATCHES[0], check="off")
    value = iter(range(100))

    def move(side: Side) -> None:
        side.extra.set(moving[0])

    with pytest.warns(WholestepWarning, match=r"smoothing: .* keeps changing; pass such a value as a tensor"):
        for batch in BATCHES:
            moving = [next(value) / 100]
            twins.both(move)
            twins.train([batch])
    assert twins.step.rung == "eager" and twins.step.captures <= 6


def test_attributes_the_loss_never_reads_do_not_matter() -> None:
    """A trainer whose method is the loss counts its steps: no reason to capture anew."""

    class Trainer:
        def __init__(self) -> None:
            self.steps, self.scale, self.history = 0, 1.0, []

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return self.scaled(classify(model, batch))

        def scaled(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * self.scale

    def make() -> Side:
        model, trainer = small_mlp(), Trainer()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), trainer.loss, trainer)

    def count(side: Side) -> None:
        side.extra.steps += 1
        side.extra.history = [*side.extra.history, side.extra.steps]

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:8], after=count)
    assert twins.step.captures == 1
    twins.both(lambda side: setattr(side.extra, "scale", 2.0))
    twins.train(BATCHES[8:])
    assert twins.step.captures == 2


def test_the_training_flag_of_a_teacher_in_the_closure() -> None:
    def make() -> Side:
        model, teacher = small_mlp(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).requires_grad_(False)

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            return F.mse_loss(model(batch[0]), teacher(batch[0]))

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, teacher)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(lambda side: side.extra.eval())
    twins.train(BATCHES[2:4])


SLOPE = 1.0


class ReadsAGlobal(nn.Module):
    """Its forward reads SLOPE, by way of a method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.inner(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * SLOPE


def test_a_global_that_a_module_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Side:
        model = ReadsAGlobal()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 2


def test_autocast_around_the_step_is_part_of_the_key() -> None:
    side = with_option()
    step = interpreted(side, BATCHES[0], check="off")
    step(BATCHES[0])
    with torch.autocast("cpu", torch.bfloat16):
        step(BATCHES[1])
    assert step.captures == 2
    assert any(node.meta["val"].dtype == torch.bfloat16 for node in step.graph.operations()
               if isinstance(node.meta["val"], torch.Tensor))  # fmt: skip


def test_optimizer_flags_are_in_the_key_and_numbers_are_not() -> None:
    def make() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.AdamW(model.parameters(), lr=0.01), classify)

    twins = Twins(make, BATCHES[0], check="off")

    def numbers(side: Side) -> None:
        side.optimizer.param_groups[0].update(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)

    def maximize(side: Side) -> None:
        side.optimizer.param_groups[0]["maximize"] = True

    twins.train(BATCHES[:2], after=numbers)
    assert twins.step.captures == 1
    twins.both(maximize)
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 2


def test_a_group_added_later() -> None:
    def make() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.SGD(model[0].parameters(), lr=0.1), classify)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(lambda side: side.optimizer.add_param_group({"params": list(side.model[2].parameters()), "lr": 0.5}))
    twins.train(BATCHES[2:4])


def test_momentum_switched_on_later() -> None:
    def make() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(lambda side: side.optimizer.param_groups[0].update(momentum=0.9))
    twins.train(BATCHES[2:5])


def test_reading_the_guards_is_cheap() -> None:
    """A few hundred modules: well under what a step costs."""
    import time

    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    side = Side(model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).sum())
    from wholestep.capture.subject import make_subject

    guards = Guards(make_subject(side.model, side.loss_fn, side.optimizer))
    first = guards.values()
    taken = []
    for _ in range(10):
        began = time.process_time()
        assert guards.values() == first and not guards.restructured()
        taken.append(time.process_time() - began)
    assert min(taken) < 0.02


class Chooser(nn.Module):
    """Like a Hugging Face classifier: the first forward writes down which loss the labels call for, later ones obey."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression" if batch["y"].is_floating_point() else "classes"
        logits = self.linear(batch["x"])
        loss = nn.functional.mse_loss if self.kind == "regression" else nn.functional.cross_entropy
        return loss(logits, batch["y"])


def test_what_the_forward_sets_once_calls_for_no_second_capture() -> None:
    model = Chooser()
    batch = {"x": torch.randn(5, 4), "y": torch.tensor([0, 2, 1, 1, 0])}
    step = wholestep.compile(
        model, lambda m, b: m(b), torch.optim.SGD(model.parameters(), lr=0.1), batch, backend="interpret", cache=False
    )
    assert model.kind is None
    first = step(batch)
    model(batch)  # validation, say
    assert model.kind == "classes"
    assert step(batch) < first and step.captures == 1
    # class probabilities are floats, too: a model that has settled reads them as such, one that has not as a regression
    probabilities = {"x": batch["x"], "y": torch.softmax(torch.randn(5, 3), -1)}
    with torch.no_grad():
        want = nn.functional.cross_entropy(model.linear(batch["x"]), probabilities["y"])
    assert torch.equal(step(probabilities), want) and step.captures == 2
    model.kind = None
    with torch.no_grad():
        want = nn.functional.mse_loss(model.linear(batch["x"]), probabilities["y"])
    assert torch.equal(step(probabilities), want)
