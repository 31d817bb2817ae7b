"""Which captured graph holds: guards by what was read, limits with the guard named, and what Dynamo itself does not guard.

Every change is made on both sides, and training must follow eager whether it asks for a new graph or not.
"""

from __future__ import annotations

import functools
import gc
import heapq
import os
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn

import wholestep
from wholestep.capture.front.front import described, guarded_place
from wholestep.errors import WholestepWarning

BATCHES = class_batches(10)


def sgd(model: nn.Module, loss_fn: Any = classify, extra: Any = None) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, extra)


# ---- values that were read ----


def with_batch_norm() -> Side:
    return sgd(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))


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

    def set_default(value: float) -> None:
        loss_fn.__defaults__ = (value,)

    extra = types.SimpleNamespace(
        set=set_smoothing, options=options, settings=settings, replace=replace_options, default=set_default
    )
    return sgd(model, loss_fn, extra)


CHANGES: dict[str, tuple[Callable[[], Side], Callable[[Side], Any]]] = {
    "eval flag": (with_batch_norm, lambda side: side.model.eval()),
    "eval flag of one module": (with_batch_norm, lambda side: side.model[1].eval()),
    "plain attribute": (with_batch_norm, lambda side: setattr(side.model[1], "eps", 2.0)),
    "requires_grad": (with_batch_norm, lambda side: side.model[0].requires_grad_(False)),
    "submodule": (with_batch_norm, lambda side: side.model.__setitem__(2, nn.Tanh())),
    "closure variable": (with_option, lambda side: side.extra.set(0.3)),
    "dict in the closure": (with_option, lambda side: side.extra.options.update(scale=2.0)),
    "another dict in the closure": (with_option, lambda side: side.extra.replace()),
    "object in the closure": (with_option, lambda side: setattr(side.extra.settings, "power", 2)),
    "default of an argument": (with_option, lambda side: side.extra.default(0.7)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_value_is_seen_and_named(change: str) -> None:
    make, act = CHANGES[change]
    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(act)
    twins.train(BATCHES[2:5], tolerance=1e-6)
    # a third where the number was tried as an input, of an operator that takes plain numbers only
    assert twins.step.captures in (2, 3) and twins.step.rung == "whole step"
    told = twins.step.notes
    assert any("captured anew because" in note for note in told), told


def test_without_guards_a_changed_value_is_not_seen() -> None:
    """`guards="off"` fixes what the Python read: the option says so, and this is what it means."""
    ours, theirs = with_option(), with_option()
    theirs.model.load_state_dict(ours.model.state_dict())
    step = interpreted(ours, BATCHES[0], guards="off", check="off")
    assert float(step(BATCHES[0])) == float(theirs.loss_fn(theirs.model, BATCHES[0]))
    for side in (ours, theirs):
        side.extra.options.update(scale=2.0)
    theirs.model.load_state_dict(ours.model.state_dict())
    assert float(step(BATCHES[1])) != float(theirs.loss_fn(theirs.model, BATCHES[1]))
    assert step.captures == 1 and "fixed" in (wholestep.compile.__doc__ or "")


def test_without_guards_a_right_loss_trains_as_eager_and_touches_nothing() -> None:
    def make() -> Side:
        seen: list[int] = []

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            seen.append(1)
            return classify(model, batch)

        return sgd(small_mlp(), loss_fn, seen)

    twins = Twins(make, BATCHES[0], guards="off", check="off")
    assert twins.ours.extra == [], "what the trace did is put back"
    twins.train(BATCHES[:4])
    twins.train(class_batches(2, size=3))
    assert (twins.step.rung, twins.step.captures) == ("whole step", 2)


def test_guards_is_one_of_two_words() -> None:
    with pytest.raises(wholestep.errors.BadOption, match="guards='on'"):
        interpreted(with_option(), BATCHES[0], guards="on")


def test_a_value_put_back_needs_no_third_capture() -> None:
    twins = Twins(with_batch_norm, BATCHES[0], check="off")
    for index in range(3):
        twins.both(lambda side, index=index: side.model.train(index % 2 == 0))
        twins.train(BATCHES[index : index + 1])
    twins.both(lambda side: side.model.train())
    twins.train(BATCHES[3:5])
    assert twins.step.captures == 2


def test_evaluation_between_steps_is_no_change() -> None:
    def evaluate(side: Side) -> None:
        side.model.eval()(BATCHES[-1][0])
        side.model.train()

    twins = Twins(with_batch_norm, BATCHES[0], check="off")
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


def test_what_the_loss_never_reads_does_not_matter() -> None:
    """A trainer whose method is the loss counts its steps, and a batch brings names: no reason to capture anew."""

    class Trainer:
        def __init__(self) -> None:
            self.steps, self.scale, self.history = 0, 1.0, []

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return classify(model, (batch["x"], batch["y"])) * self.scale

    def make() -> Side:
        trainer = Trainer()
        return sgd(small_mlp(), trainer.loss, trainer)

    def count(side: Side) -> None:
        side.extra.steps += 1
        side.extra.history = [*side.extra.history, side.extra.steps]

    named = [{"x": x, "y": y, "file": f"part-{i}", "index": i} for i, (x, y) in enumerate(BATCHES)]
    twins = Twins(make, named[0], check="off")
    twins.train(named[:8], after=count)
    assert twins.step.captures == 1
    twins.both(lambda side: setattr(side.extra, "scale", 2.0))
    twins.train(named[8:])
    assert twins.step.captures == 2


def test_a_number_that_varies_becomes_an_input() -> None:
    """The second value is a second capture; all later ones are inputs of it."""

    def make() -> Side:
        side = sgd(small_mlp(), extra={"weight": 1.0})
        side.loss_fn = lambda m, b: classify(m, b) * side.extra["weight"]
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES, after=lambda side: side.extra.update(weight=side.extra["weight"] * 0.9), tolerance=1e-6)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 2), twins.step.explain()


