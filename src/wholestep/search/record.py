"""What was measured, kept beside the recipe: rows as JSON, one for every point, written whole after each.

A row stands for one program (a hash of the captured step), one device, and one version of Wholestep and torch. Whatever of
that has changed since is told, and the point is measured again.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from wholestep.bench.machine import commit
from wholestep.capture.cache import own_sources
from wholestep.cost.devices import Device
from wholestep.disk import json_ready, read_json, write_json
from wholestep.errors import BadOption

FORMAT = "wholestep-search-1"
Row = dict[str, Any]


def made_with(device: Device, clock: str) -> dict[str, Any]:
    """What a measured time depends on beside the program."""
    here = {"device": device.title, "torch": torch.__version__, "wholestep": own_sources()[:16], "clock": clock}
    return here if device.link_bandwidth else here | {"threads": torch.get_num_threads()}


class Record:
    """The file."""

    def __init__(self, path: Path, made_with: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path, self.made_with = path, dict(made_with)
        self.rows: dict[str, Row] = {} if fresh or not path.exists() else _read(path)
        """Key of a point -> its row, of whatever version."""

    def find(self, key: str, program: str) -> Row | None:
        """The row of a point, if it still holds."""
        row = self.rows.get(key)
        return row if row is not None and not self.changed(row, program) else None

    def changed(self, row: Row, program: str) -> list[str]:
        """What a row was made with that is another now, a text each."""
        before = row.get("made_with", {})
        names = [name for name in {**before, **self.made_with} if before.get(name) != self.made_with.get(name)]
        told = [f"{name} was {before.get(name)} and is {self.made_with.get(name)}" for name in names]
        return told if row.get("program") == program else [*told, "the model or its recipe computes something else"]

    def add(self, key: str, program: str, row: Mapping[str, Any]) -> Row:
        """Keep a row, on disk before anything else is measured."""
        about = {"key": key, "program": program, "made_with": self.made_with}
        kept = {**row, **about, "commit": commit(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.rows[key] = kept
        if not write_json(self.path, {"format": FORMAT, "rows": json_ready(list(self.rows.values()))}):
            raise BadOption(f"{self.path} cannot be written", hint="give --record a place that can")
        return kept

    def check_writable(self) -> None:
        """Before anything is measured for it."""
        folder = self.path.parent
        if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise BadOption(f"{self.path} cannot be written", hint="give --record a place that can")


def _read(path: Path) -> dict[str, Row]:
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise BadOption(
            f"{path} cannot be read: {error}", hint="move it away, or give --record another name"
        ) from error
    rows = document.get("rows") if isinstance(document, dict) and document.get("format") == FORMAT else None
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise BadOption(
            f"{path} holds no results of `wholestep search`", hint="move it away, or give --record another name"
        )
    return {row["key"]: row for row in rows}


def _is_row(row: Any) -> bool:
    """Whether it is what `add` wrote: one that was measured has a time, which points are compared by."""
    if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in ("key", "status")):
        return False
    if not isinstance(row.get("made_with", {}), dict):
        return False
    seconds = row.get("seconds")
    return row["status"] != "ok" or (isinstance(seconds, int | float) and 0 < seconds < math.inf)
