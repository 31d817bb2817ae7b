"""The results file: rows as JSON, one per workload and contender, written whole after every row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.bench.losses import departure
from wholestep.disk import json_ready, read_json, write_json
from wholestep.errors import BadOption

FORMAT = "wholestep-bench-1"
Row = dict[str, Any]


def key_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row is about; a file holds one row for each."""
    return row["workload"], row["contender"]


def load(path: Path) -> list[Row]:
    """The rows of a file; an error when it is not one of ours."""
    try:
        document = read_json(path)
    except OSError as error:
        raise BadOption(
            f"{path}: {error.strerror or error}", hint="name a file that `wholestep bench` wrote"
        ) from error
    except ValueError as error:
        raise BadOption(f"{path} is not JSON", hint="name a file that `wholestep bench` wrote") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadOption(f"{path} holds no results of `wholestep bench`", hint=f"such a file says format {FORMAT}")
    return document["rows"]


def save(path: Path, rows: Sequence[Row]) -> None:
    """Whole or not at all: a run that is killed leaves the file of the row before."""
    if not write_json(path, {"format": FORMAT, "rows": json_ready(rows)}):
        raise BadOption(f"{path} cannot be written", hint="give --out a place that can")


def judged(rows: Iterable[Row]) -> list[Row]:
    """The rows with `departs` where their losses are not those of eager PyTorch on the same workload."""
    rows = list(rows)
    eager = {row["workload"]: row for row in rows if row["contender"] == "eager" and row["status"] == "ok"}
    for row in rows:
        row.pop("departs", None)
        reference = eager.get(row["workload"])
        if row["status"] != "ok" or reference is None or row is reference:
            continue
        if any(row[name] != reference[name] for name in ("size", "seed", "device")):
            continue
        said = departure(row, reference)
        if said is not None:
            row["departs"] = said
    return rows
