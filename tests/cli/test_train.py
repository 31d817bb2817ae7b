"""`wholestep train` and `wholestep explain`: runs through the command line, stopped, resumed, killed."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.calls import Call, program

from wholestep.train.checkpoint_hashes import write_hashes
from wholestep.train.metrics import read_rows
from wholestep.train.run_folder import open_run

OWN = ("train", "own_training:setup", "--backend", "interpret")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return program(tmp_path, monkeypatch)


def state(run: str | Path, number: int) -> dict[str, torch.Tensor]:
    path = Path(run) / "checkpoints" / f"step-{number:06d}"
    return {
        f"{name}/{k}": v for name in ("model", "optimizer") for k, v in load_file(path / f"{name}.safetensors").items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "wholestep", *arguments], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


# ---- what a run shows ----


def test_a_run_tells_what_it_did_in_few_lines_and_its_next_commands_work(call: Call, in_folder: Path) -> None:
    done = call(*OWN, "--steps", "30", "--set", "width=4")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert len(lines) <= 25 and any(line.startswith("step  1/30  loss") for line in lines)
    assert "loss      " in done.out and "->" in done.out and "samples/s" in done.out
    folder = in_folder / "runs" / "own_training-setup"
    assert (folder / "loss.svg").read_text().startswith("<svg")
    shown = [line[10:] for line in lines if line[10:].startswith("wholestep ")]
    assert len(shown) == 3
    for command in shown:
        words = shlex.split(command)[1:]
        again = call(*words, *(("--backend", "interpret") if words[0] == "verify" else ()))
        assert again.code == 0, again.err
    assert open_run(folder).facts["result"]["steps"] == 60


def test_json_is_all_that_stdout_holds(call: Call) -> None:
    done = call(*OWN, "--steps", "3", "--json")
    facts = json.loads(done.out)
    assert facts["status"] == "finished" and facts["steps"] == 3 and facts["final_loss"] > 0 and "compil" in done.err


def test_quiet_is_one_line(call: Call) -> None:
    done = call(*OWN, "--steps", "3", "--quiet")
    assert done.code == 0 and len(done.out.splitlines()) == 1 and done.err == ""


def test_a_small_gpt_writes_a_sample(call: Call, in_folder: Path) -> None:
    sizes = ("--set", "width=16", "--set", "layers=1", "--set", "tokenizer=bytes", "--batch", "2", "--seq", "16")
    done = call("train", *sizes, "--steps", "4", "--backend", "interpret")
    assert done.code == 0 and "held out" in done.out and "\nsample    " in done.out, done.err
    assert (in_folder / "runs" / "gpt-1m-shakespeare" / "sample.txt").read_text().strip()


# ---- resuming ----


def test_five_and_five_are_ten_bit_for_bit(call: Call) -> None:
    assert call(*OWN, "--steps", "10", "--out", "whole").code == 0
    assert call(*OWN, "--steps", "5", "--out", "parts").code == 0
    done = call("train", "--resume", "--out", "parts", "--steps", "10")
    assert done.code == 0 and "resumed after step 5" in done.out, done.err
    assert same(state("whole", 10), state("parts", 10))


def test_resume_takes_the_newest_run_and_numbers_new_ones(call: Call, in_folder: Path) -> None:
    for _ in range(2):
        assert call(*OWN, "--steps", "2").code == 0
    newest = in_folder / "runs" / "own_training-setup-2"
    assert call("train", "--resume", "--steps", "4").code == 0
    assert (newest / "checkpoints" / "step-000004").is_dir()
    assert call("train", "own_training:setup", "--resume", "--steps", "6").code == 0
    assert (newest / "checkpoints" / "step-000006").is_dir()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "lr=0.5"), "config.lr"),
        (("--seed", "7"), "seed=0, asked for now is seed=7"),
        (("--precision", "bf16"), "precision='fp32', asked for now is precision='bf16'"),
        (("--backend", "inductor"), "backend='interpret', asked for now is backend='inductor'"),
        (("--steps", "1"), "steps=2, asked for now is steps=1"),
    ],
)
def test_changed_settings_are_named(call: Call, arguments: tuple[str, ...], said: str) -> None:
    assert call(*OWN, "--steps", "2", "--out", "a").code == 0
    done = call("train", "--resume", "--out", "a", *arguments)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1, done.err


def test_an_out_that_holds_a_run_is_refused(call: Call) -> None:
    assert call(*OWN, "--steps", "1", "--out", "a").code == 0
    done = call(*OWN, "--steps", "1", "--out", "a")
    assert done.code == 2 and "already holds a run" in done.err


def damage(path: Path, how: str) -> None:
    facts = path / "checkpoint.json"
    if how == "truncated":
        (path / "model.safetensors").write_bytes(b"x" * 50)
    else:
        change: dict[str, Any] = {"version": 99} if how == "newer" else {"format": "somebody else's"}
        facts.write_text(json.dumps(json.loads(facts.read_text()) | change))
        write_hashes(path, [p.name for p in path.iterdir() if p.name != "checkpoint.sha256"])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "has 50 bytes instead of"),
        ("newer", "update Wholestep"),
        ("foreign", "was not written by wholestep.save"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_told(call: Call, how: str, said: str) -> None:
    assert call(*OWN, "--steps", "2", "--out", "a").code == 0
    damage(Path("a/checkpoints/step-000002"), how)
    done = call("train", "--resume", "--out", "a", "--steps", "4")
    assert done.code == 2 and said in done.err and "Traceback" not in done.err


def test_a_checkpoint_with_eight_other_bytes_is_not_trained_on(call: Call) -> None:
    assert call(*OWN, "--steps", "4", "--out", "a", "--save-every", "2").code == 0
    weights = Path("a/checkpoints/step-000004/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-8] + b"8 others")
    done = call("train", "--resume", "--out", "a", "--steps", "6")
    assert done.code == 2 and "step-000004 is damaged: model.safetensors is not what was saved" in done.err
    assert len(done.err.splitlines()) == 1 and not Path("a/checkpoints/step-000006").exists()
    taken = re.search("`(wholestep .*)`", done.err)
    assert taken is not None
    done = call(*shlex.split(taken[1])[1:], "--steps", "6")
    assert done.code == 0 and "resumed after step 2" in done.out and done.err == "", done.err
    assert call(*OWN, "--steps", "6", "--out", "whole").code == 0
    assert same(state("a", 6), state("whole", 6))


def test_one_damaged_run_is_passed_over_by_resume_and_told_by_explain(call: Call) -> None:
    for name in ("first", "second"):
        assert call(*OWN, "--steps", "2", "--out", f"runs/{name}").code == 0
    Path("runs/second/run.json").write_bytes(b"[" * 100_000)
    done = call("train", "--resume", "--steps", "4")
    assert done.code == 0 and "resumed after step 2" in done.out
    said = "runs/second/run.json cannot be read: its values are nested too deeply"
    assert done.err == f"wholestep: note: {said}; this run is passed over\n"
    for again in (("explain", "runs/second"), ("train", "--resume", "--out", "runs/second")):
        done = call(*again)
        assert done.code == 2 and done.err == f"wholestep: {said}. there are runs/first.\n"


@pytest.mark.parametrize("entry", ["settings", "request", "compile", "result", "device", "versions"])
@pytest.mark.parametrize(
    "value", [3, {}, {"model": [], "family": 7, "sets": 5, "data": {}, "falls": 3, "seconds": "x"}]
)
def test_a_run_whose_entries_are_of_other_kinds_is_at_most_one_line(call: Call, entry: str, value: Any) -> None:
    assert call(*OWN, "--steps", "1", "--out", "a").code == 0
    facts = json.loads(Path("a/run.json").read_text())
    Path("a/run.json").write_text(json.dumps(facts | {entry: value}))
    for command in (("explain", "a"), ("explain", "a", "--json"), ("train", "--resume", "--out", "a", "--steps", "1")):
        done = call(*command)
        assert done.code in (0, 2) and len(done.err.splitlines()) == (done.code == 2), done.err
        assert "of Wholestep's own" not in done.err


# ---- trouble ----


def test_a_loss_that_is_not_finite_is_exit_1_with_what_to_try(call: Call) -> None:
    done = call(*OWN, "--steps", "8", "--out", "a", "--set", "bad=12")
    assert done.code == 1 and len(done.err.splitlines()) == 1, done.err
    assert "step 3" in done.err and "--nonfinite skip" in done.err and "lr=" in done.err
    assert open_run(Path("a")).facts["status"] == "nonfinite"


def test_skipping_it_goes_on_and_counts(call: Call) -> None:
    done = call(*OWN, "--steps", "12", "--out", "a", "--set", "bad=12", "--nonfinite", "skip")
    assert done.code == 0 and "skipped   2 of 12 steps" in done.out and "step 3 is skipped" in done.out, done.err
    assert all(t.isfinite().all() for t in state("a", 12).values())


def test_a_full_disk_while_training_names_the_last_good_checkpoint(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from wholestep.train import checkpoint_files

    kept = checkpoint_files.save_tensors

    def fills_up(tensors: Any, path: Path, *rest: Any) -> None:
        if "step-000004" in str(path):
            raise OSError(28, "No space left on device")
        kept(tensors, path, *rest)

    monkeypatch.setattr(checkpoint_files, "save_tensors", fills_up)
    done = call(*OWN, "--steps", "6", "--out", "a", "--save-every", "2", "--quiet")
    assert done.code == 2 and "No space left on device" in done.err and "step-000002 is complete and kept" in done.err
    assert len(done.err.splitlines()) == 1


def test_an_error_of_the_users_code_is_one_line_with_its_place(call: Call) -> None:
    done = call("train", "own_training:narrow", "--backend", "interpret", "--steps", "2", "--out", "a")
    assert done.code == 2 and not Path("a").exists()
    assert done.err == (
        "wholestep: RuntimeError: mat1 and mat2 shapes cannot be multiplied (5x3 and 4x8) (at own_training.py:13)\n"
    )


def test_one_of_several_processes_trains_nothing(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = call(*OWN, "--steps", "2", "--out", "a")
    assert done.code == 2 and not Path("a").exists() and done.out == ""
    assert done.err == (
        "wholestep: this process is one of 2 (WORLD_SIZE=2, and torch.distributed is not initialised): a captured step would train "
        "each replica alone. the distributed engine is not built yet; start one process, use torch's own loop, or optimizer=None "
        "and reduce p.grad yourself.\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert call(*OWN, "--steps", "2", "--out", "a").code == 0


# ---- signals and kills ----


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    began = time.monotonic()
    while not list((run / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < 120, "no checkpoint after two minutes"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_saves_and_says_how_to_go_on(call: Call, in_folder: Path, number: int, code: int) -> None:
    process = start(in_folder, *OWN, "--steps", "100000", "--out", "a", "--save-every", "5")
    wait_for_checkpoint(process, in_folder / "a")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    assert "go on with: wholestep train --resume --out a" in err and "Traceback" not in err
    facts = open_run(in_folder / "a").facts
    stopped = facts["result"]["steps"]
    assert facts["status"] == "interrupted" and state("a", stopped)
    assert [row["step"] for row in read_rows(in_folder / "a" / "metrics.jsonl") if "loss" in row] == list(
        range(1, stopped + 1)
    )
    edit_steps(in_folder / "a", stopped + 3)
    assert call("train", "--resume", "--out", "a").code == 0
    assert call(*OWN, "--steps", str(stopped + 3), "--out", "b").code == 0
    assert same(state("a", stopped + 3), state("b", stopped + 3))


def edit_steps(run: Path, steps: int) -> None:
    """As if it had been asked for that many: 100,000 would take a while."""
    facts = json.loads((run / "run.json").read_text())
    facts["settings"]["steps"] = facts["request"]["steps"] = steps
    (run / "run.json").write_text(json.dumps(facts))


@pytest.mark.slow
def test_killed_thirty_times_at_any_moment_it_always_resumes_bit_for_bit(call: Call, in_folder: Path) -> None:
    """SIGKILL while importing, compiling, training, saving. Every round goes on, and the end is that of a run never touched."""
    steps, chance, kills, rounds = 4000, random.Random(11), 0, 0
    assert call(*OWN, "--steps", str(steps), "--out", "whole", "--save-every", "500", "--quiet").code == 0
    wanted = state("whole", steps)
    while kills < 30:
        run = in_folder / f"killed-{rounds}"
        rounds += 1
        while True:
            again = ("train", "--resume") if run.exists() else (*OWN, "--steps", str(steps), "--save-every", "7")
            process = start(in_folder, *again, "--out", run.name, "--quiet")
            try:
                out, err = process.communicate(timeout=chance.uniform(0.5, 9.0) if kills < 30 else None)
                assert process.returncode == 0, out + err
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
            if run.exists():
                assert open_run(run).facts["format"] == "wholestep run"
        assert same(state(run, steps), wanted)
        rows = [row["step"] for row in read_rows(run / "metrics.jsonl") if "loss" in row]
        assert rows == list(range(1, steps + 1))


# ---- explain ----


def test_explain_tells_a_run_in_a_page(call: Call) -> None:
    assert call(*OWN, "--steps", "6", "--out", "a").code == 0
    for path in ("a", "a/run.json", "a/checkpoints", "a/checkpoints/step-000006"):
        done = call("explain", path)
        assert done.code == 0, done.err
        lines = done.out.splitlines()
        assert len(lines) <= 25 and "6 of 6" in done.out and "whole step" in done.out and "step-000006" in done.out
    facts = json.loads(call("explain", "a", "--json").out)
    assert (
        facts["status"] == "finished"
        and len(facts["losses"]) == 6
        and facts["settings"]["model"] == "own_training:setup"
    )


def test_explain_tells_an_interrupted_run_how_to_go_on(call: Call) -> None:
    assert call(*OWN, "--steps", "2", "--out", "a").code == 0
    open_run(Path("a")).update(status="interrupted")
    assert "wholestep train --resume --out a" in call("explain", "a").out


def test_explain_tells_a_checkpoint_of_a_loop_of_ones_own(call: Call) -> None:
    import wholestep

    wholestep.save("mine", model=torch.nn.Linear(2, 2), step=7, config={"lr": 0.1})
    done = call("explain", "mine/step-000007")
    assert done.code == 0 and "after 7 steps" in done.out and "'lr': 0.1" in done.out
    assert call("explain", "mine").code == 2, "a folder of checkpoints is no run"
