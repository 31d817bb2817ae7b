"""compile(check="first"): a right step passes; a wrong graph or wrong compiled code raises and changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verify.small_models import Attention, Mlp, Normed, batches, everything, loss_fn
from tests.verify.test_mutations import lost_buffer, scaled_after, swapped_keys
from torch import nn

import wholestep
from wholestep.errors import FirstStepDiffers, WholestepWarning
from wholestep.graph.copies import copy_graph
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower import lower_interpret
from wholestep.runtime.step import Step
from wholestep.verify import first_step, host
from wholestep.verify.check import check_first_step
from wholestep.verify.limits import Limits

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer | None]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "none": lambda p: None,
}


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> Step:
    return wholestep.compile(
        model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False, clip_norm=0.5, **options
    )


RIGHT = [(Normed, kind, 1) for kind in OPTIMIZERS] + [(Normed, "adamw", 2), (Normed, "none", 2), (Attention, "sgd", 1)]


@pytest.mark.parametrize(("build", "kind", "accumulate"), RIGHT)
def test_a_right_step_passes(build: type[nn.Module], kind: str, accumulate: int) -> None:
    model = build()
    step = compiled(model, OPTIMIZERS[kind](model.parameters()), accumulate=accumulate)
    for batch in batches(2):
        step(batch)
    assert step.rung == "whole step" and all(note.startswith("pass ") for note in step.notes)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_check_leaves_no_trace(accumulate: int) -> None:
    ours, unchecked = Normed(), Normed()
    unchecked.load_state_dict(ours.state_dict())
    optimizers = [OPTIMIZERS["momentum"](m.parameters()) for m in (ours, unchecked)]
    steps = [
        compiled(m, o, accumulate=accumulate, check=check, seed=5)
        for m, o, check in zip((ours, unchecked), optimizers, ("first", "off"))
    ]
    for batch in batches(3):
        assert torch.equal(*(step(batch)[0] for step in steps))
    kept = [everything(m, o) for m, o in zip((ours, unchecked), optimizers)]
    assert all(torch.equal(v, kept[1][n]) for n, v in kept[0].items() if isinstance(v, torch.Tensor))


def test_it_passes_in_the_middle_of_a_training() -> None:
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(3):
        optimizer.zero_grad()
        loss_fn(model, batch)[0].backward()
        optimizer.step()
    step = compiled(model, optimizer)
    step(batches(1)[0])
    assert all(note.startswith("pass ") for note in step.notes) and float(optimizer.state[model.scale]["step"]) == 4


def test_a_wrong_graph_is_named_before_anything_is_written() -> None:
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = compiled(model, optimizer, passes=[swapped_keys])
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    for _ in range(2):  # and it is checked again
        with pytest.raises(
            FirstStepDiffers, match=r"module drop_one: its output is off .* \(at drop_one\).*check='off'"
        ):
            step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items()) and step.count == 0


def wrong_runner(step: Step, parameter: str, factor: float = 1.1) -> None:
    """Put compiled code in place that scales one gradient on its way to the optimizer."""
    assert step._latest is not None
    graph: TrainingGraph = copy_graph(step._latest.capture.graph)
    scaled_after(graph, graph.node(graph.gradients[parameter]), factor)
    step._latest.runner = lower_interpret(graph)


@pytest.mark.parametrize(("kind", "accumulate"), [*((kind, 1) for kind in OPTIMIZERS), ("adamw", 2)])
def test_wrong_compiled_code_is_named_and_the_state_put_back(kind: str, accumulate: int) -> None:
    model = Normed()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = compiled(model, optimizer, accumulate=accumulate)
    wrong_runner(step, "body.weight")
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(FirstStepDiffers, match=r"compiled .*step: the gradient of body.weight .*\(at body\)"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    if optimizer is not None:
        assert not any(value.any() for table in optimizer.state.values() for value in table.values())
    with pytest.raises(FirstStepDiffers):  # and it is checked again
        step(batches(1)[0])


# ---- with what eager keeps on the host, as within a memory budget ----


def leanly(step: Step, *, interpret: bool) -> Step:
    check = functools.partial(check_first_step, lean=first_step.Lean(0, interpret))
    step.check = check
    return step


@pytest.mark.parametrize(("build", "kind", "accumulate"), RIGHT)
def test_a_right_step_passes_leanly(
    build: type[nn.Module], kind: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "SMALL_BYTES", 1)
    model = build()
    step = leanly(compiled(model, OPTIMIZERS[kind](model.parameters()), accumulate=accumulate), interpret=False)
    for batch in batches(2):
        step(batch)
    told = [line for line in step.explain().splitlines() if line.startswith("check ")]
    assert len(told) == 1 and "whole: the first step is compared with eager PyTorch on all rows" in told[0]
    assert "eager saves on the host" in told[0] and "the captured graph was not run by itself" in told[0]


@pytest.mark.parametrize(("kind", "accumulate"), [*((kind, 1) for kind in OPTIMIZERS), ("adamw", 2)])
def test_wrong_compiled_code_is_found_leanly(kind: str, accumulate: int) -> None:
    model = Normed()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = leanly(compiled(model, optimizer, accumulate=accumulate), interpret=False)
    wrong_runner(step, "body.weight")
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(FirstStepDiffers, match=r"compiled .*step: the gradient of body.weight .*\(at body\)"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("interpret", [True, False])
def test_a_wrong_graph_is_found_leanly(interpret: bool) -> None:
    model = Mlp()
    step = leanly(compiled(model, torch.optim.AdamW(model.parameters()), passes=[swapped_keys]), interpret=interpret)
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(FirstStepDiffers, match="module drop_one" if interpret else "the compiled step"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())


def test_gradients_for_an_optimizer_of_ones_own_are_compared_after_the_step() -> None:
    """Its update is not captured: p.grad is what the step leaves."""
    model = Normed()
    with pytest.warns(UserWarning, match="the update runs in eager PyTorch"):
        step = leanly(compiled(model, torch.optim.Adadelta(model.parameters())), interpret=False)
    wrong_runner(step, "body.weight")
    with pytest.raises(FirstStepDiffers, match=r"the gradient of body\.weight"):
        step(batches(1)[0])


def test_what_takes_no_hooks_keeps_its_values_on_the_device() -> None:
    def penalised(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        slope = torch.func.grad(lambda x: model(x).square().sum())(batch["x"])
        return model(batch["x"]).square().mean() + slope.square().mean()

    calls: list[int] = []
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    step = wholestep.compile(
        model, penalised, torch.optim.AdamW(model.parameters()), batches(1)[0], backend="interpret", cache=False
    )
    assert step.rung == "whole step"
    step = leanly(step, interpret=False)
    step(batches(1)[0])
    assert len(calls) == 1 and any(note.startswith("check: whole") for note in step.notes)


def test_a_lack_of_memory_is_left_to_the_caller_leanly(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("the card is full")

    model = Mlp()
    step = leanly(compiled(model, torch.optim.SGD(model.parameters(), lr=0.1)), interpret=True)
    monkeypatch.setattr(first_step, "live_reference", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        step(batches(1)[0])


def test_a_lack_of_memory_after_the_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError("the card is full")

    model = Mlp()
    step = leanly(compiled(model, torch.optim.SGD(model.parameters(), lr=0.1)), interpret=True)
    monkeypatch.setattr(first_step.FirstStep, "_failing_updates", no_memory)
    assert step(batches(1)[0])[0].isfinite()
    assert any("check: partly: " in note for note in step.notes)


def test_a_low_precision_is_measured_by_its_own_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """However tight the fixed limits, a departure smaller than eager's own rounding is none; a larger one is."""
    monkeypatch.setitem(first_step.LIMITS, "bf16", Limits(6e-2, 4e-4, 0.0, 2e-2))
    for factor, right in ((1.0008, True), (1.2, False)):
        model = Normed()
        step = compiled(model, torch.optim.AdamW(model.parameters()), precision="bf16")
        wrong_runner(step, "body.weight", factor)
        if right:
            step(batches(1)[0])
        else:
            with pytest.raises(FirstStepDiffers, match="the gradient of body"):
                step(batches(1)[0])


