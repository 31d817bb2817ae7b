"""What a search came to, for people, for programs, and as a picture: an Outcome in, text out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from wholestep.bench.tables import aligned
from wholestep.graph.bytes import show_bytes
from wholestep.graph.counted import rate
from wholestep.report.pictures.search_scatter import Mark, search_scatter
from wholestep.search.search import Found, Outcome

MEBI, GIBI = 2**20, 2**30
_PLURAL = {"does not fit": "too large"}


def ranked(outcome: Outcome) -> list[Found]:
    """Measured ones first, the fastest first; then by what is expected; what was not or cannot be run last."""
    order = ("measured", "predicted")

    def place(one: Found) -> tuple[int, float]:
        kind = order.index(one.status) if one.status in order else len(order)
        return kind, -(one.rate or one.expected_rate or one.prediction.rate)

    return sorted(outcome.found, key=place)


def table(outcome: Outcome) -> list[str]:
    """All points, a line each: predicted, then measured."""
    unit = _unit(outcome)
    names = [axis.name for axis in outcome.space.axes] or ["recipe"]
    head = ["", *names, "predicted", "ms", "expected", "measured", "ms", f"{unit}/s", ""]
    rows = [head]
    listed = ranked(outcome)
    programs = {one.prediction.planned: place for place, one in reversed(list(enumerate(listed, start=1))) if one.row}
    for position, one in enumerate(listed, start=1):
        said, row = one.prediction, one.row or {}
        values = [str(one.point.values[name]) for name in names] if outcome.space.axes else ["as it stands"]
        rows.append([
            str(position), *values,
            show_bytes(said.peak_bytes) if said.seconds else "-", rate(1e3 * said.seconds) if said.seconds else "-",
            f"{one.expected_rate:,.0f}" if one.expected_rate is not None and said.fits else "-",
            show_bytes(row["peak_bytes"]) if one.measured else "-", rate(1e3 * row["seconds"]) if one.measured else "-",
            f"{one.rate:,.0f}" if one.rate is not None else "-",
            _remark(one, programs),
        ])  # fmt: skip
    return aligned(rows, left=(len(head) - 1,))


def _remark(one: Found, programs: Mapping[str, int]) -> str:
    if one.status == "predicted":
        same = programs.get(one.prediction.planned)
        return "" if same is None else f"the same program as {same}"
    return "" if one.measured else _short(f"{one.status}: {one.reason}")


def summary(outcome: Outcome) -> list[str]:
    """How many were measured, and which is the best."""
    found, best = outcome.found, outcome.best
    counted = Counter(one.status for one in ranked(outcome))
    lines = [
        f"{len(found)} points: "
        + ", ".join(f"{count} {_PLURAL.get(status, status)}" for status, count in counted.items())
    ]
    if best is not None and best.row is not None:
        took = f"{best.rate:,.0f} {_unit(outcome)}/s, {show_bytes(best.row['peak_bytes'])} at the peak"
        lines.append(f"best: {best.point.name}: {took}")
    return lines


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The same for programs."""
    best = outcome.best
    return {
        "model": outcome.space.model, "unit": _unit(outcome),
        "axes": {axis.name: list(axis.values) for axis in outcome.space.axes}, "notes": outcome.notes, "measured_now": outcome.made,
        "best": None if best is None else best.point.key, "points": [_point_json(one) for one in ranked(outcome)],
    }  # fmt: skip


def _point_json(one: Found) -> dict[str, Any]:
    said, row = one.prediction, one.row
    predicted = {
        "peak_bytes": said.peak_bytes,
        "card_bytes": said.card_bytes,
        "seconds": said.seconds,
        "rate": said.rate,
    }
    measured = None
    if one.measured and row is not None:
        measured = {name: row[name] for name in ("peak_bytes", "seconds", "interval", "steps")} | {"rate": one.rate}
    return {
        "key": one.point.key, "values": dict(one.point.values), "settings": dict(one.point.settings),
        "verbs": [dict(line) for line in one.point.lines], "status": one.status, "reason": one.reason,
        "predicted": predicted if said.seconds else None, "expected_rate": one.expected_rate, "measured": measured,
    }  # fmt: skip


def picture(outcome: Outcome, limit_bytes: int | None = None) -> str:
    """Throughput against peak memory."""
    drawn = [one for one in outcome.found if one.measured or (one.prediction.fits and one.row is None)]
    peaks = [one.row["peak_bytes"] if one.measured and one.row else one.prediction.peak_bytes for one in drawn]
    size, name = (GIBI, "GiB") if max(peaks, default=0) >= GIBI else (MEBI, "MiB")
    marks = [
        Mark(one.point.name, peak / size, one.rate or one.expected_rate or one.prediction.rate, one.measured)
        for one, peak in zip(drawn, peaks, strict=True)
    ]
    lines = summary(outcome)
    return search_scatter(
        marks, title=f"{outcome.space.model}: {len(outcome.found)} ways to run it", subtitle=_short(lines[-1], 150),
        unit=_unit(outcome), size=name, limit=None if limit_bytes is None else limit_bytes / size,
    )  # fmt: skip


def next_command(one: Found, recipe: str | None) -> str:
    """How to train with a point."""
    settings = one.point.settings
    given: list[str] = []
    for name in ("batch", "seq", "precision", "memory", "backend", "data"):
        given += [f"--{name}", str(settings[name])] if name in settings else []
    for text in one.point.sets:
        given += ["--set", text]
    return " ".join(["wholestep train", one.point.model, *given, *(["--recipe", recipe] if recipe else [])])


def _unit(outcome: Outcome) -> str:
    return next((one.prediction.unit for one in outcome.found if one.prediction.seconds), "samples")


def _short(words: str, most: int = 110) -> str:
    return words if len(words) <= most else words[: most - 4] + " ..."


def lines_of(outcome: Outcome) -> Sequence[str]:
    """All that is printed."""
    return [*table(outcome), "", *summary(outcome), *(f"note: {text}" for text in outcome.notes)]
