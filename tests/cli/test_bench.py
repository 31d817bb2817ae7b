"""`wholestep bench` and `wholestep compare` as commands: exit codes, one line on bad input, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_workloads import OWN_PASS, fake, row_of
from tests.cli.calls import Call

from wholestep.bench.harness import Case
from wholestep.bench.results import save
from wholestep.bench.workloads import WORKLOADS

OWN = "tests.bench.fake_workloads:"


@pytest.fixture(autouse=True)
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small workload more in the table; rows are made in this process; the folder is empty; there is no GPU."""

    def run(case: Case, limit: float) -> dict[str, Any]:
        return row_of(case.contender.split("+")[0], case.workload)

    def run_small(workload: Any, contenders: list[str], seed: int) -> list[dict[str, Any]]:
        return [row_of(name, workload) for name in contenders]

    from wholestep.bench import harness, smoke

    monkeypatch.setitem(WORKLOADS, "line", fake())
    monkeypatch.setitem(harness.run_table.__kwdefaults__, "run", run)
    monkeypatch.setitem(smoke.run_smoke.__kwdefaults__, "run", run_small)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


def test_list_as_a_table_and_as_json(call: Call) -> None:
    done = call("bench", "--list")
    assert done.code == 0 and "resnet-50" in done.out and "TBD's" in done.out.splitlines()[0]
    listed = json.loads(call("bench", "--list", "--json").out)
    assert {row["name"] for row in listed} == set(WORKLOADS)
    assert all({"domain", "unit", "data", "tbd", "summary", "smoke", "gpu"} <= set(row) for row in listed)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("resnet50", "did you mean resnet-50?"),
        ("nothing-like-it-at-all", "--list"),
        ("line --against eagr", "did you mean eager?"),
        ("line --against quantum", "there are eager, compile"),
        ("line --against no_module:step", "no_module"),
        (f"line --against {OWN}lasy", "did you mean tests.bench.fake_workloads:lazy?"),
        ("line --with nowhere.py", "no such file"),
        ("--suite paper", "did you mean papers?"),
        ("--suite papers --out nowhere.json", "nowhere.json"),
        ("--smoke --steps 3", "--smoke takes no"),
        ("line --steps 0", "--steps"),
        ("line --jobs 2", "--jobs 2 without a GPU"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(call: Call, arguments: str, said: str, tmp_path: Path) -> None:
    done = call("bench", *arguments.split())
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err
    assert not list(tmp_path.glob("*.json")), "nothing is measured before the input is known to be good"


def test_a_table_is_measured_printed_and_gone_on_with(call: Call, tmp_path: Path) -> None:
    arguments = ("bench", "line", "--against", f"{OWN}plain,wholestep-interpret", "--out", "r.json")
    done = call(*arguments)
    assert done.code == 0, done.err
    assert (
        "vs best peer" in done.out
        and "wholestep-interpret" in done.out
        and "3 rows made" in done.err
        and "no GPU" in done.err
    )
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["contender"] == "eager"
    done = call(*arguments, "--json")
    assert "0 rows made, 3 kept" in done.err and len(json.loads(done.out)["rows"]) == 3


def test_own_passes_are_a_row_more(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_PASS)
    done = call("bench", "line", "--against", "wholestep-interpret", "--with", "mine.py", "--json")
    assert [row["contender"] for row in json.loads(done.out)["rows"]] == [
        "eager", "wholestep-interpret", "wholestep-interpret+mine"
    ]  # fmt: skip


def test_peers_may_fail_but_ours_must_not(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("bench", "line", "--against", f"{OWN}broken,{OWN}lazy,wholestep-interpret")
    assert done.code == 0 and "DEPARTS" in done.out and "failed: RuntimeError" in done.out
    from wholestep.bench import harness

    wrong = lambda case, limit: row_of(OWN + "lazy" if "wholestep" in case.contender else "eager", case.workload)  # noqa: E731
    monkeypatch.setitem(harness.run_table.__kwdefaults__, "run", wrong)
    assert call("bench", "line", "--against", "wholestep-interpret", "--fresh").code == 1


def test_ctrl_c_says_how_to_go_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(case: Case, limit: float) -> dict[str, Any]:
        raise KeyboardInterrupt

    from wholestep.bench import harness

    monkeypatch.setitem(harness.run_table.__kwdefaults__, "run", stop)
    done = call("bench", "line")
    assert done.code == 130 and "the same command continues" in done.err


def test_smoke_checks_and_tells_by_its_exit_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("bench", "--smoke", "line")
    assert done.code == 0 and "line trains, captured as in eager" in done.out and "whole step" in done.out, (
        done.out + done.err
    )
    done = call("bench", "--smoke", "line", "--against", OWN + "lazy", "--json")
    assert done.code == 1 and "lazy" in json.loads(done.out)["problems"][0]


def test_papers_beside_results(call: Call) -> None:
    done = call("bench", "--suite", "papers")
    assert done.code == 0 and "Hector" in done.out and "not measured yet" in done.out and "no results file" in done.err
    assert len(json.loads(call("bench", "--suite", "papers", "--json").out)) == 10


def test_compare_says_what_moved_and_fails_when_asked(call: Call, tmp_path: Path) -> None:
    row = row_of("eager")
    slow = json.loads(json.dumps(row))
    slow["step_ms"] |= {"median": row["step_ms"]["median"] * 9, "interval": [1e6, 1e7]}
    save(tmp_path / "a.json", [row])
    save(tmp_path / "b.json", [slow])
    done = call("compare", "a.json", "b.json")
    assert done.code == 0 and done.out.startswith("slower"), done.out
    assert call("compare", "a.json", "b.json", "--fail-on", "slower").code == 1
    assert call("compare", "b.json", "a.json", "--fail-on", "slower").code == 0
    assert json.loads(call("compare", "a.json", "b.json", "--json").out)["changes"][0]["verdict"] == "slower"
    assert "1 row as before" in call("compare", "a.json", "a.json").out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("a.json nowhere.json", "nowhere.json"),
        ("a.json a.json --fail-on slow", "did you mean slower?"),
        ("a.json other.json", "holds no results"),
    ],
)
def test_compare_refuses_what_it_cannot_read(call: Call, tmp_path: Path, arguments: str, said: str) -> None:
    save(tmp_path / "a.json", [])
    (tmp_path / "other.json").write_text("{}")
    done = call("compare", *arguments.split())
    assert done.code == 2 and said in done.err and len(done.err.strip().splitlines()) == 1, done.err


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_help_fits_80_columns_and_has_examples(call: Call, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = call(command, "--help")
    assert done.code == 0 and f"  wholestep {command}" in done.out and "Examples:" in done.out
    assert max(map(len, done.out.splitlines())) <= 80
