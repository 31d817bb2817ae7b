"""Lists that a loss appends to, and lines that it prints: done after the graph, at every step, without a capture for each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, Twins, class_batches, classify, interpreted, small_mlp
from torch import nn

from wholestep.errors import WholestepWarning

BATCHES = class_batches(8)
CHECKS = pytest.mark.parametrize("check", ["first", "off"])


def keeping(act: Callable[[list[Any], torch.Tensor], Any]) -> Callable[[], Side]:
    """A loss that does `act` to a list of its closure."""

    def make() -> Side:
        model, history = small_mlp(), []

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = classify(model, batch)
            factor = act(history, loss)
            return loss if factor is None else loss * factor

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, history)

    return make


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(type(a) is type(b) and float(a) == float(b) for a, b in zip(ours, theirs))


@CHECKS
@pytest.mark.parametrize(
    "act",
    [
        lambda history, loss: history.append(loss.item()),
        lambda history, loss: history.append(loss.detach()),
        lambda history, loss: (history.append(1), history.append(loss.item()))[0],
    ],
)
def test_a_list_that_only_grows_costs_one_more_capture(act: Callable[..., Any], check: str) -> None:
    twins = Twins(keeping(act), BATCHES[0], check=check)
    assert twins.ours.extra == []
    twins.train(BATCHES)
    assert same(twins.ours.extra, twins.theirs.extra)
    assert twins.step.rung == "whole step" and twins.step.captures <= 3, twins.step.explain()


def test_a_list_that_is_read_is_guarded() -> None:
    """The number of its entries reaches the loss: every length is a graph of its own, then the step is left."""

    def act(history: list[Any], loss: torch.Tensor) -> float:
        history.append(1)
        return 1.0 + len(history)

    twins = Twins(keeping(act), BATCHES[0], check="off")
    with pytest.warns(WholestepWarning, match="again and again"):
        twins.train(BATCHES)
    assert twins.ours.extra == twins.theirs.extra == [1] * len(BATCHES)


def test_a_list_that_is_emptied_now_and_then_follows() -> None:
    def act(history: list[Any], loss: torch.Tensor) -> None:
        history.append(loss.item())

    def empty(side: Side) -> None:
        if len(side.extra) == 3:
            side.extra.clear()

    twins = Twins(keeping(act), BATCHES[0])
    twins.train(BATCHES, after=empty)
    assert same(twins.ours.extra, twins.theirs.extra) and twins.step.rung == "whole step"


def says(text: str) -> None:
    print(text)


def test_print_in_an_inlined_function_is_printed_at_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Side:
        model = small_mlp()

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = classify(model, batch)
            says("inner")
            print("outer")
            return loss

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0])
    assert capsys.readouterr().out == "", "compile prints nothing"
    for batch in BATCHES[:4]:
        twins.step(batch)
        assert sorted(capsys.readouterr().out.split()) == ["inner", "outer"]
    assert twins.step.rung == "whole step"


def test_keywords_of_print_and_sizes_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Side:
        model, counted = small_mlp(), [0]

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            counted[0] += 1
            print("rows", batch[0].shape, (len(batch[1]), counted[0]), sep="|", end=".", flush=True)
            return classify(model, batch)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0], check="off")
    rows = len(BATCHES[0][0])
    for i, kept in enumerate((rows, rows, 2, 1, rows)):
        twins.step([tensor[:kept] for tensor in BATCHES[i]])
        width = BATCHES[0][0].shape[1]
        assert capsys.readouterr().out == f"rows|torch.Size([{kept}, {width}])|({kept}, {i + 1})."
    assert twins.step.rung == "whole step"


def test_a_warning_is_given_at_every_step() -> None:
    def make() -> Side:
        model = small_mlp()

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            warnings.warn("careful", stacklevel=1)
            return classify(model, batch)

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        twins = Twins(make, BATCHES[0])
        twins.train(BATCHES[:3])
    said = [w for w in seen if str(w.message) == "careful"]
    assert len(said) == 6, "three of ours, three of eager's"
    assert twins.step.rung == "whole step"


class Own(UserWarning):
    pass


@CHECKS
def test_warnings_of_a_category_are_given_at_every_step(check: str) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        warnings.warn("by place", Own, 1)
        warnings.warn("by name", category=FutureWarning, stacklevel=2)
        warnings.warn(f"rows {len(batch[0])}", stacklevel=1)
        return classify(model, batch)

    model = small_mlp()
    made = Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
    step = interpreted(made, BATCHES[0], check=check)
    for batch in BATCHES[:2]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step(batch)
        told = [(w.category, str(w.message)) for w in found]
        assert told == [(Own, "by place"), (FutureWarning, "by name"), (UserWarning, f"rows {len(batch[0])}")]
    assert step.rung == "whole step", step.explain()
