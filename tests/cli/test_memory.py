"""--memory and --plan on the command line: kept, remembered, shown, and one line where they cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.calls import Call

TINY = [
    "gpt-1m", "--set", "layers=1", "--set", "width=32", "--set", "heads=2", "--set", "tokenizer=bytes", "--batch", "3", "--seq",
    "17",
]  # fmt: skip
QUICK = ["--backend", "interpret"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def smallest(call: Call, *command: str) -> str:
    """The budget that the error asks for, as it is printed."""
    done = call(*command, "--memory", "64KiB")
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done.err
    found = re.search(r"ask for ([\d.]+) (KiB|MiB)", done.err)
    assert found is not None, done.err
    return found[1] + found[2]


def losses(out: str) -> list[float]:
    rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_train_keeps_to_it_and_resume_remembers_it(call: Call) -> None:
    command = ["train", *TINY, *QUICK, "--steps", "3"]
    least = smallest(call, *command, "--out", "refused")
    assert not Path("refused").exists(), "nothing is left behind"
    done = call(*command, "--out", "within", "--memory", least)
    assert done.code == 0, done.err
    assert "recomputed in the backward pass" in done.out and f"--memory {least}" in done.out, done.out
    assert json.loads(Path("within", "run.json").read_text())["request"]["memory"] == least
    assert call(*command, "--out", "free", "--quiet").code == 0
    assert losses("within") == losses("free")
    Path("within", "explain.txt").unlink()
    again = call("train", "--resume", "--out", "within", "--steps", "4")
    assert again.code == 0 and "recomputed in the backward pass" in again.out, again.out + again.err
    assert "memory: " in call("explain", "within").out


def test_what_is_given_on_resume_replaces_what_was(call: Call) -> None:
    asked = ["plan", *TINY, "--precision", "fp32", "--device", "24GiB", "--no-check-batch", "--out", "p.toml"]
    assert call(*asked).code == 0
    assert call("train", *TINY, *QUICK, "--steps", "2", "--out", "run", "--plan", "p.toml", "--quiet").code == 0
    again = call("train", "--resume", "--out", "run", "--steps", "3", "--memory", "1GiB")
    assert again.code == 0 and "memory: 1.0 GiB" in again.out, again.out + again.err


def test_verify_within_it(call: Call) -> None:
    command = ["verify", *TINY, *QUICK, "--steps", "1"]
    done = call(*command, "--memory", smallest(call, *command))
    assert done.code == 0 and "recomputed in the backward pass" in done.out, done.out + done.err


def test_profile_draws_it(call: Call) -> None:
    command = ["profile", *TINY, *QUICK, "--steps", "2", "--out", "page.html"]
    done = call(*command, "--memory", smallest(call, *command), "--json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["budget_bytes"] > 0 and facts["verified"]["ok"]
    assert facts["memory"]["peak_bytes"] - facts["memory"]["at_peak"]["other"] <= facts["budget_bytes"]
    assert 'class="budget"' in Path("page.html").read_text()
    assert any(note.startswith("memory: ") for note in facts["notes"])


def test_show_planned(call: Call) -> None:
    command = ["show", *TINY, "--stage", "planned"]
    free, within = call(*command), call(*command, "--memory", smallest(call, *command))
    assert free.code == 0 and within.code == 0, within.err
    assert len(within.out.splitlines()) > len(free.out.splitlines()), "values are recomputed"
    prepared = call("show", *TINY, "--stage", "prepared")
    assert prepared.code == 0 and prepared.out != free.out, "updates are early in the planned graph"
    asked = ["plan", *TINY, "--precision", "fp32", "--device", "24GiB", "--no-check-batch", "--out", "p.toml"]
    assert call(*asked).code == 0
    assert call(*command, "--plan", "p.toml").code == 0
    other = call("show", *TINY, "--batch", "4", "--stage", "planned", "--plan", "p.toml")
    assert other.code == 2 and "batch: made for 3, now 4" in other.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("show gpt-1m --memory 1GiB", "use --stage planned or lowered"),
        ("show gpt-1m --stage prepared --plan p.toml", "use --stage planned or lowered"),
        ("show gpt-1m --stage planned --plan p.toml", "there is no plan"),
        ("train --memory 1GiB --plan p.toml", "give one of them"),
        ("verify gpt-1m --memory 1GiB --plan p.toml", "give one of them"),
        ("profile gpt-1m --memory 12GBs", "12GBs"),
        ("profile gpt-1m --memory 1GiB --system eager", "--system eager"),
    ],
)
def test_bad_input_is_one_line(call: Call, arguments: str, said: str) -> None:
    done = call(*arguments.split())
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err


@pytest.mark.parametrize("command", ["train", "verify gpt-1m", "profile gpt-1m", "show gpt-1m --stage planned"])
def test_auto_without_a_gpu_is_one_line(call: Call, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = call(*command.split(), "--memory", "auto")
    assert done.code == 2 and "there is no GPU here" in done.err and len(done.err.strip().splitlines()) == 1, done.err
