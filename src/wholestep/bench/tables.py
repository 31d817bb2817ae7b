"""Rows as text for a terminal: one table per workload, with every system beside the best peer.

The best peer is the fastest system that is not Wholestep and whose losses are those of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.bench.contender_names import is_ours
from wholestep.bench.losses import ends, unsteadiness
from wholestep.bench.results import Row
from wholestep.bench.workload import Workload
from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import rate
from wholestep.report.terminal_picture import sparkline

CURVE_WIDTH = 12


def aligned(table: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> list[str]:
    """Columns two spaces apart; those in `left` begin at the left, numbers end at the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines


def best_peer(rows: Sequence[Row]) -> Row | None:
    """Of one workload's rows."""
    peers = [row for row in rows if row["status"] == "ok" and not is_ours(row["contender"]) and "departs" not in row]
    return min(peers, key=lambda row: row["step_ms"]["median"], default=None)


def ratio(row: Row, other: Row | None) -> float | None:
    """How many times as fast a row is as another."""
    if other is None or row["status"] != "ok":
        return None
    return other["step_ms"]["median"] / row["step_ms"]["median"]


def workload_table(rows: Sequence[Row], *, blocks: bool = True) -> list[str]:
    """All rows of one workload, and below them what has to be said about some."""
    measured = [row for row in rows if row["status"] == "ok"]
    lines = [_title(rows)]
    if measured:
        best = best_peer(rows)
        speed = f"{measured[0]['unit']}/s"
        memory = "memory" if measured[0]["device"] == "cuda" else "memory (RSS)"
        heads = ("", "ms", "p10-p90", "vs best peer", speed, "first step", memory, "loss", "")
        lines += [
            "  " + line for line in aligned([heads, *(_cells(row, best, blocks) for row in measured)], left=(0, 8))
        ]
    for row in rows:
        lines += [f"  {row['contender']}: {said}" for said in _remarks(row)]
    return lines


def results_text(rows: Sequence[Row], *, blocks: bool = True) -> str:
    """One table per workload, in the order of the rows."""
    names = dict.fromkeys(row["workload"] for row in rows)
    tables = [workload_table([row for row in rows if row["workload"] == name], blocks=blocks) for name in names]
    return "\n\n".join("\n".join(table) for table in tables)


def smoke_text(rows: Sequence[Row], *, blocks: bool = True) -> str:
    """One line per row, about losses alone: a smoke run measures nothing."""
    table = [("workload", "system", "loss by thirds", "", "captured as")]
    for row in rows:
        ok = row["status"] == "ok"
        rungs = ", ".join(dict.fromkeys(part["rung"] for part in row.get("wholestep", ()))) if ok else row["status"]
        loss, curve = (_thirds(row), _curve(row, blocks)) if ok else ("", "")
        table.append((row["workload"], row["contender"], loss, curve, rungs))
    falls = [
        f"{row['workload']} fell from {fall}"
        for row in rows
        for part in row.get("wholestep", ())
        for fall in part["falls"]
    ]
    return "\n".join([*aligned(table, left=(0, 1, 3, 4)), *falls])


def list_text(workloads: Mapping[str, Workload]) -> str:
    """The workloads there are."""
    table = [("name", "domain", "unit", "TBD's", "data")]
    table += [(w.name, w.domain, w.unit, w.tbd or "-", w.data) for w in workloads.values()]
    return "\n".join(aligned(table, left=range(5)))


def list_json(workloads: Mapping[str, Workload]) -> list[dict[str, Any]]:
    """The same for programs, with everything but the code."""
    fields = ("name", "domain", "unit", "data", "summary", "tbd", "needs", "smoke", "gpu")
    return [{field: getattr(workload, field) for field in fields} for workload in workloads.values()]


def _title(rows: Sequence[Row]) -> str:
    row = next((row for row in rows if row["status"] == "ok"), rows[0])
    facts = [f"{row['size']} size"]
    if row["status"] == "ok":
        facts += [row["precision"], row["machine"]["device"]]
        if "sm_clock_mhz" in row["machine"]:
            facts.append(f"{row['machine']['sm_clock_mhz']:.0f} MHz")
    return f"{row['workload']} ({', '.join(facts)})"


def _cells(row: Row, best: Row | None, blocks: bool) -> tuple[str, ...]:
    times, faster = row["step_ms"], ratio(row, best)
    return (
        row["contender"],
        rate(times["median"]),
        f"{rate(times['p10'])}-{rate(times['p90'])}",
        "departs" if "departs" in row else "-" if faster is None else f"{faster:.2f}x",
        rate(row["throughput"]),
        f"{row['first_step_seconds']:.1f} s",
        show_bytes(row["memory"]["peak_bytes"]),
        _losses(row),
        _curve(row, blocks),
    )


def _remarks(row: Row) -> list[str]:
    """What a reader of the figures must know."""
    if row["status"] != "ok":
        return [f"{row['status']}: {row['reason']}" if row["status"] != "not installed" else row["reason"]]
    said = [f"DEPARTS: {row['departs']}"] if "departs" in row else []
    unsteady = unsteadiness(row)
    said += [f"{unsteady}; the others are held to no more than that"] if unsteady is not None else []
    if not row["warm_up"]["settled"]:
        said.append(f"times had not settled after {row['warm_up']['steps']} steps of warm-up")
    for part in row.get("wholestep", ()):
        said += [f"fell: {fall}" for fall in part["falls"]]
    return said


def _losses(row: Row) -> str:
    """The first and the last of the compared losses."""
    kept = ["not finite" if value is None else f"{value:.4g}" for value in row["losses"].values()]
    return f"{kept[0]} -> {kept[-1]}"


def _thirds(row: Row) -> str:
    """What a smoke run judges: single batches differ, and the last may be a harder one than the first."""
    if any(value is None for value in row["curve"]):
        return "not finite"
    return " -> ".join(f"{value:.4g}" for value in ends(row["curve"]))


def _curve(row: Row, blocks: bool) -> str:
    points = [(float(i), value) for i, value in enumerate(row["curve"]) if value is not None]
    return sparkline(points, CURVE_WIDTH, blocks=blocks)
