"""The results file: rows as JSON, one per workload and contender, written whole after every row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.bench.losses import departure
from wholestep.disk import read_json, write_atomically
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
    text = json.dumps({"format": FORMAT, "rows": [finite(row) for row in rows]}, indent=1)
    if not write_atomically(path, (text + "\n").encode()):
        raise BadOption(f"{path} cannot be written", hint="give --out a place that can")


def finite(value: Any) -> Any:
    """What JSON has no word for (not a number, infinity) as null; tuples as the lists they are read back as."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


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
