"""precision="fp16": loss scaling inside the captured step, against torch's autocast and GradScaler."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import wholestep
from wholestep.capture import loss_scale
from wholestep.capture.loss_scale import LossScale, following
from wholestep.errors import BadOption, NotBuiltYet, WholestepWarning
from wholestep.graph.training_graph import Role

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 1))


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch["x"]).float(), batch["y"])


def batch(index: int = 0, factor: float = 1.0) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(index)
    return {"x": torch.randn(9, 6, generator=source), "y": factor * torch.randn(9, 1, generator=source)}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def compiled(model: nn.Module, kind: str = "adamw", **options: Any) -> wholestep.Step:
    options = {"backend": "interpret", "cache": False, "precision": "fp16", **options}
    return wholestep.compile(model, loss_fn, OPTIMIZERS[kind](model.parameters()), batch(), **options)


def eager(model: nn.Module, optimizer: Any, scaler: Any, data: Any, clip_norm: float | None, parts: int = 1) -> float:
    """The loop of torch's documentation, over micro-batches."""
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for part in zip(*(value.chunk(parts) for value in data.values()), strict=True):
        with torch.autocast("cpu", torch.float16):
            losses.append(loss_fn(model, dict(zip(data, part, strict=True))))
        scaler.scale(losses[-1] / parts).backward()
    scaler.unscale_(optimizer)
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    scaler.step(optimizer)
    scaler.update()
    return float((torch.stack(losses).detach() * torch.full((parts,), 1 / parts)).sum())


