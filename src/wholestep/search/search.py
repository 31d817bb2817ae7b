"""The search: points in, which is the fastest out, with few of them measured.

All points are predicted. What does not fit is never run; of the others `choose.py` names one at a time, and every measured
one corrects the predictions of the rest. What was measured, failures too, is remembered (`record.py`) and not measured again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from wholestep.errors import BadOption
from wholestep.search.choose import Corrected
from wholestep.search.predict import Prediction
from wholestep.search.record import Record, Row
from wholestep.search.space import Point, Space

Measure = Callable[[Point], Row]
"""A point -> its row, at least with `status`."""
Tell = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class Found:
    """What is known about one point."""

    point: Point
    prediction: Prediction
    row: Row | None = None
    """As it was measured, or failed to be."""
    expected_rate: float | None = None
    """Units per second, by predictions corrected by all that was measured."""

    @property
    def measured(self) -> bool:
        return self.row is not None and self.row["status"] == "ok"

    @property
    def rate(self) -> float | None:
        """Measured units per second."""
        return self.prediction.units / self.row["seconds"] if self.measured and self.row is not None else None

    @property
    def status(self) -> str:
        """`measured`, `failed`, `timed out`, `out of memory`, `does not fit`, `refused` or `predicted`."""
        if self.row is not None:
            return "measured" if self.measured else str(self.row["status"])
        if self.prediction.fits:
            return "predicted"
        return "does not fit" if self.prediction.seconds else "refused"

    @property
    def reason(self) -> str:
        return str(self.row.get("reason", "")) if self.row is not None else self.prediction.reason


@dataclasses.dataclass(slots=True)
class Outcome:
    """All points, in the order of the recipe."""

    space: Space
    found: list[Found]
    notes: list[str]
    made: int = 0
    """Points measured by this call."""

    @property
    def best(self) -> Found | None:
        """The fastest that was measured."""
        return max((one for one in self.found if one.measured), key=lambda one: one.rate or 0.0, default=None)


def run_search(
    space: Space, predict: Callable[[Point], Prediction], measure: Measure, record: Record, *, most: int, retry: bool = False,
    calibrated: bool = False, tell: Tell = lambda text: None,
    passing: Tell = lambda text: None, done: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:  # fmt: skip
    """Predict all points, then measure until `most` of them are known, remembered ones counted.

    Args:
        retry: measure those again that failed.
        calibrated: whether predictions for the device were compared with measured times.
        tell, passing: are told what is being done; `passing` what takes a moment only.
        done: is called after every point that was measured.
    """
    outcome = Outcome(space, [], [])
    for number, point in enumerate(space.points, start=1):
        passing(f"predicting {number} of {len(space.points)}: {point.name}")
        outcome.found.append(Found(point, predict(point)))
    passing("")
    _refuse_hopeless(outcome.found)
    _remember(outcome, record, retry)
    while True:
        corrected = _corrected(outcome, calibrated)
        known = sum(one.row is not None for one in outcome.found)
        following = corrected.next(_allowed(outcome.found)) if known < most else None
        if following is None:
            return outcome
        one = outcome.found[following]
        tell(f"measuring {known + 1} of {most}: {one.point.name}")
        row = measure(one.point)
        one.row = record.add(one.point.key, one.prediction.program, {"point": dict(one.point.values), **row})
        outcome.made += 1
        _corrected(outcome, calibrated)
        done(outcome)


def _refuse_hopeless(found: Sequence[Found]) -> None:
    """Where no point can be made, the reason of the first is the answer; that none fits is an answer of its own."""
    if all(one.status == "refused" for one in found):
        raise BadOption(found[0].prediction.reason)


def _remember(outcome: Outcome, record: Record, retry: bool) -> None:
    """What was measured before and still holds; what does not is told."""
    changed: dict[str, int] = {}
    for one in outcome.found:
        row = record.rows.get(one.point.key)
        if row is None or not one.prediction.fits:
            continue
        told = record.changed(row, one.prediction.program)
        if told:
            changed[told[0]] = changed.get(told[0], 0) + 1
        elif row["status"] == "ok" or not retry:
            one.row = row
    outcome.notes += [f"{_results(count)} no longer counted: {told}" for told, count in changed.items()]
    others = len(record.rows.keys() - {one.point.key for one in outcome.found})
    if others:
        outcome.notes.append(f"the recipe has changed: {_results(others)} about points that it no longer has")


def _results(count: int) -> str:
    return "1 result is" if count == 1 else f"{count} results are"


def _allowed(found: Sequence[Found]) -> list[int]:
    """Points that may be measured: they fit, take no more than one that ran out of memory was thought to, and are not the very
    program of one that was measured."""
    least = min((one.prediction.peak_bytes for one in found if one.status == "out of memory"), default=None)
    known = {one.prediction.planned for one in found if one.row is not None}
    return [
        index for index, one in enumerate(found)
        if one.row is None and one.prediction.fits and one.prediction.planned not in known
        and (least is None or one.prediction.peak_bytes <= least)
    ]  # fmt: skip


def _corrected(outcome: Outcome, calibrated: bool) -> Corrected:
    """Predictions by what is known now, written to the points too."""
    found = outcome.found
    predicted = {index: one.prediction.rate for index, one in enumerate(found) if one.prediction.seconds}
    measured = {index: one.rate for index, one in enumerate(found) if one.rate is not None}
    ranks = [axis.ranks for axis in outcome.space.axes]
    places = [
        [n if known is None else known[n] for n, known in zip(one.point.places, ranks, strict=True)] for one in found
    ]
    numeric = [known is not None for known in ranks]
    corrected = Corrected(predicted, measured, places, numeric, calibrated=calibrated)
    for index in predicted if measured else ():
        found[index].expected_rate = corrected.rate(index)
    return corrected
