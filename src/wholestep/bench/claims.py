"""What ten papers say about their systems, beside what was measured here.

In: papers/*.toml, one file per system: what it claims, in our own words, with the figure, the hardware and where it is said; and
which of our rows speak to it. Out: text, or plain data. A row speaks to a claim, it does not refute or confirm one: the hardware
is another, and so are the peers. Where none can, `lacking` says what Wholestep or the benchmark would need first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.bench.results import Row
from wholestep.bench.tables import best_peer, ratio
from wholestep.bench.workload import Workload
from wholestep.errors import WholestepError

FOLDER = Path(__file__).resolve().parent / "papers"
MEASURES = (
    "speed over best peer",
    "speed over eager",
    "memory against eager",
    "first step against compile",
    "coverage",
)
NOT_YET = "not measured yet"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One sentence of a paper."""

    text: str
    figure: str
    unit: str
    hardware: str
    where: str
    rows: tuple[dict[str, str], ...] = ()
    """{workload, measure} of each row that speaks to it."""
    lacking: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """One system."""

    system: str
    title: str
    venue: str
    year: int
    claims: tuple[Claim, ...]


def load_papers() -> list[Paper]:
    """All papers, by year."""
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise WholestepError("--suite papers needs Python 3.11 or newer, which reads TOML") from error
    papers = []
    for path in sorted(FOLDER.glob("*.toml")):
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        claims = tuple(Claim(**{**claim, "rows": tuple(claim.get("rows", ()))}) for claim in read.pop("claims"))
        papers.append(Paper(claims=claims, **read))
    return sorted(papers, key=lambda paper: (paper.year, paper.system))


def measured(measure: str, workload: str, rows: Sequence[Row], workloads: Mapping[str, Workload]) -> str | None:
    """Our figure for one measure of one workload; None while the rows for it are not there."""
    if measure == "coverage":
        return f"{len(workloads)} models, {len({w.domain for w in workloads.values()})} domains"
    here = {row["contender"]: row for row in rows if row["workload"] == workload and row["status"] == "ok"}
    ours, eager, compiled = (here.get(name) for name in ("wholestep", "eager", "compile"))
    if ours is None or "departs" in ours or ours["size"] != "gpu":  # a smoke size says nothing about speed
        return None
    if measure == "speed over best peer":
        best = best_peer(list(here.values()))
        return None if best is None else f"{ratio(ours, best):.2f}x over {best['contender']}"
    if measure == "first step against compile":
        if compiled is None:
            return None
        return f"{ours['first_step_seconds']:.0f} s, torch.compile {compiled['first_step_seconds']:.0f} s"
    if eager is None:
        return None
    if measure == "speed over eager":
        return f"{ratio(ours, eager):.2f}x"
    change = ours["memory"]["peak_bytes"] / eager["memory"]["peak_bytes"] - 1
    return f"{100 * change:+.0f} % peak"


def answers(claim: Claim, rows: Sequence[Row], workloads: Mapping[str, Workload]) -> list[str]:
    """One line per row that speaks to the claim."""
    if not claim.rows:
        return [f"{NOT_YET}: needs {claim.lacking}"]
    lines = []
    for row in claim.rows:
        workload = row.get("workload", "")
        figure = measured(row["measure"], workload, rows, workloads) or NOT_YET
        lines.append(f"{workload}, {row['measure']}: {figure}" if workload else figure)
    return lines


def papers_text(papers: Sequence[Paper], rows: Sequence[Row], workloads: Mapping[str, Workload]) -> str:
    """For a terminal: a paragraph per system."""
    lines = []
    for paper in papers:
        lines += [f"{paper.system} ({paper.venue}, {paper.year})"]
        for claim in paper.claims:
            lines.append(f"  {claim.text}")
            lines.append(f"    theirs: {claim.figure} ({claim.unit}; {claim.hardware}; {claim.where})")
            lines += [f"    here:   {line}" for line in answers(claim, rows, workloads)]
        lines.append("")
    return "\n".join(lines).rstrip()


def papers_json(
    papers: Sequence[Paper], rows: Sequence[Row], workloads: Mapping[str, Workload]
) -> list[dict[str, Any]]:
    """The same for programs."""
    found = []
    for paper in papers:
        facts = dataclasses.asdict(paper)
        facts["claims"] = [
            dataclasses.asdict(claim) | {"here": answers(claim, rows, workloads)} for claim in paper.claims
        ]
        found.append(facts)
    return found
