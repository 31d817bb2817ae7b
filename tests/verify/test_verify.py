"""wholestep.verify on steps that are right: equal bits on `interpret`, the rule on `inductor`, nothing left behind."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.verify.small_models import Attention, Mlp, Normed, batches, everything, loss_fn
from torch import nn

import wholestep
from wholestep.errors import BadBatch, BadOption


@pytest.mark.parametrize("build", [Mlp, Normed, Attention])
def test_sgd_on_interpret_is_eager_bit_for_bit(build: type[nn.Module]) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.1)
    report = wholestep.verify(
        model, loss_fn, optimizer, batches(2), steps=3, edge_batches=batches(1, rows=3), backend="interpret"
    )
    assert report.ok and report.bitwise, str(report)
    assert report.rung == "whole step" and report.first_departure is None and not report.falls
    assert {row.step for row in report.rows} == {"0", "1", "2", "edge 0", "eval"}
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"loss", "aux", "gradient", "parameter", "state"} and ("buffer" in kinds) == (build is Normed)
    gradients = {row.name for row in report.rows if row.kind == "gradient"}
    assert gradients == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("update", ["adamw", "none", "uncaptured"])
def test_other_ways_to_update(update: str, accumulate: int) -> None:
    model = Normed()
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True),
        "none": lambda: None,
        "uncaptured": lambda: torch.optim.RAdam(model.parameters(), lr=1e-2),
    }[update]()
    report = wholestep.verify(
        model, loss_fn, optimizer, batches(3), steps=3, clip_norm=0.5, accumulate=accumulate, backend="interpret"
    )
    assert report.ok and report.bitwise, str(report)
    assert any(row.kind == "parameter" for row in report.rows) == (update == "adamw")


def test_weighted_accumulation_divides_by_the_summed_weight() -> None:
    def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        valid = batch["y"] > 0
        labels = batch["y"].masked_fill(~valid, -100)
        return F.cross_entropy(model(batch["x"]), labels), {"weight": valid.sum()}

    model = Mlp()
    report = wholestep.verify(
        model, weighted, torch.optim.SGD(model.parameters(), lr=0.1), batches(2), steps=2, accumulate=3,
        backend="interpret",
    )  # fmt: skip
    assert report.ok and report.bitwise, str(report)


def test_bf16_autocast_is_measured_in_its_own_rounding() -> None:
    model = Mlp()
    report = wholestep.verify(
        model, loss_fn, torch.optim.AdamW(model.parameters()), batches(2), steps=2, precision="bf16",
        backend="interpret",
    )  # fmt: skip
    assert report.ok, str(report)
    row = next(row for row in report.rows if row.kind == "gradient")
    assert row.tolerance > 1e-4


def test_the_compiled_step_keeps_the_rule() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 4))
    report = wholestep.verify(
        model, loss_fn, torch.optim.AdamW(model.parameters()), batches(2), steps=2, eval_too=False, clip_norm=1.0
    )
    assert report.ok, str(report)
    assert report.backend == "inductor" and not report.bitwise


@pytest.mark.parametrize("started", [False, True])
def test_nothing_of_the_users_is_changed(started: bool) -> None:
    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if started:
        loss_fn(model, batches(1)[0])[0].backward()
        optimizer.step()
    model.norm.eval()
    given = batches(2)
    kept, python, numpy = everything(model, optimizer), random.getstate(), np.random.get_state()[1].copy()
    tensors = [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()]
    report = wholestep.verify(model, loss_fn, optimizer, given, steps=2, backend="interpret")
    assert report.ok, str(report)
    now = everything(model, optimizer)
    assert list(now) == list(kept)
    for name, value in kept.items():
        same = torch.equal(value, now[name]) if isinstance(value, torch.Tensor) else value == now[name]
        assert same, name
    assert tensors == [id(p) for p in model.parameters()] + [id(b) for b in model.buffers()]
    assert random.getstate() == python and (np.random.get_state()[1] == numpy).all()
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(given, batches(2)))


def test_an_error_of_the_users_is_theirs_and_leaves_nothing_behind() -> None:
    def broken(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("no loss today")

    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = everything(model, optimizer)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="no loss today"):
        warnings.simplefilter("ignore")
        wholestep.verify(model, broken, optimizer, batches(1), backend="interpret")
    now = everything(model, optimizer)
    assert all(torch.equal(v, now[n]) if isinstance(v, torch.Tensor) else v == now[n] for n, v in kept.items())


def test_a_model_bound_to_float32_has_no_float64_reference() -> None:
    class Bound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)
            self.mix = nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x).to(torch.float32) @ self.mix

    model = Bound()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = wholestep.verify(model, loss_fn, optimizer, batches(1), steps=1, backend="interpret", eval_too=False)
    assert report.ok and report.bitwise, str(report)
    assert any("no float64 reference" in note for note in report.notes)


def test_the_report_reads_as_text_and_as_json() -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = wholestep.verify(model, loss_fn, optimizer, batches(1)[0], steps=1, backend="interpret", eval_too=False)
    facts = json.loads(report.to_json())
    assert facts["ok"] and facts["bitwise"] and len(facts["rows"]) == len(report.rows) == 15
    assert "equal to eager bit for bit: 15 values over 1 step" in str(report)


def test_bad_requests_are_named() -> None:
    model = Mlp()
    with pytest.raises(BadOption, match="backend='fast'"):
        wholestep.verify(model, loss_fn, None, batches(1), backend="fast")
    with pytest.raises(BadBatch, match="no batch"):
        wholestep.verify(model, loss_fn, None, [], backend="interpret")


@pytest.mark.parametrize(("off", "ok"), [(3e-5, True), (3e-5j, False)])
def test_the_norm_of_clipping_may_round_as_torchs_does(off: complex, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 sum over all gradients in their order is off by some 1e-5, here by as much on any CPU; a factor that is off while
    the norm is right is no rounding."""
    clip = torch.nn.utils.clip_grad_norm_

    def rounded(parameters: Any, limit: float) -> torch.Tensor:
        total = clip(parameters, limit)
        for parameter in parameters:
            parameter.grad *= 1 - abs(off)
        return total * (1 + off.real)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", rounded)
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    sch = wholestep.schedule(model)
    sch["0"].shard("weight", 0)
    report = wholestep.verify(
        model, lambda model, batch: model(batch).square().mean(), torch.optim.AdamW(model.parameters()), batch, recipe=sch,
        mesh=wholestep.Mesh(tp=2), clip_norm=1e-3, steps=1, backend="interpret",
    )  # fmt: skip
    assert report.ok is ok, str(report)
