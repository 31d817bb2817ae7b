"""Loggers: where the numbers of a run go besides metrics.jsonl. `--log csv,tensorboard,wandb`, or objects of your own in Python.

In: after every step its number and values. Out: a file in the run's folder, or whatever a tool makes of them. A resumed run goes on
in the same log: what was logged after the checkpoint it starts from is not there twice.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from wholestep.disk import read_json
from wholestep.errors import BadOption, WholestepWarning, did_you_mean
from wholestep.train.run_folder import write_file

SECONDS_BETWEEN_FLUSHES = 1.0


class Logger(Protocol):
    """What a logger does. `flush` and `close` need not be overridden by one that keeps nothing back."""

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        """The run begins in `folder` with these settings. `at`: steps taken before, 0 for a new run; what a log holds of later
        steps is about to come again."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The finite numbers of a step: `loss`, `lr`, `grad_norm`, `tokens_per_second`, ..., or `held_out_loss`."""

    def flush(self) -> None:
        """What was logged is kept when this returns: a checkpoint is written only after it."""

    def close(self) -> None:
        """The run has ended, in whatever way."""


class Csv:
    """`metrics.csv`: a row per step, a column per value."""

    FILE = "metrics.csv"

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        self.path = folder / self.FILE
        self.columns, rows = self._kept(at)
        self._waiting: list[dict[str, Any]] = []
        self._rewrite(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._waiting.append({"step": step, **values})

    def flush(self) -> None:
        rows, self._waiting = self._waiting, []
        new = list(dict.fromkeys(name for row in rows for name in row if name not in self.columns))
        if new:
            self.columns += new
            with self.path.open(newline="", encoding="utf-8") as file:
                self._rewrite(list(csv.DictReader(file)))
        if rows:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns, restval="").writerows(rows)

    def close(self) -> None:
        self.flush()

    def _kept(self, at: int) -> tuple[list[str], list[dict[str, Any]]]:
        """(columns, rows) of the file up to a step; a line that a killed run left unfinished is dropped."""
        if not at or not self.path.exists():
            return ["step"], []
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ["step"])
            rows = [row for row in reader if (row.get("step") or "").isdecimal() and int(row["step"]) <= at]
        return names, [row for row in rows if None not in row.values() and None not in row]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.path, text.getvalue().replace("\r\n", "\n"))


class TensorBoard:
    """Event files below `tensorboard/`, by TensorBoard's own writer: `tensorboard --logdir runs`."""

    FOLDER = "tensorboard"

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # from `purge_step` on, readers drop what earlier files hold
        purge = at + 1 if (folder / self.FOLDER).exists() else None
        self.writer: Any = SummaryWriter(str(folder / self.FOLDER), purge_step=purge)
        if not at:
            self.writer.add_text("config", f"```\n{json.dumps(config, indent=1, default=str)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class Wandb:
    """A run of Weights & Biases. Without an API key, or with WANDB_MODE=offline, it is written into the run's folder."""

    STATE = "wandb.json"
    """The run's id there, and the last step that was handed over: what is resumed goes on in it, and no step is sent twice."""

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        wandb = importlib.import_module("wandb")
        self.path = folder / self.STATE
        self.state: dict[str, Any] = {"id": uuid.uuid4().hex[:12], "step": 0}
        if at and self.path.exists():
            self.state |= read_json(self.path)
        self._waiting: list[tuple[int, dict[str, float]]] = []
        mode = os.environ.get("WANDB_MODE") or (None if _has_key(wandb) else "offline")
        self.run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wholestep"), name=folder.name, id=self.state["id"], resume="allow",
            dir=str(folder), config=dict(config), mode=mode, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > self.state["step"]:
            self._waiting.append((step, dict(values)))

    def flush(self) -> None:
        rows, self._waiting = self._waiting, []
        if rows:
            self.state["step"] = rows[-1][0]
            write_file(self.path, json.dumps(self.state) + "\n")  # first: rather a step that is missing than one twice
        for step, values in rows:
            self.run.log(values, step=step)

    def close(self) -> None:
        self.flush()
        self.run.finish()


def _has_key(wandb: Any) -> bool:
    """Whether somebody has logged in; nobody is asked, and nothing is sent."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # before 0.31
        return wandb.api.api_key is not None


LOGGERS: dict[str, tuple[Callable[[], Logger], str | None]] = {
    "csv": (Csv, None),
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (Wandb, "wandb"),
}
"""Name -> the logger, and the package it needs."""


def make_loggers(names: str | None) -> list[Logger]:
    """The loggers of `--log csv,wandb`; an unknown name, or a package that is missing, is one line."""
    wanted = list(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    for name in wanted:
        if name not in LOGGERS:
            hint = did_you_mean(name, LOGGERS, f"use {', '.join(LOGGERS)}")
            raise BadOption(f"--log {name}: there is no such logger", hint=hint)
        package = LOGGERS[name][1]
        if package is not None and importlib.util.find_spec(package) is None:
            raise BadOption(f"--log {name}: the package {package} is not installed", hint=f"pip install {package}")
    return [LOGGERS[name][0]() for name in wanted]


class Loggers:
    """All loggers of a run. One that fails is left out from then on, and that is told: a run is not lost for its log."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self.waiting, self.working = list(loggers), list[Logger]()
        self._flushed = time.monotonic()

    def start(self, config: Mapping[str, Any], folder: Path, at: int) -> None:
        self.waiting, self.working = [], self.waiting
        self._each("start", config, folder, at)

    def log(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        if not self.working:
            return
        values = {k: v for k, v in row.items() if k != "step" and type(v) in (int, float) and math.isfinite(v)}
        self._each("log", row["step"], values)
        if time.monotonic() - self._flushed > SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        self._each("flush")
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._each("close")
        self.working = []

    def _each(self, method: str, *arguments: Any) -> None:
        for logger in list(self.working):
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:
                self.working.remove(logger)
                said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                text = f"the logger {type(logger).__name__} failed ({said}); nothing more goes to it"
                warnings.warn(text, WholestepWarning, stacklevel=3)
