"""--precision fp16: trained with steps that the loss scale leaves out, verified, profiled and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.calls import Call, program
from tests.cli.test_memory import QUICK, TINY

from wholestep.capture import loss_scale

FP16 = ["--precision", "fp16"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_overflows_are_counted_and_do_not_stop_the_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "INITIAL", 2.0**22)
    done = call("train", *TINY, *QUICK, *FP16, "--steps", "16", "--out", "run")
    assert done.code == 0, done.out + done.err
    rows = [json.loads(line) for line in Path("run", "metrics.jsonl").read_text().splitlines()]
    left_out = [row["step"] for row in rows if row.get("by_loss_scale")]
    assert left_out and left_out == list(range(1, len(left_out) + 1)) and len(left_out) < 16
    words = f"{len(left_out)} step{'s' if len(left_out) > 1 else ''} skipped by loss scaling"
    assert words in done.out and words in call("explain", "run").out
    again = call("train", "--resume", "--out", "run", "--steps", "18")
    assert again.code == 0 and words in again.out, "the scale is in the checkpoint, and the count in the run"
    assert json.loads(call("explain", "run", "--json").out)["skipped"] == 0


def test_gradients_that_are_never_finite_stop_the_run(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is finite and its gradient is not: after 30 halvings it cannot be the scale."""
    program(tmp_path, monkeypatch)
    with open("own_training.py", "a", encoding="utf-8") as file:
        file.write("""
def steep():
    model, _, optimizer, loader = setup()
    return model, lambda m, b: (m(b).mean() * 0.0).abs().sqrt(), optimizer, loader
""")
    done = call("train", "own_training:steep", *QUICK, *FP16, "--steps", "60", "--out", "run", "--quiet")
    assert done.code == 1 and "not finite at step 31" in done.err, done.err
    assert "30 steps skipped by loss scaling" in call("explain", "run").out


def test_a_loss_that_is_not_finite_stops_at_once(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch)
    done = call(
        "train", "own_training:setup", "--set", "bad=7", *QUICK, *FP16, "--steps", "8", "--out", "run", "--quiet"
    )
    assert done.code == 1 and "not finite at step 2" in done.err, done.err


@pytest.mark.slow
def test_verify_and_profile(call: Call) -> None:
    done = call("verify", *TINY, *QUICK, *FP16, "--steps", "1", "--json")
    assert done.code == 0, done.out + done.err
    profiled = call("profile", *TINY, *QUICK, *FP16, "--steps", "2", "--out", "page.html", "--json")
    assert profiled.code == 0 and json.loads(profiled.out)["verified"]["ok"], profiled.err


def test_plan_and_train_with_it(call: Call) -> None:
    asked = ["plan", *TINY, *FP16, "--device", "24GiB", "--no-check-batch", "--out", "p.toml"]
    assert call(*asked).code == 0
    assert call("train", *TINY, *QUICK, *FP16, "--steps", "2", "--plan", "p.toml", "--quiet").code == 0
    other = call("train", *TINY, *QUICK, "--precision", "bf16", "--steps", "2", "--plan", "p.toml")
    assert other.code == 2 and "precision: made for fp16, now bf16" in other.err


def test_micro_batches(call: Call) -> None:
    done = call("train", *TINY, *QUICK, *FP16, "--batch", "4", "--set", "accumulate=2", "--steps", "2", "--out", "run")
    assert done.code == 0 and "fp16" in (Path("run") / "explain.txt").read_text(), done.err
