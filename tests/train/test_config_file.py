"""run.toml: what a run was asked for, as resolved; the same losses again; the command line wins; bad keys are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.calls import SETUP, Call, caller
from tests.forked import run_in_fork

from wholestep.errors import BadOption
from wholestep.train import request
from wholestep.train.config_file import CONFIG, config_text, read_config, resolved, set_text
from wholestep.train.job import make_job
from wholestep.train.running import Run
from wholestep.train.wishes import parse

KINDS = {name: request.KINDS.get(name, str) for name in request.ASKED}
SMALL = (
    "gpt-1m", "--set", "width=16", "--set", "layers=2", "--set", "heads=2", "--set", "dropout=0.1", "--batch", "2",
    "--seq", "16", "--steps", "4", "--set", "tokenizer=bytes",
)  # fmt: skip


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Run, "_sample", lambda run: None)  # not what is looked at here, and most of the time
    return caller(capsys, monkeypatch)


def losses(folder: str) -> list[float]:
    rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [row.get("loss", row.get("held_out_loss")) for row in rows]


def trains_the_same_again(folder: Path, threads: str, *words: str) -> None:
    """Trains twice, each time in a process of its own: as told, and from the run.toml of the first."""
    program = f"import torch, wholestep.cli; torch.set_num_threads({threads}); wholestep.cli.main()"
    for told, out in ((words, "first"), (("--config", "first/run.toml"), "second")):
        said = run_in_fork(program, "train", *told, "--out", out, "--quiet", folder=folder)
        assert said.startswith("trained ") and len(said.splitlines()) == 1, said
    assert losses(str(folder / "first")) == losses(str(folder / "second"))
    first, second = ((folder / name / CONFIG).read_text().splitlines() for name in ("first", "second"))
    assert [line for line in first if not line.startswith("#")] == [line for line in second if not line.startswith("#")]


@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_the_config_of_a_finished_run_gives_the_same_losses_bit_for_bit(threads: str, tmp_path: Path) -> None:
    trains_the_same_again(tmp_path, threads, *SMALL, "--seed", "7", "--backend", "interpret")


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize(
    "words",
    [
        ("gpt-1m", "--steps", "6"),
        ("resnet-18", "--set", "width=8", "--batch", "8", "--steps", "4"),
        (*SMALL, "--data", "texts"),
    ],
    ids=["gpt-1m", "resnet-18", "folder"],
)
def test_so_does_compiled_code(words: tuple[str, ...], threads: str, tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(f"words of text {number}, and some more of them\n" * 80)
    trains_the_same_again(tmp_path, threads, *words)


def test_the_command_line_wins_key_by_key(call: Call) -> None:
    assert call("train", *SMALL, "--backend", "interpret", "--out", "first", "--quiet").code == 0
    done = call(
        "train", "--config", "first", "--steps", "2", "--set", "lr=0.5", "--out", "second", "--save-every", "1", "--quiet"
    )  # fmt: skip
    assert done.code == 0, done.err
    first, second = (read_config(Path(name), KINDS) for name in ("first", "second"))
    assert (first["steps"], second["steps"], second["save_every"]) == (4, 2, 1)
    assert {"lr=0.5", "layers=2", "warmup=100"} <= set(second["sets"]) and "lr=0.5" not in first["sets"]


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        ("gpt-1m", ["clip_norm=none", "schedule=cosine", "seed=3"]),
        ("resnet-18", ["width=8", "image_size=16", "optimizer=sgd"]),
        ("hf:bert", ["hidden_size=16", "num_hidden_layers=1", "num_attention_heads=2", "intermediate_size=16", "tokenizer=bytes"]),
        ("rgcn", ["files=3"]),
    ],
)  # fmt: skip
def test_every_kind_of_model_resolves_to_itself(model: str, sets: list[str], tmp_path: Path) -> None:
    """The settings of a job, written and read, make the job of the same settings."""
    asked = dict.fromkeys(request.ASKED) | {"model": model, "sets": sets, "steps": 3}
    settings = make_job(model, sets=sets, steps=3).settings
    path = tmp_path / CONFIG
    path.write_text(config_text(resolved(asked, settings), file=path, where="here"))
    again, digest = request.completed({}, None, path)
    made = {name: again[name] for name in request.MADE_OF if name != "sets"}
    assert digest == settings["data_digest"]
    assert make_job(again["model"], sets=again["sets"], seed=again["seed"] or 0, **made).settings == settings


def test_a_function_of_the_users_own_resolves_to_itself(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own_training.py").write_text(SETUP)
    sys.path.insert(0, str(tmp_path))
    try:
        words = (
            "own_training:setup",
            "--set",
            "width=4",
            "--set",
            "clip_norm=0.5",
            "--steps",
            "3",
            "--backend",
            "interpret",
        )
        assert call("train", *words, "--out", "first", "--quiet").code == 0
        done = call("train", "--config", "first/run.toml", "--out", "second", "--quiet")
        assert done.code == 0, done.err
    finally:
        sys.path.remove(str(tmp_path))
    assert losses("first") == losses("second")


def test_data_that_changed_is_told(call: Call) -> None:
    Path("mine.txt").write_text("to be or not to be\n" * 400)
    words = [*SMALL, "--data", "mine.txt", "--backend", "interpret"]
    done = call("train", *words, "--out", "first", "--quiet")
    assert done.code == 0, done.err
    Path("mine.txt").write_text("that is the question\n" * 400)
    done = call("train", "--config", "first", "--out", "second", "--quiet")
    assert done.code == 2 and "is no longer what it was" in done.err and not Path("second").exists()
    done = call("train", "--config", "first", "--data", "mine.txt", "--out", "second", "--quiet")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("setps = 3", "did you mean steps"), ("steps = true", "a whole number"), ("steps = 0", "1 or more"),
        ("set = 3", "table"), ('disable = "fold_casts"', "a list of texts"), ('backend = "fast"', "inductor or interpret"),
        ("lr = 0.1", "[set]"), ('quiet = "yes"', "on the command line"), ('memory = "lots"', "12GiB"),
        ('memory = "8GiB"\nplan = "p.toml"', "give one of them"), ("[set]\nlr = 0.1\n[set]\nlr = 0.2", "no TOML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text + "\n")
    with pytest.raises(BadOption) as raised:
        request.completed({}, None, path)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [1, 0.5, 1e-5, True, "cosine", "1", "none", [1, 2], {"a": 1}, "two words", "true"])
def test_a_value_is_read_as_it_was_written(value: Any) -> None:
    assert parse([set_text("key", value)]) == {"key": None if value == "none" else value}
