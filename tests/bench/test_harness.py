"""A table of rows: made one by one, gone on with after a stop, each row in a process of its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_workloads import OWN_PASS, QUICK, fake, row_of

from wholestep.bench.harness import Case, planned, run_in_child, run_table
from wholestep.bench.own_code import load_passes
from wholestep.bench.process import _ending, ask_child
from wholestep.bench.results import load, save
from wholestep.errors import WholestepError

OWN = "tests.bench.fake_workloads:"
NAMES = ("eager", OWN + "plain", OWN + "broken")


def cases(*names: str, **changes: Any) -> list[Case]:
    facts = {"size": "smoke", "device": "cpu", "seed": 0, "protocol": QUICK} | changes
    return planned([fake("one"), fake("two")], names or NAMES, **facts)


class Maker:
    """Makes rows in this process and counts them; stops like Ctrl-C before row `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.made: list[str] = []
        self.stop = stop

    def __call__(self, case: Case, limit: float) -> dict[str, Any]:
        if len(self.made) == self.stop:
            raise KeyboardInterrupt
        self.made.append(case.name)
        return row_of(case.contender, case.workload, seed=case.seed)


def test_a_table_that_was_cut_short_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run_table(cases(), path, run=Maker(stop=1))
    kept = load(path)
    assert [row["contender"] for row in kept] == ["eager"]
    maker = Maker()
    outcome = run_table(cases(), path, run=maker)
    assert outcome.kept == 1 and len(maker.made) == 5 and len(load(path)) == 6
    assert load(path)[0] == kept[0], "the row of the first run is untouched"
    assert run_table(cases(), path, run=maker).made == 0 and len(maker.made) == 5


def test_retry_makes_failed_rows_again_and_fresh_makes_all(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_table(cases(), path, run=Maker())
    again = Maker()
    run_table(cases(), path, run=again, retry=True)
    assert again.made == [f"one by {OWN}broken", f"two by {OWN}broken"] and len(load(path)) == 6
    fresh = Maker()
    run_table(cases(), path, run=fresh, fresh=True)
    assert len(fresh.made) == 6


@pytest.mark.parametrize("changes", [{"seed": 1}, {"own": True}])
def test_a_row_made_with_something_else_is_made_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    path, file = tmp_path / "results.json", tmp_path / "mine.py"
    file.write_text(OWN_PASS)

    def table() -> list[Case]:
        own = {"own_passes": str(file), "passes_digest": load_passes(str(file)).digest} if "own" in changes else {}
        return cases("wholestep-interpret", **own)

    run_table(table(), path, run=Maker())
    if "own" in changes:
        file.write_text(OWN_PASS + "# another version\n")
        expected = ["one by wholestep-interpret+mine", "two by wholestep-interpret+mine"]
        later = table()
    else:
        expected = ["one by wholestep-interpret", "two by wholestep-interpret"]
        later = cases("wholestep-interpret", **changes)
    maker = Maker()
    run_table(later, path, run=maker)
    assert maker.made == expected and len(load(path)) == len(later)


def test_the_limit_stops_before_a_row_that_would_not_fit(tmp_path: Path) -> None:
    path, maker = tmp_path / "results.json", Maker()
    outcome = run_table(cases("eager"), path, run=maker, limit=1.0)
    assert outcome.stopped is not None and "one by eager" in outcome.stopped and maker.made == []
    run_table(cases("eager")[:1], path, run=maker)
    rows = load(path)
    rows[0]["wall_seconds"] = 500.0
    save(path, rows)
    stopped = run_table(cases("eager"), path, run=maker, limit=100.0).stopped
    assert stopped is not None and "takes about 500 s" in stopped


def test_a_row_cut_by_the_limit_of_the_table_is_no_row_and_one_cut_by_its_own_is(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    late = {"status": "timed out", "reason": "took more than 50 s"}
    outcome = run_table(cases("eager"), path, run=lambda case, limit: dict(late), limit=50.0, case_limit=600.0)
    assert "time ran out in one by eager" in str(outcome.stopped) and not path.exists()
    outcome = run_table(cases("eager"), path, run=lambda case, limit: dict(late), case_limit=50.0)
    assert outcome.stopped is None and [row["status"] for row in load(path)] == ["timed out"] * 2


def test_a_departing_row_is_flagged_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_table(cases("eager", OWN + "lazy")[:2], path, run=Maker())
    assert "departs" in json.loads(path.read_text())["rows"][1]


def test_a_file_of_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    save(path, [row_of("eager") | {"device": "cuda", "machine": {"device": "A100"}}])
    monkeypatch.setattr("wholestep.bench.machine.gpu_facts", lambda: {"device": "H200"})
    with pytest.raises(WholestepError, match="A100, and this is H200"):
        run_table(cases("eager", device="cuda"), path, run=Maker())


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"rows": []}'])
def test_a_file_that_is_not_ours_is_not_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(WholestepError, match=r"results\.json"):
        run_table(cases("eager"), path, run=Maker())
    assert path.read_text() == text


def test_a_row_is_made_by_a_process_of_its_own() -> None:
    from wholestep.bench.workloads import WORKLOADS

    case = planned([WORKLOADS["neumf"]], ["eager"], size="smoke", device="cpu", seed=0, protocol=QUICK)[0]
    row = run_in_child(case, 120.0)
    assert row["status"] == "ok", row
    assert len(row["curve"]) == 11 and row["curve"][-1] < row["curve"][0] and row["unit"] == "samples"


def test_a_process_that_takes_too_long_is_ended() -> None:
    began = time.monotonic()
    answer = ask_child("{}", 0.3)
    assert answer.status == "timed out" and "0 s" in answer.reason and time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("code", "err", "said"),
    [(-9, "", "SIGKILL, perhaps out of memory"), (1, "a\nValueError: b\n", "ValueError: b"), (3, "", "3")],
)
def test_a_process_without_an_answer_is_a_reason(code: int, err: str, said: str) -> None:
    assert said in _ending(code, err)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "no such file"), ("x = 1\n", "holds no pass"), ("1 / 0\n", "ZeroDivisionError")]
)
def test_a_file_without_passes_is_told(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(WholestepError, match=said):
        load_passes(str(path))


def test_a_recipe_is_a_row_more(tmp_path: Path) -> None:
    """As passes of one's own are: the file goes to Wholestep's compiler."""
    path = tmp_path / "again.toml"
    path.write_text('format = 1\nverbs = [{ recompute = "0" }]\n[end]\n')
    own = load_passes(str(path))
    assert own.passes == () and own.recipe == str(path)
    row = row_of("wholestep-interpret+again", recipe=own.recipe)
    assert row["status"] == "ok", row
    assert "recipe     1 line of again.toml" in str(row)
    path.write_text("format = 1\n")
    with pytest.raises(WholestepError, match="not whole"):
        load_passes(str(path))
