"""`wholestep.compile`: every option is honoured or refused by name, and importing the package costs nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.twins import class_batches, classify, small_mlp
from torch import nn

import wholestep
from wholestep.errors import (
    BadBatch,
    BadLoss,
    BadOption,
    BudgetTooSmall,
    UnsupportedModel,
    UnsupportedOptimizer,
    WholestepError,
    WholestepWarning,
)
from wholestep.graph.plan import Plan
from wholestep.passes.pipeline import name_of

ROOT = Path(__file__).resolve().parents[1]
BATCH = class_batches(1, size=6)[0]


def compiled(
    model: Any = None, loss_fn: Any = classify, optimizer: Any = "sgd", batch: Any = BATCH, **options: Any
) -> Any:
    model = small_mlp() if model is None else model
    if optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wholestep.compile(model, loss_fn, optimizer, batch, **{"backend": "interpret", "cache": False, **options})


REFUSED: dict[str, tuple[dict[str, Any], type[WholestepError], str]] = {
    "memory": ({"memory": "40GBs"}, BadOption, r"'40GBs' is not an amount of memory.*write it as 12GiB"),
    "too little memory": ({"memory": 100}, BudgetTooSmall, r"memory=100 B is not enough.*ask for"),
    "fp16": ({"precision": "fp16", "optimizer": None}, BadOption, r"without an optimizer.*use precision='bf16'"),
    "precision": ({"precision": "fp8"}, BadOption, r"precision='fp8'\. use one of 'fp32', 'bf16'"),
    "backend": ({"backend": "xla"}, BadOption, r"backend='xla'\. use one of 'inductor', 'interpret'"),
    "check": ({"check": "always"}, BadOption, r"check='always'\. use one of 'first', 'off'"),
    "accumulate 0": ({"accumulate": 0}, BadOption, r"accumulate=0.*1 or more"),
    "accumulate 1.5": ({"accumulate": 1.5}, BadOption, r"accumulate=1\.5"),
    "accumulate True": ({"accumulate": True}, BadOption, "accumulate=True"),
    "clip 0": ({"clip_norm": 0.0}, BadOption, r"clip_norm=0\.0.*positive number, or None"),
    "clip -1": ({"clip_norm": -1}, BadOption, "clip_norm=-1"),
    "clip nan": ({"clip_norm": float("nan")}, BadOption, "clip_norm=nan"),
    "clip text": ({"clip_norm": "1"}, BadOption, "clip_norm='1'"),
    "seed text": ({"seed": "a"}, BadOption, r"seed='a'.*whole number, or None"),
    "seed 1.5": ({"seed": 1.5}, BadOption, r"seed=1\.5"),
    "dynamic": ({"dynamic": "yes"}, BadOption, r"dynamic='yes'\. use one of None, True, False"),
    "cache": ({"cache": "no"}, BadOption, r"cache='no'\. use one of True, False"),
    "dump": ({"dump": 3}, BadOption, r"dump=3\. name a folder"),
    "dump to a file": ({"dump": __file__}, BadOption, r"test_api\.py' is a file\. name a folder"),
    "a loader": (
        {"batch": torch.utils.data.DataLoader([3])}, BadBatch, r"the example batch is a DataLoader\. give one batch: next\(iter",
    ),
    "an iterator": ({"batch": iter([3])}, BadBatch, r"the example batch is a list_iterator\. give one batch"),
    "a pass by name": ({"passes": "fold_views"}, BadOption, r"passes='fold_views'.*default_passes.*a list of functions"),
    "no function": ({"passes": [3]}, BadOption, r"passes=\[3\].*a list of functions"),
    "model": ({"model": 3, "optimizer": None}, UnsupportedModel, r"model is a int.*dict or tuple of all modules"),
    "empty dict": ({"model": {}, "optimizer": None}, UnsupportedModel, "model is a dict"),
    "function as model": ({"model": lambda x: x, "optimizer": None}, UnsupportedModel, "model is a function"),
    "loss": ({"loss_fn": 3}, BadLoss, "loss_fn is a int, not a function"),
    "no loss for several": (
        {"model": {"a": nn.Linear(1, 1)}, "loss_fn": None, "optimizer": None}, BadLoss, "needs a single module",
    ),
    "no loss in the output": (
        {"loss_fn": None, "batch": torch.randn(3, 4)}, BadLoss, r"Sequential returned no \.loss.*labels",
    ),
    "optimizer": ({"optimizer": 3}, UnsupportedOptimizer, r"optimizer is a int.*optimizer=None"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    options, error, words = REFUSED[name]
    with pytest.raises(error, match=words) as raised:
        compiled(**options)
    assert raised.value.hint, "the text ends with what to do"


def test_clipping_without_an_optimizer_is_left_to_the_caller_and_said() -> None:
    with pytest.warns(WholestepWarning, match=r"clip_norm=1e-06 is left to you.*clip p\.grad"):
        step = compiled(model := small_mlp(), optimizer=None, clip_norm=1e-6)
    step(BATCH)
    assert float(model[0].weight.grad.norm()) > 1e-3


def test_an_optimizer_with_a_foreign_parameter() -> None:
    model, other = small_mlp(), nn.Linear(2, 5)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(
        UnsupportedOptimizer, match=r"parameter 4 of optimizer group 0, shape \(5, 2\), is in none.*model=\{"
    ):
        compiled(model, optimizer=optimizer)


def test_the_default_loss_is_the_models_own() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.inner(x), labels)}

    model = WithLoss()
    expected = float(model(*BATCH)["loss"])
    step = compiled(model, None, batch={"x": BATCH[0], "labels": BATCH[1]})
    assert float(step({"x": BATCH[0], "labels": BATCH[1]})) == expected


@pytest.mark.parametrize("container", [tuple, list, lambda m: {"a": m[0], "b": m[1]}])
def test_several_modules(container: Any) -> None:
    members = [nn.Linear(4, 5), nn.Linear(5, 3)]
    model = container(members)
    optimizer = torch.optim.SGD([p for m in members for p in m.parameters()], lr=0.1)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        first, second = model.values() if isinstance(model, dict) else model
        return nn.functional.cross_entropy(second(first(batch[0])), batch[1])

    expected = float(loss_fn(model, BATCH))
    step = compiled(model, loss_fn, optimizer)
    assert float(step(BATCH)) == expected and float(step(BATCH)) < expected


def test_compile_does_not_train() -> None:
    """Neither parameters, nor optimizer state, nor buffers change before the first call."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    rng = torch.get_rng_state()
    step = compiled(model, optimizer=optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not optimizer.state and step.count == 0
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


def test_the_first_step_is_checked_by_default_and_may_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def note(*args: Any) -> None:
        seen.append(1)

    monkeypatch.setattr("wholestep.api.check_first_step", note)
    step = compiled()
    assert seen == []
    step(BATCH), step(BATCH)
    assert seen == [1]
    compiled(check="off")(BATCH)
    assert seen == [1]


def test_progress_is_on_stderr_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    compiled(verbose=True)
    shown = capsys.readouterr()
    assert "capturing the step" in shown.err and "whole step" in shown.err and shown.out == ""
    compiled(verbose=False)
    shown = capsys.readouterr()
    assert shown.err == "" and shown.out == ""


def test_public_names() -> None:
    for name in wholestep.__all__:
        assert getattr(wholestep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        wholestep.nothing  # noqa: B018


def test_import_is_quick_and_brings_no_torch() -> None:
    program = "import sys, wholestep; assert 'torch' not in sys.modules; print(wholestep.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_example_batches_of_every_form_with_accumulation() -> None:
    """A micro-batch, a list of them, or a batch to be cut."""
    micro = tuple(t[:1] for t in BATCH)
    for example in (micro, [tuple(t[i : i + 3] for t in BATCH) for i in (0, 3)], BATCH):
        step = compiled(accumulate=2, batch=example)
        step(BATCH)
        assert step.rung == "whole step"


def test_another_number_of_micro_batches_is_refused() -> None:
    micro = tuple(t[:1] for t in BATCH)
    step = compiled(accumulate=2, batch=[micro, micro])
    with pytest.raises(
        BadBatch, match=r"^3 micro-batches, and accumulate=2\. give 2 of them, or one batch to be cut\.$"
    ):
        step([micro] * 3)


@pytest.mark.parametrize("steps", [-1, 2.0, "3", True])
def test_a_number_of_steps_to_verify_that_is_none_is_refused(steps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(BadOption, match=rf"^steps={steps!r}\. use a whole number of steps, 0 or more\.$"):
        wholestep.verify(model, lambda m, b: m(b).sum(), optimizer, torch.ones(2, 3), steps=steps)


def test_dump_writes_one_numbered_file_per_stage(tmp_path: Path) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wholestep.compile(
        model, lambda m, b: m(b).sum(), optimizer, torch.ones(2, 3), backend="interpret", dump=str(tmp_path / "graphs")
    )
    files = sorted((tmp_path / "graphs").iterdir())
    passes = [name_of(one) for one in wholestep.default_passes().bound(Plan())]
    stages = ["captured", *passes, "lowered"]
    assert [f.name for f in files] == [f"{number:02d}_{stage}.py" for number, stage in enumerate(stages)]
    for number, (file, maker) in enumerate(zip(files, ("capture", *passes, "lower_interpret"), strict=True)):
        text = file.read_text("utf-8")
        assert text.startswith(f"# Stage {number:02d}: ") and f"Made by {maker} in " in text