SLOPE = 1.0


def test_a_global_that_a_helper_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * SLOPE

    twins = Twins(lambda: sgd(small_mlp(), lambda m, b: scaled(classify(m, b))), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setitem(globals(), "SLOPE", 3.0)
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 2


def test_autocast_around_the_step_is_guarded() -> None:
    step = interpreted(with_option(), BATCHES[0], check="off")
    step(BATCHES[0])
    with torch.autocast("cpu", torch.bfloat16):
        step(BATCHES[1])
    assert step.captures == 2
    kinds = {n.meta["val"].dtype for n in step.graph.operations() if isinstance(n.meta["val"], torch.Tensor)}
    assert torch.bfloat16 in kinds


# ---- limits ----


def moved_at_every_step(values: list[Any]) -> tuple[Callable[[], Side], Callable[[Side], None]]:
    """A loss that reads a word of a dict; `move` puts the next one there."""

    def make() -> Side:
        side = sgd(small_mlp(), extra={"word": "a", "at": 0})
        side.loss_fn = lambda m, b: classify(m, b) * (1.0 + len(side.extra["word"]) + ord(side.extra["word"][0]) / 100)
        return side

    def move(side: Side) -> None:
        side.extra["at"] += 1
        side.extra["word"] = values[side.extra["at"] % len(values)]

    return make, move


def test_a_value_that_changes_at_every_step_ends_below_with_its_name() -> None:
    make, move = moved_at_every_step([f"{letter}x" for letter in "abcdefghijkl"])
    twins = Twins(make, BATCHES[0], check="off")
    with pytest.warns(
        WholestepWarning, match=r"\['word'\].* is another one again and again; pass such a value as a tensor"
    ):
        twins.train(BATCHES, after=move)
    assert twins.step.rung == "whole step, else eager" and twins.step.captures == 5, twins.step.explain()


def test_graphs_of_known_values_are_still_used_then() -> None:
    make, move = moved_at_every_step(["a", "b", "c"])
    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES, after=move)
    assert (twins.step.rung, twins.step.captures) == ("whole step", 3)


def test_the_number_of_captures_is_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wholestep.capture.front.front.MOST_CAPTURES", 4)

    def make() -> Side:
        side = sgd(small_mlp(), extra={f"word{i}": "a" for i in range(10)})
        side.loss_fn = lambda m, b: classify(m, b) * sum(len(side.extra[f"word{i}"]) for i in range(10))
        return side

    twins = Twins(make, BATCHES[0], check="off")
    with pytest.warns(WholestepWarning, match=r"captured 4 times, the last time because .*word"):
        for index, batch in enumerate(BATCHES[:7]):
            twins.both(lambda side, index=index: side.extra.__setitem__(f"word{index}", "b" * (index + 2)))
            twins.train([batch])
    assert twins.step.captures == 4 and twins.step.rung == "whole step, else eager"


