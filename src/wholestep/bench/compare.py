"""Two results files side by side: what moved beyond noise, what is new or gone, and what makes them hard to compare.

A time has moved when the 95 % intervals of the two medians do not overlap and the medians differ by more than 2 %. Memory on a
GPU is exact, so there more than 2 % is enough; a resident set on a CPU is not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from wholestep.bench.results import Row, key_of
from wholestep.bench.tables import aligned
from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import rate

LEAST_CHANGE = 0.02
_ALIKE = ("size", "sizes", "device", "seed", "precision", "passes")
"""Rows that differ in one of these measure different things."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One row in both files."""

    workload: str
    contender: str
    verdict: str
    """`slower`, `faster`, `same`, `larger`, `smaller`, `broken`, `mended`, `departs`, `agrees`, `not comparable`."""
    said: str


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Everything there is to say."""

    warnings: list[str]
    changes: list[Change]
    new: list[tuple[str, str]]
    gone: list[tuple[str, str]]

    @property
    def slower(self) -> bool:
        """Did anything get worse: slower, failing now, or computing something else now?"""
        return any(change.verdict in ("slower", "broken", "departs") for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"slower": self.slower}


def compare(before: Sequence[Row], after: Sequence[Row]) -> Comparison:
    """From A to B."""
    old, new = {key_of(row): row for row in before}, {key_of(row): row for row in after}
    both = [key for key in old if key in new]
    changes = [change for key in both for change in _changes(old[key], new[key])]
    return Comparison(
        _warnings([old[key] for key in both], [new[key] for key in both]),
        changes,
        [key for key in new if key not in old],
        [key for key in old if key not in new],
    )


def moved(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Two `step_ms`: is the difference more than noise?"""
    (low, high), (other_low, other_high) = before["interval"], after["interval"]
    apart = other_low > high or other_high < low
    return apart and abs(after["median"] - before["median"]) > LEAST_CHANGE * before["median"]


def _changes(before: Row, after: Row) -> list[Change]:
    def change(verdict: str, said: str) -> Change:
        return Change(workload=after["workload"], contender=after["contender"], verdict=verdict, said=said)

    if before["status"] != "ok" or after["status"] != "ok":
        if before["status"] == after["status"]:
            return [change("same", after["status"])]
        verdict = "broken" if before["status"] == "ok" else "mended" if after["status"] == "ok" else "same"
        reason = f" ({after['reason']})" if after["status"] != "ok" else ""
        return [change(verdict, f"{before['status']} -> {after['status']}{reason}")]
    other = [name for name in _ALIKE if before.get(name) != after.get(name)]
    if other:
        return [change("not comparable", f"other {', '.join(other)}")]
    a, b = before["step_ms"], after["step_ms"]
    times = f"{rate(a['median'])} -> {rate(b['median'])} ms ({100 * (b['median'] / a['median'] - 1):+.1f} %)"
    verdict = "same" if not moved(a, b) else "slower" if b["median"] > a["median"] else "faster"
    found = [change(verdict, times)]
    if after["device"] == "cuda":
        sizes = before["memory"]["peak_bytes"], after["memory"]["peak_bytes"]
        if abs(sizes[1] - sizes[0]) > LEAST_CHANGE * sizes[0]:
            said = f"peak {show_bytes(sizes[0])} -> {show_bytes(sizes[1])}"
            found.append(change("larger" if sizes[1] > sizes[0] else "smaller", said))
    if ("departs" in before) != ("departs" in after):
        found.append(
            change("departs", after["departs"]) if "departs" in after else change("agrees", "losses are eager's again")
        )
    return found


def _warnings(before: Sequence[Row], after: Sequence[Row]) -> list[str]:
    """Devices and versions that differ between the rows found in both."""
    said = []
    for name in ("device", "threads", "driver", "cuda", "python"):
        pair = [_values(rows, lambda machine, name=name: machine.get(name)) for rows in (before, after)]
        if pair[0] != pair[1]:
            said.append(f"another {name}: {_listed(pair[0])} -> {_listed(pair[1])}")
    packages = sorted({p for row in (*before, *after) for p in row.get("machine", {}).get("versions", {})})
    for package in packages:
        pair = [_values(rows, lambda machine, p=package: machine["versions"].get(p)) for rows in (before, after)]
        if pair[0] != pair[1]:
            said.append(f"another {package}: {_listed(pair[0])} -> {_listed(pair[1])}")
    return said


def _values(rows: Sequence[Row], read: Any) -> set[str]:
    return {str(value) for row in rows if "machine" in row and (value := read(row["machine"])) is not None}


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values)) or "none"


def comparison_text(found: Comparison) -> str:
    """For a terminal: warnings, what changed, then one line on the rest."""
    lines = [f"note: {warning}" for warning in found.warnings]
    told = [change for change in found.changes if change.verdict != "same"]
    if told:
        lines += aligned([(c.verdict, c.workload, c.contender, c.said) for c in told], left=range(4))
    lines += [f"new: {workload} by {contender}" for workload, contender in found.new]
    lines += [f"gone: {workload} by {contender}" for workload, contender in found.gone]
    same = sum(change.verdict == "same" for change in found.changes)
    lines.append(f"{same} row{'' if same == 1 else 's'} as before, up to noise")
    return "\n".join(lines)
