"""Loggers hear of every step once, also over a resume; TensorBoard's files are read by its own reader, wandb's run is on disk."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.train.tiny_jobs import tiny_job

from wholestep.errors import BadOption, WholestepWarning
from wholestep.train import loggers as loggers_module
from wholestep.train.loggers import Csv, Logger, TensorBoard, Wandb, make_loggers
from wholestep.train.loop import train
from wholestep.train.metrics import read_rows
from wholestep.train.running import Run

BLOCK = 32768


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"the package {package} is not installed")


class Kept:
    """A logger of a user's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.rows: list[tuple[int, dict[str, float]]] = []

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        self.calls.append(f"start at {at}")
        self.config, self.folder = dict(config), folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def run(out: Path, loggers: Sequence[Logger], *, steps: int = 6, resume: bool = False) -> None:
    train(tiny_job(steps=steps), out=out, resume=resume, backend="interpret", save_every=3, loggers=loggers)


def killed(out: Path, loggers: Sequence[Logger], monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps of nine: a checkpoint after the third, then the process is gone after the fifth."""
    took = Run._add

    def add(self: Run, row: dict[str, Any]) -> None:
        took(self, row)
        if row["step"] == 5 and "loss" in row:
            self.loggers.flush()
            self.metrics.flush()
            self.loggers.working = []  # nobody closes anything
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_add", add)
        with pytest.raises(KeyboardInterrupt):
            run(out, loggers, steps=9)


def logged(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_rows(out / "metrics.jsonl") if "loss" in row]


def test_a_logger_of_ones_own_hears_of_every_step(tmp_path: Path) -> None:
    kept = Kept()
    run(tmp_path / "run", [kept])
    assert kept.calls[0] == "start at 0" and kept.calls[-1] == "close" and "flush" in kept.calls
    assert kept.config["lr"] == 0.05 and kept.folder == tmp_path / "run"
    steps = [step for step, values in kept.rows if "loss" in values]
    assert steps == [1, 2, 3, 4, 5, 6] and any("held_out_loss" in values for _, values in kept.rows)
    assert {"loss", "lr", "grad_norm", "seconds", "memory_bytes"} <= set(kept.rows[0][1])
    assert all(isinstance(value, int | float) for _, values in kept.rows for value in values.values())


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    kept = Kept()
    spoil = lambda number, batch: {**batch, "x": batch["x"] * float("nan")} if number == 2 else batch  # noqa: E731
    train(tiny_job(steps=4, spoil=spoil), out=tmp_path / "run", backend="interpret", nonfinite="skip", loggers=[kept])
    assert [step for step, values in kept.rows if "lr" in values] == [1, 2, 3, 4]
    assert "loss" not in next(values for step, values in kept.rows if step == 3)


def test_one_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            raise OSError("no room\nleft")

    kept = Kept()
    with pytest.warns(WholestepWarning, match="the logger Broken failed"):
        run(tmp_path / "run", [Broken(), kept])
    assert len(logged(tmp_path / "run")) == 6 and [s for s, v in kept.rows if "loss" in v] == [1, 2, 3, 4, 5, 6]


def test_csv_holds_every_step_once_also_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    killed(out, [Csv()], monkeypatch)
    with (out / Csv.FILE).open("a") as file:
        file.write("6,0.1")  # a line cut short
    run(out, [Csv()], steps=9, resume=True)
    with (out / Csv.FILE).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == logged(out)
    assert [step for step, _ in logged(out)] == list(range(1, 10))


@needs("tensorboard")
def test_tensorboard_reads_its_own_files_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    killed(out, [TensorBoard()], monkeypatch)
    run(out, [TensorBoard()], steps=9, resume=True)
    events = EventAccumulator(str(out / TensorBoard.FOLDER))
    events.Reload()
    assert {"loss", "lr", "grad_norm", "held_out_loss"} <= set(events.Tags()["scalars"])
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in logged(out)]
    assert [step for step, _ in found] == list(range(1, 10))


@needs("wandb")
def test_wandb_offline_writes_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    out = tmp_path / "run"
    killed(out, [Wandb()], monkeypatch)
    run(out, [Wandb()], steps=9, resume=True)
    state = json.loads((out / Wandb.STATE).read_text())
    files = sorted((out / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files and all(state["id"] in file.name for file in files) and state["step"] == 9
    # wandb's own process writes the end of the file, after finish() has returned where the machine is busy.
    waited_until = time.monotonic() + 120.0
    while not any(kind_of(record) == "exit" for record in records_of(files[-1].read_bytes())):
        assert time.monotonic() < waited_until, "the end of the run is never written"
        time.sleep(0.1)
    steps = [step for file in files for step in steps_of(file)]
    assert sorted(set(steps)) == list(range(1, 10)) and len(steps) == len(set(steps)), steps


def steps_of(file: Path) -> list[int]:
    """The steps in one of wandb's files, each once."""
    found = []
    for record in records_of(file.read_bytes()):
        if kind_of(record) == "history":
            names = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            found.append(int(names["_step"]) if "_step" in names else record.history.step.num)
    return sorted(set(found))


def kind_of(record: Any) -> str:
    return str(record.WhichOneof("record_type"))


def records_of(data: bytes) -> Iterator[Any]:
    """LevelDB's log format behind a head of seven bytes: blocks of 32 KiB; checksum, length, whole or first or middle or last."""
    from wandb.proto import wandb_internal_pb2

    assert data.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return  # still being written
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


@pytest.mark.parametrize(("names", "kinds"), [(None, []), ("csv", [Csv]), (" csv , csv,", [Csv])])
def test_names_make_loggers(names: str | None, kinds: list[type]) -> None:
    assert [type(logger) for logger in make_loggers(names)] == kinds


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers_module.importlib.util, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(BadOption, match=re.escape(f"pip install {name}")):
            make_loggers(f"csv,{name}")
