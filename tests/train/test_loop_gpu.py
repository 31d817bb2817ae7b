"""The training loop on a GPU: it never waits for the device between saves, and resuming is exact there too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.train.tiny_jobs import tiny_job

from wholestep.train.loop import Outcome, train
from wholestep.train.metrics import LossWatch, read_rows

pytestmark = pytest.mark.gpu


def run(out: Path, *, resume: bool = False, backend: str = "interpret", **job: Any) -> Outcome:
    made = tiny_job(device="cuda", **job)
    return train(made, out=out, resume=resume, backend=backend, save_every=1000)


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_no_step_waits_for_the_device(tmp_path: Path, backend: str) -> None:
    """torch raises on every call that waits, from step 30 (what is measured, is measured by then) to the last but one."""

    def watched(number: int, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.cuda.set_sync_debug_mode("error" if 30 <= number < 78 else "default")
        return batch

    try:
        outcome = run(tmp_path / "a", steps=80, spoil=watched, held_out=(), backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome.steps == 80 and outcome.final_loss is not None and outcome.first_loss is not None
    assert [row["step"] for row in read_rows(tmp_path / "a" / "metrics.jsonl") if "loss" in row] == list(range(1, 81))


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_five_steps_and_five_more_are_ten_bit_for_bit(tmp_path: Path, backend: str) -> None:
    run(tmp_path / "whole", steps=10, backend=backend)
    run(tmp_path / "parts", steps=5, backend=backend)
    run(tmp_path / "parts", steps=10, backend=backend, resume=True)
    a, b = (
        load_file(tmp_path / name / "checkpoints" / "step-000010" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_values_arrive_in_order_and_only_when_they_are_there() -> None:
    watch = LossWatch(torch.device("cuda"))
    torch.cuda._sleep(2_000_000_000)  # about a second of work in front
    for step in range(1, 5):
        watch.push(step, torch.full((), float(step), device="cuda"), None, 0.1)
    assert watch.ready() == []
    assert [(one.step, one.loss) for one in watch.ready(wait=True)] == [(step, float(step)) for step in range(1, 5)]
    assert watch.ready() == [] and len(watch.free) == 4
