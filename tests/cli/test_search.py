"""`wholestep search`: points predicted, one measured in a process of its own, remembered; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.calls import Call, program

RECIPE = """format = 1
verbs = [{verbs}]
[search]
model = "own_training:setup"
backend = "interpret"
{search}
[end]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return program(tmp_path, monkeypatch)


def write(folder: Path, search: str, verbs: str = "") -> None:
    (folder / "recipe.toml").write_text(RECIPE.format(search=search, verbs=verbs))


def test_a_point_is_measured_by_itself_and_remembered(call: Call, folder: Path) -> None:
    write(folder, 'set = { width = [8, 16] }\nmemory = ["1KiB", "1GiB"]', '{ recompute = "0" }')
    done = call("search", "recipe.toml", "--measure", "1", "--json", "--out", "best.toml")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    best = found["points"][0]
    assert best["status"] == "measured" and best["key"] == found["best"] and found["unit"] == "samples"
    assert (
        best["measured"]["rate"] == pytest.approx(5 / best["measured"]["seconds"])
        and best["measured"]["peak_bytes"] > 0
    )
    assert [point["status"] for point in found["points"]] == ["measured", "predicted", "does not fit", "does not fit"]
    assert (
        "wholestep train own_training:setup --memory 1GiB" in done.err
        and "recompute" in (folder / "best.toml").read_text()
    )
    assert (folder / "recipe.search.svg").read_text().startswith("<svg")
    again = call("search", "recipe.toml", "--measure", "1")
    assert again.code == 0 and "measuring" not in again.err and "4 points: 1 measured" in again.out


def test_nothing_is_measured_where_only_predictions_are_asked_for(call: Call, folder: Path) -> None:
    write(folder, "set = { width = [8, 16] }")
    done = call("search", "recipe.toml", "--measure", "0", "--device", "h200")
    assert done.code == 0 and "2 points: 2 predicted" in done.out and not (folder / "recipe.search.json").exists()


def test_a_point_that_fails_is_a_row_and_exit_1(call: Call, folder: Path) -> None:
    write(folder, "")
    done = call("search", "recipe.toml", "--measure", "1", "--limit", "1")
    assert done.code == 1 and "timed out: took more than 1 s" in done.out
    rows = json.loads((folder / "recipe.search.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["timed out"]


@pytest.mark.parametrize(
    ("search", "verbs", "arguments", "said"),
    [
        ("", "", "nowhere.toml", "there is no recipe nowhere.toml"),
        ("bach = 4", "", "recipe.toml", "did you mean batch?"),
        ("set = { widht = 8 }", "", "recipe.toml", "did you mean width?"),
        ("", '{ recomptue = "0" }', "recipe.toml", "did you mean recompute?"),
        ("", '{ recompute = "O" }', "recipe.toml", "line 1 of recipe.toml"),
        ("", "", "recipe.toml --clock cup", "did you mean cpu?"),
        ("", "", "recipe.toml --device h200", "--measure 0"),
        ("", "", "recipe.toml --measure 0 --device h20", "did you mean"),
        ("", "", "recipe.toml --svg nowhere/a.svg", "there is no folder nowhere"),
        ("", "", "recipe.toml --record nowhere/a.json", "nowhere/a.json cannot be written"),
        ("", "", "recipe.toml --record own_training.py", "own_training.py cannot be read"),
        ("", "", "recipe.toml --mesure 3", "--measure"),
    ],
)
def test_bad_input_is_one_line(call: Call, folder: Path, search: str, verbs: str, arguments: str, said: str) -> None:
    write(folder, search, verbs)
    before = {path.name for path in folder.iterdir()}
    done = call("search", *arguments.split())
    lines = [line for line in done.err.strip().splitlines() if "predicting" not in line]
    assert done.code == 2 and said in done.err and len(lines) == 1, done.err
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before, "nothing is left behind"
