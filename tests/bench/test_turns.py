"""Rows side by side: all are made, each once, and never two are timed at the same moment."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_harness import Maker, cases

from wholestep.bench import turns
from wholestep.bench.harness import Case, run_table
from wholestep.bench.turns import VARIABLE, WORKERS, my_turn, side_by_side, taking_turns, tune_in_turns
from wholestep.lower.footprint import scratch

PATIENCE = 20.0
"""Seconds within which threads that may run side by side must have met."""


class Company(Maker):
    """Makes its first rows only when `expected` callers are at work at once, and counts how many ever were."""

    def __init__(self, expected: int = 1, stop: int | None = None) -> None:
        super().__init__(stop)
        self.at_work = self.most = 0
        self.expected, self.complete = expected, threading.Event()
        self.lock = threading.Lock()

    def __call__(self, case: Case, limit: float) -> dict[str, Any]:
        with self.lock:
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            if self.at_work == self.expected:
                self.complete.set()
        try:
            assert self.complete.wait(PATIENCE), "nobody came"
            with self.lock:  # rows made in threads of one process would share its seed
                return super().__call__(case, limit)
        finally:
            with self.lock:
                self.at_work -= 1


def test_all_rows_are_made_once_side_by_side(tmp_path: Path) -> None:
    maker, path = Company(expected=3), tmp_path / "rows.json"
    outcome = run_table(cases(), path, run=maker, jobs=3)
    assert sorted(maker.made) == sorted(case.name for case in cases()) and outcome.made == len(cases())
    assert maker.most == 3 and all(row["jobs"] == 3 for row in outcome.rows)
    assert run_table(cases(), path, run=maker, jobs=3).kept == len(cases())
    assert VARIABLE not in os.environ


def test_an_interruption_keeps_the_rows_made(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        run_table(cases(), path, run=Company(stop=2), jobs=2)
    maker = Company()
    assert run_table(cases(), path, run=maker, jobs=2).kept == 2 and len(maker.made) == len(cases()) - 2


@pytest.mark.parametrize(("jobs", "expected"), [(4, 1), (1, 4)])
def test_turns_exclude_each_other(jobs: int, expected: int) -> None:
    inside: list[int] = []
    most: list[int] = []
    met = threading.Barrier(4, timeout=PATIENCE)

    def measure() -> None:
        with my_turn():
            inside.append(1)
            if expected == 4:
                met.wait()  # nobody leaves before all are in
            else:
                time.sleep(0.02)
            most.append(len(inside))
            if expected == 4:
                met.wait()
            inside.pop()

    with taking_turns(jobs):
        threads = [threading.Thread(target=measure) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert max(most) == expected and len(most) == 4


def test_a_turn_within_a_turn_is_the_same_one() -> None:
    def take() -> None:
        with my_turn():
            pass

    with taking_turns(2):
        with my_turn():
            take()
        # given back at the end of the outer one, so another may have it
        other = threading.Thread(target=take, daemon=True)
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()


def test_a_table_inside_turns_takes_part_in_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "turn"))
    with taking_turns(2):
        assert os.environ[VARIABLE] == str(tmp_path / "turn")
    assert os.environ[VARIABLE] == str(tmp_path / "turn")


def test_rows_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.delenv(WORKERS, raising=False)
    with taking_turns(4):
        assert os.environ[WORKERS] == "3"
    assert WORKERS not in os.environ
    monkeypatch.setenv(WORKERS, "7")
    with taking_turns(4):
        assert os.environ[WORKERS] == "7", "the user's own number"
    assert os.environ[WORKERS] == "7"


def test_kernels_are_tuned_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    held: list[bool] = []
    monkeypatch.setattr(
        heuristics.CachingAutotuner, "benchmark_all_configs", lambda self, *args: held.append(turns._mine.held) or args
    )
    unpatched = heuristics.CachingAutotuner.benchmark_all_configs
    monkeypatch.setattr(scratch, "alone", scratch.alone)
    tune_in_turns()
    assert heuristics.CachingAutotuner.benchmark_all_configs is unpatched, "alone there is nobody to wait for"
    assert scratch.alone is not my_turn
    with taking_turns(2):
        tune_in_turns()
        assert heuristics.CachingAutotuner.benchmark_all_configs(None, 3) == (3,) and held == [True]
        assert scratch.alone is my_turn


def test_work_side_by_side_is_done_in_turns_and_errors_are_raised() -> None:
    seen: list[tuple[int, bool]] = []
    side_by_side(lambda item: seen.append((item, VARIABLE in os.environ)), range(5), jobs=3)
    assert sorted(seen) == [(i, True) for i in range(5)] and VARIABLE not in os.environ
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda item: print(1 / item), [1, 0], jobs=1)
