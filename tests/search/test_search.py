"""The search with predictions and measurements that are made up: what is run, what is remembered, what is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from wholestep.errors import WholestepError
from wholestep.search.predict import Prediction
from wholestep.search.record import Record
from wholestep.search.search import Outcome, run_search
from wholestep.search.space import Point, Space, read_space
from wholestep.search.text import as_json, lines_of, next_command, picture

VERSION = {"device": "a card", "torch": "9", "wholestep": "abc"}
SPACE = """format = 1
verbs = [{{ recompute = "blocks.*", ratio = [0, 1] }}]
[search]
model = "gpt-1m"
batch = {batch}
[end]
"""


class Maker:
    """Measures points by a rule, and remembers which."""

    def __init__(self, rows: Mapping[int, dict[str, Any]] | None = None, stop_after: int = 99) -> None:
        self.rows, self.made, self.stop_after = dict(rows or {}), list[str](), stop_after

    def __call__(self, point: Point) -> dict[str, Any]:
        if len(self.made) == self.stop_after:
            raise KeyboardInterrupt
        self.made.append(point.name)
        batch, ratio = point.settings["batch"], point.values["recompute ratio"]
        seconds = 0.01 + 0.002 * batch * (1 + ratio / 3)
        row = {
            "status": "ok",
            "seconds": seconds,
            "interval": [seconds, seconds],
            "steps": 20,
            "peak_bytes": 1000 * batch,
        }
        return self.rows.get(batch, row)


def predict(point: Point, *, most: int = 10**9) -> Prediction:
    batch, ratio = point.settings["batch"], point.values["recompute ratio"]
    peak = 900 * batch - 100 * ratio
    return Prediction(
        reason="" if peak <= most else f"takes {peak}", fits=peak <= most, peak_bytes=peak, card_bytes=peak, units=8 * batch,
        seconds=0.0005 * batch * (1 + ratio / 4), unit="tokens", program=f"program {batch}", planned=point.key,
    )  # fmt: skip


def space(folder: Path, batch: str = "[1, 2, 4, 8]") -> Space:
    path = folder / "recipe.toml"
    path.write_text(SPACE.format(batch=batch))
    return read_space(path)


def search(
    folder: Path, make: Maker, *, version: dict[str, Any] = VERSION, batch: str = "[1, 2, 4, 8]", **more: Any
) -> Outcome:
    record = Record(folder / "recipe.search.json", version)
    return run_search(space(folder, batch), more.pop("predict", predict), make, record, **{"most": 3, **more})


def test_few_are_measured_and_the_best_is_among_them(tmp_path: Path) -> None:
    make = Maker()
    outcome = search(tmp_path, make)
    assert len(make.made) == 3 == outcome.made and make.made[0] == "batch 1, recompute ratio 0"
    assert outcome.best is not None and outcome.best.point.values == {"batch": 8, "recompute ratio": 0}
    text = "\n".join(lines_of(outcome))
    assert "8 points: 3 measured, 5 predicted" in text and "best: batch 8, recompute ratio 0: 2,462 tokens/s" in text
    assert next_command(outcome.best, "best.toml") == "wholestep train gpt-1m --batch 8 --recipe best.toml"


def test_what_does_not_fit_is_never_run(tmp_path: Path) -> None:
    make = Maker()
    outcome = search(tmp_path, make, most=8, predict=lambda point: predict(point, most=3600))
    assert len(make.made) == 6 and not any("batch 8" in name for name in make.made)
    assert [one.status for one in outcome.found].count("does not fit") == 2
    assert "does not fit: takes 7200" in "\n".join(lines_of(outcome))


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = Maker(stop_after=2)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, first)
    second, whole = Maker(), Maker()
    outcome = search(tmp_path, second)
    (tmp_path / "other").mkdir()
    search(tmp_path / "other", whole)
    assert len(second.made) == 1 == outcome.made and [*first.made, *second.made] == whole.made
    assert search(tmp_path, Maker(stop_after=0)).made == 0, "all is known"
    assert search(tmp_path, Maker(), most=5).made == 2


def test_failures_are_remembered(tmp_path: Path) -> None:
    make = Maker({1: {"status": "failed", "reason": "ValueError: no"}})
    outcome = search(tmp_path, make)
    failed = [one for one in outcome.found if one.status == "failed"]
    assert failed and failed[0].reason == "ValueError: no" and len(make.made) == 3
    again = Maker()
    assert search(tmp_path, again).made == 0
    assert search(tmp_path, again, retry=True).made == len(failed)


def test_after_one_ran_out_of_memory_no_larger_one_is_run(tmp_path: Path) -> None:
    make = Maker({2: {"status": "out of memory", "reason": "no"}})
    search(tmp_path, make, most=8)
    at = next(i for i, name in enumerate(make.made) if name.startswith("batch 2"))
    assert all(name.startswith(("batch 1", "batch 2")) for name in make.made[at:])


def test_points_of_one_program_are_measured_once(tmp_path: Path) -> None:
    make = Maker()
    same = lambda point: Prediction(**{**_fields(predict(point)), "planned": str(point.settings["batch"])})  # noqa: E731
    outcome = search(tmp_path, make, most=8, predict=same)
    assert len(make.made) == 4 and "the same program as 1" in "\n".join(lines_of(outcome))


def _fields(prediction: Prediction) -> dict[str, Any]:
    return {name: getattr(prediction, name) for name in Prediction.__slots__}


@pytest.mark.parametrize(
    ("name", "said"), [("torch", "torch was 9 and is 10"), ("wholestep", "wholestep was abc and is 10")]
)
def test_another_version_is_noticed_and_measured_again(tmp_path: Path, name: str, said: str) -> None:
    search(tmp_path, Maker())
    outcome = search(tmp_path, Maker(), version={**VERSION, name: "10"})
    assert outcome.made == 3 and any(f"3 results are no longer counted: {said}" in note for note in outcome.notes)


def test_another_program_is_noticed_and_measured_again(tmp_path: Path) -> None:
    search(tmp_path, Maker(), most=8)
    edited = lambda point: Prediction(**{**_fields(predict(point)), "program": "another"})  # noqa: E731
    outcome = search(tmp_path, Maker(), most=8, predict=edited)
    assert outcome.made == 8 and "8 results are no longer counted" in outcome.notes[0]


def test_a_changed_recipe_keeps_what_is_still_of_it(tmp_path: Path) -> None:
    search(tmp_path, Maker(), most=8)
    outcome = search(tmp_path, Maker(), most=8, batch="[2, 4, 16]")
    assert outcome.made == 2 and outcome.notes == [
        "the recipe has changed: 4 results are about points that it no longer has"
    ]


def test_where_nothing_can_be_made_the_reason_is_the_error(tmp_path: Path) -> None:
    with pytest.raises(WholestepError, match="no such model"):
        search(tmp_path, Maker(), predict=lambda point: Prediction(reason="no such model"))


RECORDED = '{"format": "wholestep-search-1", "rows": [%s]}'
ROW = '{"key": "a", "status": "ok"%s}'
DAMAGED = ["1", *(ROW % more for more in ("", ', "seconds": 0', ', "seconds": "x"', ', "seconds": 1, "made_with": 3'))]


@pytest.mark.parametrize("text", ["not JSON", "[]", *(RECORDED % row for row in DAMAGED)])
def test_a_file_that_is_not_ours_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.search.json"
    path.write_text(text)
    with pytest.raises(WholestepError, match=r"recipe\.search\.json"):
        search(tmp_path, Maker())
    assert path.read_text() == text


def test_for_programs_and_as_a_picture(tmp_path: Path) -> None:
    outcome = search(tmp_path, Maker())
    facts = json.loads(json.dumps(as_json(outcome)))
    assert facts["points"][0]["key"] == facts["best"] and facts["measured_now"] == 3
    assert [point["status"] for point in facts["points"]] == ["measured"] * 3 + ["predicted"] * 5
    assert facts["points"][0]["measured"]["rate"] == pytest.approx(64 / 0.026)
    drawn = picture(outcome)
    assert drawn.count('class="measured"') == 4 and drawn.count('class="best"') == 2 and "best: batch 8" in drawn