@pytest.mark.parametrize("lean", [False, True])
def test_without_memory_to_measure_that_rounding_it_is_told(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither passed in silence nor called wrong."""

    def no_memory(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("the card is full")

    monkeypatch.setitem(first_step.LIMITS, "bf16", Limits(6e-2, 4e-4, 0.0, 2e-2))
    monkeypatch.setattr(first_step, "reference_gradients", no_memory)
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters())
    step = wholestep.compile(
        model, loss_fn, optimizer, batches(1)[0], backend="interpret", cache=False, precision="bf16"
    )
    if lean:
        leanly(step, interpret=False)
    wrong_runner(step, "body.weight", 1.2)
    with pytest.warns(WholestepWarning, match=r"the gradient of body\.weight is off .*tells whether that is rounding"):
        step(batches(1)[0])
    assert any("undecided: the gradient of body.weight" in line for line in step.explain().splitlines())


@pytest.mark.parametrize("kind", ["bf16", "tf32"])
def test_so_is_the_captured_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(first_step.LIMITS, kind, Limits(4e-4 if kind == "bf16" else 1e-9, 0.5, 0.0, 2e-2))
    monkeypatch.setattr(first_step, "precision_of", lambda *_: kind)
    small = 1 + 2**-8 if kind == "bf16" else 1 + 2**-23
    for factor, right in ((small, True), (1.2, False)):

        def scaled(graph: TrainingGraph, factor: float = factor) -> TrainingGraph:
            scaled_after(graph, graph.node(graph.gradients["body.weight"]).all_input_nodes[0], factor)
            return graph

        model, precision = Normed(), "bf16" if kind == "bf16" else "fp32"
        step = compiled(model, torch.optim.AdamW(model.parameters()), precision=precision, passes=[scaled])
        if right:
            step(batches(1)[0])
        else:
            with pytest.raises(FirstStepDiffers, match="the captured graph: the gradient of body"):
                step(batches(1)[0])


def test_a_lost_buffer_is_named() -> None:
    model = Normed()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), passes=[lost_buffer])
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(FirstStepDiffers, match=r"buffer norm.running_mean .* the state was put back \(at norm\)"):
        step(batches(1)[0])
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())


def test_a_step_that_was_compared_says_nothing_about_other_passes() -> None:
    """The captured graph is found on disk; what is made of it was not compared."""

    def made(passes: list[Any]) -> Step:
        torch.manual_seed(0)
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        return wholestep.compile(model, loss_fn, optimizer, batches(1)[0], backend="interpret", passes=passes)

    made([lambda graph: graph])(batches(1)[0])
    with pytest.raises(FirstStepDiffers):
        made([swapped_keys])(batches(1)[0])


def test_without_memory_for_it_the_check_is_skipped_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("the card is full")

    model = Mlp()
    step = compiled(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(first_step, "live_reference", no_memory)
    assert step(batches(1)[0])[0].isfinite()
    assert any("not checked" in note and "the card is full" in note for note in step.notes)
