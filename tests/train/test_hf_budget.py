"""wholestep.hf.Trainer with a memory budget, and with the loss scale that accelerate keeps in fp16."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.train.test_hf import gpt2, logged, make, sentences  # noqa: E402

import wholestep  # noqa: E402
from wholestep.errors import BudgetTooSmall, WholestepWarning  # noqa: E402


def trained(folder: Path, **options: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, max_steps=3, learning_rate=1e-2, logging_steps=1, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row["input_ids"] % 16, "labels": row["labels"] % 16} for row in sentences()]
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    trainer = wholestep.hf.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=args,
        train_dataset=rows,
        wholestep={"backend": "interpret", **options},
    )
    trainer.train()
    return trainer


@pytest.mark.slow
def test_a_budget_and_a_plan_go_through(tmp_path: Path) -> None:
    with pytest.raises(BudgetTooSmall) as refused, pytest.warns(WholestepWarning, match="comes on top"):
        trained(tmp_path / "a", memory="1KiB")
    within = trained(tmp_path / "b", memory=refused.value.smallest_bytes)
    assert within.step.plan.recompute and within.step.plan.budget_bytes == refused.value.smallest_bytes
    planned = trained(tmp_path / "c", plan=within.step.plan)
    assert planned.step.plan == within.step.plan
    free = trained(tmp_path / "d")
    assert not free.step.plan.recompute and logged(free, "loss") == logged(within, "loss") == logged(planned, "loss")


@pytest.mark.parametrize("scale", [2.0**10, 2.0**127], ids=["usual", "overflows"])
def test_the_scale_of_accelerate_is_an_input(tmp_path: Path, scale: float) -> None:
    """Its GradScaler unscales, skips and changes the scale as it does for the stock Trainer; in float32, on a CPU."""
    both = []
    for kind in (wholestep.hf.Trainer, transformers.Trainer):
        trainer = make(kind, tmp_path / kind.__module__, gpt2(), sentences(), gradient_accumulation_steps=2)
        trainer.accelerator.scaler = torch.amp.GradScaler(
            "cpu", init_scale=scale, growth_interval=2, backoff_factor=2.0**-8
        )
        trainer.train()
        both.append(trainer)
    ours, stock = both
    assert ours.step.rung == "whole step" and ours.step.captures == 1, ours.step.explain()
    assert ours.accelerator.scaler.get_scale() == stock.accelerator.scaler.get_scale() != scale
    losses = logged(ours, "loss"), logged(stock, "loss")
    torch.testing.assert_close(*losses, rtol=2e-5, atol=2e-5)
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
def test_fp16_on_a_gpu_trains_as_the_stock_trainer_does(tmp_path: Path) -> None:
    """In a process that sees one GPU."""
    text = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
import torch, transformers, wholestep
from tests.train.test_hf import gpt2, logged, make, sentences
found = []
for kind in (wholestep.hf.Trainer, transformers.Trainer):
    trainer = make(kind, Path({str(tmp_path)!r}) / kind.__module__, gpt2(), sentences(), use_cpu=False, fp16=True)
    trainer.train()
    found.append((logged(trainer, "loss"), trainer.accelerator.scaler.get_scale()))
torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-2)
assert found[0][1] == found[1][1], found
"""
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