def test_how_a_guard_is_named() -> None:
    missed = "L['model']._modules['0'].eps == 1e-05  # return F.layer_norm(  # nn/norm.py:12 in forward"
    assert guarded_place(missed) == "L['model']._modules['0'].eps"
    assert described(missed) == "model.0.eps == 1e-05 (norm.py:12)"
    assert (
        described("L['loss_fn'].__closure__[1].cell_contents['now'] == 1", ("model", "epochs")) == "epochs['now'] == 1"
    )
    assert (
        guarded_place("tensor 'L['batch'][0]' size mismatch at index 0. expected 5, actual 3")
        == "size of L['batch'][0]"
    )


def test_a_reason_has_the_words_of_what_the_code_raises() -> None:
    a_library = {"torch": torch, "__name__": "transformers.helpers", "__builtins__": __builtins__}
    compiled = types.FunctionType((lambda: torch.compiler.is_compiling()).__code__, a_library)

    class Refuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if compiled():
                raise ValueError("this layer is not for tracing")
            return self.linear(x)

    model, batch = Refuses(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(model, lambda model, x: model(x).sum(), optimizer, batch, backend="interpret")
    assert any("it raises ValueError('this layer is not for tracing')" in str(note) for note in step.notes), step.notes


def test_a_reason_names_the_line_of_the_user_not_of_the_library_that_it_calls() -> None:
    side = sgd(small_mlp())
    side.loss_fn = lambda m, b: classify(m, b) * heapq.nsmallest(1, [1.0, 2.0])[0]
    with pytest.warns(WholestepWarning, match=r"\(at test_front.py:\d+\)"):
        step = interpreted(side, BATCHES[0])
        for _ in range(2):  # the first one is taken by eager, and then it is tried again
            step(BATCHES[0])


# ---- what Dynamo does not guard ----


class Scaled(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(self.inner(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_function_replaced_on_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(lambda: sgd(Scaled()), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setattr(Scaled, "scaled", lambda self, x: x * 3.0)
    twins.train(BATCHES[2:4])
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias) + 1.0)
    twins.train(BATCHES[4:6])
    assert twins.step.rung == "whole step" and twins.step.captures == 3


def test_a_name_that_a_class_gained_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(Scaled):
        pass

    twins = Twins(lambda: sgd(Narrow()), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setattr(Narrow, "factor", 2.0, raising=False)
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 2


def test_the_environment_is_read_live_where_the_code_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch) * (2.0 if os.environ.get("LOSS_TWICE") else 1.0)

    twins = Twins(lambda: sgd(small_mlp(), loss_fn), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    monkeypatch.setenv("LOSS_TWICE", "1")
    twins.train(BATCHES[2:4])


def test_hooks_for_all_modules_are_seen() -> None:
    twins = Twins(lambda: sgd(small_mlp()), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if isinstance(module, nn.Tanh) else None
    )
    try:
        twins.train(BATCHES[2:4])
    finally:
        handle.remove()
    twins.train(BATCHES[4:6])


def test_optimizer_flags_and_groups_are_seen_and_numbers_are_inputs() -> None:
    def make() -> Side:
        model = small_mlp()
        return Side(model, torch.optim.AdamW(model[0].parameters(), lr=0.01), classify)

    twins = Twins(make, BATCHES[0], check="off")
    numbers = dict(lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    twins.train(BATCHES[:2], after=lambda side: side.optimizer.param_groups[0].update(numbers))
    assert twins.step.captures == 1
    twins.both(lambda side: side.optimizer.param_groups[0].update(maximize=True))
    twins.train(BATCHES[2:4])
    assert twins.step.captures == 2
    twins.both(lambda side: side.optimizer.add_param_group({"params": list(side.model[2].parameters()), "lr": 0.5}))
    twins.train(BATCHES[4:6])
    assert twins.step.captures == 3 and twins.step.rung == "whole step"


def test_momentum_switched_on_later() -> None:
    twins = Twins(lambda: sgd(small_mlp()), BATCHES[0], check="off")
    twins.train(BATCHES[:2])
    twins.both(lambda side: side.optimizer.param_groups[0].update(momentum=0.9))
    twins.train(BATCHES[2:5])


def test_a_cached_function_that_reads_what_may_change_is_refused() -> None:
    """Dynamo would run it at every capture; eager runs it once."""
    scale = [2.0]

    @functools.lru_cache
    def impure() -> float:
        return scale[0]

    with pytest.warns(
        WholestepWarning, match=r"impure is cached \(lru_cache\) and reads scale, which may change.*test_front"
    ):
        twins = Twins(lambda: sgd(small_mlp(), lambda m, b: classify(m, b) * impure()), BATCHES[0])
    twins.train(BATCHES[:2])
    scale[0] = 5.0
    twins.train(BATCHES[2:4])
    assert twins.step.rung == "eager"


def test_a_cached_function_that_reads_nothing_is_captured() -> None:
    @functools.lru_cache
    def pure(n: int) -> float:
        return n * 0.5

    twins = Twins(lambda: sgd(small_mlp(), lambda m, b: classify(m, b) * pure(3)), BATCHES[0])
    twins.train(BATCHES[:2])
    assert twins.step.rung == "whole step"


def test_torch_compile_switched_off_is_named() -> None:
    torch.compiler.set_stance("force_eager")
    try:
        with pytest.warns(WholestepWarning, match=r"switched off \(torch.compiler.set_stance\('force_eager'\)\)"):
            twins = Twins(lambda: sgd(small_mlp()), BATCHES[0])
        twins.train(BATCHES[:2])
    finally:
        torch.compiler.set_stance("default")
    with torch._dynamo.config.patch(disable=True):
        with pytest.warns(WholestepWarning, match="switched off .TORCHDYNAMO_DISABLE"):
            twins = Twins(lambda: sgd(small_mlp()), BATCHES[0])
        twins.train(BATCHES[:2])
    assert twins.step.rung == "eager"


def test_looking_at_the_guards_is_cheap() -> None:
    """A hundred modules: well under what a step costs."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(120)))
    side = Side(model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).sum())
    step = interpreted(side, torch.ones(1, 2), check="off")
    front = step.front
    arguments = front._arguments(torch.ones(1, 2))
    taken = []
    for _ in range(10):
        began = time.process_time()
        assert front._find(arguments) is not None
        taken.append(time.process_time() - began)
    assert min(taken) < 0.01


class Chooser(nn.Module):
    """Like a Hugging Face classifier: the first forward writes down which loss the labels call for, later ones obey."""

    def __init__(self) -> None:
        super().__init__()
        self.kind: str | None = None
        self.linear = nn.Linear(4, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression" if batch["y"].is_floating_point() else "classes"
        loss = F.mse_loss if self.kind == "regression" else F.cross_entropy
        return loss(self.linear(batch["x"]), batch["y"])


def test_what_the_forward_sets_once_is_set_and_guarded() -> None:
    batch = {"x": torch.randn(5, 4), "y": torch.tensor([0, 2, 1, 1, 0])}
    # class probabilities are floats, too: a model that has settled reads them as such, one that has not as a regression
    probabilities = {"x": batch["x"], "y": torch.softmax(torch.randn(5, 3), -1)}
    twins = Twins(lambda: sgd(Chooser(), lambda m, b: m(b)), batch)
    assert twins.ours.model.kind is None
    twins.train([batch, batch, probabilities])
    assert twins.ours.model.kind == "classes"
    twins.both(lambda side: setattr(side.model, "kind", None))
    twins.train([probabilities])
    assert twins.ours.model.kind == "regression" and twins.step.rung == "whole step"


# ---- nothing stays ----


@pytest.mark.parametrize("backend", ["interpret", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_that_nobody_holds_is_freed_with_its_model(backend: str) -> None:
    """Dynamo keeps tables for as long as the process lives, some where no collector looks: none may lead to the user's tensors."""

    def trained() -> list[weakref.ref]:
        side = with_option()
        step = wholestep.compile(side.model, side.loss_fn, side.optimizer, BATCHES[0], backend=backend)
        step(BATCHES[0])
        if backend == "interpret":
            side.extra.set(0.3)
            step(BATCHES[1])  # captured anew
        return [weakref.ref(thing) for thing in (step, side.model, side.model[0].weight, side.optimizer, side.loss_fn)]

    left = trained()
    gc.collect()
    assert [reference() for reference in left] == [None] * 5


@pytest.mark.parametrize(
    "leaf",
    [
        lambda x: (x * 2.0).requires_grad_(),
        lambda x: (x * 2.0).detach().requires_grad_(True),
        lambda x: torch.zeros_like(x).requires_grad_(),
    ],
)
def test_a_value_that_the_loss_made_may_require_a_gradient(leaf: Any) -> None:
    """Torch 2.13 traces it, 2.11 by our own code: penalties on gradients are whole steps on both."""

    def make() -> Side:
        model = small_mlp()

        def loss_fn(model: Any, batch: Any) -> torch.Tensor:
            between = leaf(batch[0])
            (slope,) = torch.autograd.grad(model(between).square().sum(), between, create_graph=True)
            return classify(model, batch) + slope.square().mean()

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    batches = class_batches(3)
    twins = Twins(make, batches[0], check="off")
    twins.train(batches)
    assert twins.step.rung == "whole step", twins.step.explain()
