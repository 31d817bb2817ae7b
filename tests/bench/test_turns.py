"""Rows side by side: all are made, each once, and never two are timed at the same moment."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_harness import Maker, cases

from wholestep.bench.harness import Case, run_table
from wholestep.bench.turns import VARIABLE, my_turn, taking_turns


class Slow(Maker):
    """Takes its time, and sees how many others do."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__(stop)
        self.at_work = self.most = 0
        self.lock = threading.Lock()

    def __call__(self, case: Case, limit: float) -> dict[str, Any]:
        with self.lock:
            self.at_work += 1
            self.most = max(self.most, self.at_work)
        time.sleep(0.05)
        try:
            return super().__call__(case, limit)
        finally:
            with self.lock:
                self.at_work -= 1


def test_all_rows_are_made_once_side_by_side(tmp_path: Path) -> None:
    maker, path = Slow(), tmp_path / "rows.json"
    outcome = run_table(cases(), path, run=maker, jobs=3)
    assert sorted(maker.made) == sorted(case.name for case in cases()) and outcome.made == len(cases())
    assert maker.most == 3 and all(row["jobs"] == 3 for row in outcome.rows)
    assert run_table(cases(), path, run=maker, jobs=3).kept == len(cases())
    assert VARIABLE not in os.environ


def test_an_interruption_keeps_the_rows_made(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        run_table(cases(), path, run=Slow(stop=2), jobs=2)
    maker = Slow()
    assert run_table(cases(), path, run=maker, jobs=2).kept == 2 and len(maker.made) == len(cases()) - 2


def test_turns_exclude_each_other() -> None:
    inside: list[int] = []
    most = 0

    def measure() -> None:
        nonlocal most
        with my_turn():
            inside.append(1)
            most = max(most, len(inside))
            time.sleep(0.02)
            inside.pop()

    for jobs, expected in ((4, 1), (1, 4)):
        most = 0
        with taking_turns(jobs):
            threads = [threading.Thread(target=measure) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert most == expected