HUGE = 4e4
"""Targets for which a gradient times 2**16 is beyond fp16."""


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_torchs_grad_scaler_bit_for_bit(
    kind: str, clip_norm: float | None, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through overflows and growth: losses, scales, parameters and optimizer state, on the same operators."""
    monkeypatch.setattr(loss_scale, "GROWTH_INTERVAL", 3)
    ours, theirs = network(), network()
    step = compiled(ours, kind, clip_norm=clip_norm, accumulate=accumulate)
    optimizer = OPTIMIZERS[kind](theirs.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scales = []
    for index in range(12):
        data = batch(index, HUGE if index in (0, 5) else 1.0)
        buffers = {n: b.clone() for n, b in theirs.named_buffers()}
        before, known = scaler.get_scale(), eager(theirs, optimizer, scaler, data, clip_norm, accumulate)
        if scaler.get_scale() < before:  # torch keeps the statistics of a step that it leaves out; we do not
            for name, buffer in theirs.named_buffers():
                buffer.copy_(buffers[name])
        assert float(step(data)) == known
        scales.append(scaler.get_scale())
        assert float(step.loss_scale) == scales[-1]
    assert min(scales) < loss_scale.INITIAL and any(b > a for a, b in itertools.pairwise(scales)), (
        "both ways were tried"
    )
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e38])
def test_a_batch_that_overflows_changes_nothing_but_the_scale(bad: float) -> None:
    model = network()
    step = compiled(model)
    step(batch())
    before, scale = copy.deepcopy(model.state_dict()), float(step.loss_scale)
    broken = batch()
    broken["x"][2, 3] = bad
    step(broken)
    assert not step.grad_norm.isfinite() and float(step.loss_scale) == scale / 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    losses = [float(step(batch())) for _ in range(40)]
    assert losses[-1] < losses[0] and all(p.isfinite().all() for p in model.parameters())


def test_small_gradients_survive() -> None:
    """Gradients near 1e-8 are zero in fp16; times 2**16 they are not."""

    def tiny(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return (model(data["x"]) * 1e-7).float().mean()

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    step = wholestep.compile(model, tiny, optimizer, batch(), precision="fp16", backend="interpret", cache=False)
    before = model[0].weight.detach().clone()
    step(batch())
    assert 0 < float(step.grad_norm) < 1e-6 and not torch.equal(model[0].weight, before)


def test_the_numbers_of_the_scale() -> None:
    good, bad = torch.tensor(True), torch.tensor(False)
    start = torch.tensor([1024.0, 0.0, 0.0])
    assert following(start, good).tolist() == [1024.0, 1.0, 0.0]
    assert following(start, bad).tolist() == [512.0, 0.0, 1.0]
    assert following(torch.tensor([1024.0, 1999.0, 3.0]), good).tolist() == [2048.0, 0.0, 3.0]
    assert following(torch.tensor([1024.0, 1999.0, 3.0]), bad).tolist() == [512.0, 0.0, 4.0]
    assert following(torch.tensor([loss_scale.LEAST, 0.0, 0.0]), bad)[0] == loss_scale.LEAST
    assert following(torch.tensor([loss_scale.MOST, 1999.0, 0.0]), good)[0] == loss_scale.MOST


def test_it_is_an_input_and_an_output_of_the_graph() -> None:
    graph = compiled(network()).graph
    (index,) = graph.indices(Role.SCALE)
    assert [o.target for o in graph.outputs].count(index) == 1
    assert {str(n.meta["val"].dtype) for n in graph.operations() if n.name.startswith("addmm")} == {"torch.float16"}


def test_it_is_saved_and_loaded() -> None:
    models = [network(), network()]
    steps = [compiled(m) for m in models]
    for index in range(3):
        steps[0](batch(index, HUGE if index == 1 else 1.0))
    state = steps[0].state_dict()
    skipped = state["loss_scale"]["skipped"]
    assert list(state["loss_scale"]) == list(loss_scale.KEYS)
    assert skipped >= 1 and state["loss_scale"]["scale"] == loss_scale.INITIAL / 2**skipped
    models[1].load_state_dict(models[0].state_dict())
    steps[1].subject.optimizer.load_state_dict(copy.deepcopy(steps[0].subject.optimizer.state_dict()))
    steps[1].load_state_dict(state)
    for index in range(3, 6):
        assert torch.equal(steps[0](batch(index)), steps[1](batch(index)))
    assert steps[0].state_dict() == steps[1].state_dict()
    steps[0].load_state_dict({"seed": 1, "count": 2})  # of a run in another precision


def test_the_eager_rung_scales_as_well() -> None:
    def drawing(model: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
        if float(data["x"].sum()) > 1e9:  # reads a value: cannot be captured
            return loss_fn(model, data) * 2
        return loss_fn(model, data)

    model = network()
    with pytest.warns(WholestepWarning):
        step = wholestep.compile(
            model,
            drawing,
            OPTIMIZERS["adamw"](model.parameters()),
            batch(),
            precision="fp16",
            backend="interpret",
            cache=False,
        )
        step(batch(0, HUGE))
        assert float(step.loss_scale) == 2.0**15
        losses = [float(step(batch(0))) for _ in range(20)]
    assert step.rung == "eager" and losses[-1] < losses[0]


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_micro_batches_whose_graphs_train_other_parameters(precision: str) -> None:
    """The sums are then updated by torch, from p.grad: without the scale. The check of a later graph leaves those of others."""

    def loss_of(model: nn.Module, data: dict[str, Any]) -> torch.Tensor:
        return model[data["which"]](data["x"]).float().square().mean()

    def trained(step_of: Any) -> nn.Module:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
        step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for number in range(3):
            step([{"x": batch(number + part)["x"], "which": part} for part in range(2)])
        return model

    def compiled(model: nn.Module, optimizer: Any) -> Any:
        example = [{"x": batch()["x"], "which": part} for part in range(2)]
        options: dict[str, Any] = {"precision": precision, "accumulate": 2, "backend": "interpret", "cache": False}
        return wholestep.compile(model, loss_of, optimizer, example, **options)

    def by_torch(model: nn.Module, optimizer: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

        def step(parts: list[Any]) -> None:
            optimizer.zero_grad()
            for part in parts:
                with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                    loss = loss_of(model, part) / 2
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    for ours, theirs in zip(trained(compiled).parameters(), trained(by_torch).parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_compiled_code_does_the_same() -> None:
    ours, theirs = network(), network()
    # SGD: a bias before batch norm has a gradient of noise only, and Adam would make steps of it
    compiled_step, interpreted = (
        compiled(ours, "sgd", backend="inductor", clip_norm=1.0),
        compiled(theirs, "sgd", clip_norm=1.0),
    )
    for index in range(4):
        data = batch(index, HUGE if index == 1 else 1.0)
        torch.testing.assert_close(compiled_step(data), interpreted(data), rtol=2e-3, atol=1e-4)
        assert compiled_step.loss_scale == interpreted.loss_scale
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=5e-3)


def test_what_it_cannot_do_is_named() -> None:
    model = network()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (None, {}, BadOption, "without an optimizer.*bf16"),
        (torch.optim.RAdam(model.parameters()), {}, NotBuiltYet, "update that can be captured.*bf16"),
    ]
    for optimizer, options, error, said in cases:
        with pytest.raises(error, match=said):
            wholestep.compile(model, loss_fn, optimizer, batch(), precision="fp16", **options)
    half = network().half()
    with pytest.raises(BadOption, match=r"keeps float32 weights, and 0\.weight is float16"):
        wholestep.compile(half, loss_fn, OPTIMIZERS["sgd"](half.parameters()), batch(), precision="fp16")


def test_a_scale_moves_to_the_device_it_is_used_on() -> None:
    scale = LossScale()
    assert scale.on(torch.device("cpu")) is scale.numbers
    assert scale.on(torch.device("meta")).device.type == "meta"


@pytest.mark.gpu
def test_on_a_gpu_without_waiting() -> None:
    model = network().cuda()
    data = {k: v.cuda() for k, v in batch().items()}
    step = wholestep.compile(
        model, loss_fn, OPTIMIZERS["adamw"](model.parameters()), data, precision="fp16", clip_norm=1.0, cache=False
    )
    for _ in range(3):
        step(data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(data)
        step({"x": data["x"], "y": data["y"] * HUGE})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scale = float(step.loss_scale)
    losses = [float(step(data)) for _ in range(20)]
    assert scale < loss_scale.INITIAL and losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())
