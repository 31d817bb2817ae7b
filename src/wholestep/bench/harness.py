"""The harness: which rows a table has, and making them one by one, each in a process of its own.

The results file is written after every row. The same command therefore goes on where an earlier one was cut short: a row that
is there and was made with the same sizes, seed, steps and passes is kept. A row that fails is a row, with its reason.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from wholestep.bench import machine
from wholestep.bench.child import make_request
from wholestep.bench.contenders import applies
from wholestep.bench.process import ask_child, end, running
from wholestep.bench.protocol import Protocol
from wholestep.bench.results import Row, judged, key_of, load, save
from wholestep.bench.turns import VARIABLE, taking_turns
from wholestep.bench.workload import Workload
from wholestep.disk import json_ready
from wholestep.errors import BadOption

LEAST_SECONDS = 20.0
"""No row is begun with less time left than importing torch and a few steps take."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row to be made."""

    workload: Workload
    contender: str
    size: str
    device: str
    seed: int
    protocol: Protocol
    own_passes: str | None = None
    passes_digest: str | None = None

    def head(self) -> Row:
        """What the row is about, and with what it is made."""
        head = {
            "workload": self.workload.name, "contender": self.contender, "size": self.size, "device": self.device,
            "seed": self.seed, "sizes": json_ready(getattr(self.workload, self.size)), "protocol": self.protocol.to_json(),
        }  # fmt: skip
        return head | ({"passes": self.passes_digest} if self.own_passes else {})

    def made(self, row: Row) -> bool:
        """Is `row` this one?"""
        return all(row.get(name) == value for name, value in self.head().items())

    @property
    def name(self) -> str:
        return f"{self.workload.name} by {self.contender}"


@dataclasses.dataclass(slots=True)
class Outcome:
    """The rows of the table so far, and why it ended before its end, if it did."""

    rows: list[Row]
    made: int = 0
    kept: int = 0
    stopped: str | None = None


Run = Callable[[Case, float], Row]
"""(case, seconds it may take) -> its row, at least with `status`."""


def planned(
    workloads: Sequence[Workload], contenders: Sequence[str], *, size: str, device: str, seed: int, protocol: Protocol,
    own_passes: str | None = None, passes_digest: str | None = None,
) -> list[Case]:  # fmt: skip
    """The cases in the order they are made. With passes of the user's own, Wholestep runs without them and with them."""
    cases = []
    for workload in workloads:
        for contender in contenders:
            if not applies(contender, workload):
                continue
            common: dict[str, Any] = {
                "workload": workload, "size": size, "device": device, "seed": seed, "protocol": protocol
            }  # fmt: skip
            cases.append(Case(contender=contender, **common))
            if own_passes is not None and contender in ("wholestep", "wholestep-interpret"):
                with_own = f"{contender}+{Path(own_passes).stem}"
                cases.append(
                    Case(
                        contender=with_own,
                        own_passes=os.path.abspath(own_passes),
                        passes_digest=passes_digest,
                        **common,
                    )
                )
    return cases


def run_in_child(case: Case, limit: float) -> Row:
    """The row of a case, made by a process of its own."""
    request = make_request(
        case.workload.name, [case.contender], size=case.size, device=case.device, seed=case.seed, protocol=case.protocol,
        own_passes=case.own_passes,
    )  # fmt: skip
    return ask_child(request, limit).row()


def run_table(
    cases: Sequence[Case], path: Path, *, run: Run = run_in_child, limit: float | None = None, case_limit: float = 600.0,
    retry: bool = False, fresh: bool = False, jobs: int = 1, tell: Callable[[str, int], None] = lambda name, done: None,
) -> Outcome:  # fmt: skip
    """Make the rows that are not there yet; `tell` hears which is begun and how many cases are done.

    With several `jobs` so many rows are at work at once: they compile side by side and are measured one at a time.
    """
    deadline = None if limit is None else time.monotonic() + limit
    outcome = Outcome([] if fresh or not path.exists() else load(path))
    _refuse_another_gpu(outcome.rows, cases, path)
    table = _Table(cases, path, outcome, deadline, run, case_limit, retry, tell, jobs)
    with taking_turns(jobs):
        table.make()
    return outcome


class _Table:
    """Rows being made, by one worker or several."""

    def __init__(
        self, cases: Sequence[Case], path: Path, outcome: Outcome, deadline: float | None, run: Run, case_limit: float,
        retry: bool, tell: Callable[[str, int], None], jobs: int,
    ) -> None:  # fmt: skip
        self.waiting, self.path, self.outcome, self.deadline = iter(cases), path, outcome, deadline
        self.run, self.case_limit, self.retry, self.tell, self.jobs = run, case_limit, retry, tell, jobs
        self.lock = threading.Lock()

    def make(self) -> None:
        if self.jobs == 1:
            return self._work()
        with ThreadPoolExecutor(self.jobs) as workers:
            begun = [workers.submit(self._work) for _ in range(self.jobs)]
            try:
                for one in begun:
                    one.result()
            except BaseException:  # Ctrl-C: nobody waits for the rows any more
                self.outcome.stopped = "interrupted"
                for child in list(running):
                    end(child)
                raise

    def _work(self) -> None:
        while True:
            with self.lock:
                case = self._next()
                if case is None:
                    return
                left = self._left()
                self.tell(case.name, self.outcome.made + self.outcome.kept)
            began = time.monotonic()
            row = self.run(case, min(left, self.case_limit))
            with self.lock:
                self._add(case, row, left, time.monotonic() - began)

    def _next(self) -> Case | None:
        """The next case without a row; None at the end, or when too little time is left for it."""
        for case in self.waiting if self.outcome.stopped is None else ():
            there = self._there(case)
            if there is not None and case.made(there) and not (self.retry and there["status"] != "ok"):
                self.outcome.kept += 1
                continue
            left, needed = self._left(), _expected_seconds(self.outcome.rows, case)
            if left < needed:
                self.outcome.stopped = f"{max(left, 0):.0f} s are left and {case.name} takes about {needed:.0f} s"
                return None
            return case
        return None

    def _add(self, case: Case, row: Row, left: float, seconds: float) -> None:
        if row["status"] == "timed out" and left < self.case_limit:  # cut by the limit of the table, not by its own
            self.outcome.stopped = f"time ran out in {case.name}"
            return
        row = case.head() | row | case.head() | {"wall_seconds": seconds}
        if self.jobs > 1 or VARIABLE in os.environ:
            row["jobs"] = max(self.jobs, 2)  # its first step shared the CPU with others
        there = self._there(case)
        self.outcome.rows = judged([*(other for other in self.outcome.rows if other is not there), json_ready(row)])
        self.outcome.made += 1
        save(self.path, self.outcome.rows)

    def _there(self, case: Case) -> Row | None:
        return next((row for row in self.outcome.rows if key_of(row) == (case.workload.name, case.contender)), None)

    def _left(self) -> float:
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()


def _expected_seconds(rows: Sequence[Row], case: Case) -> float:
    """As long as half the rows of the same contender took so far, at this size; not less than a start takes."""
    known = [row["wall_seconds"] for row in rows if row["contender"] == case.contender and row["size"] == case.size]
    return max(LEAST_SECONDS, statistics.median(known)) if known else LEAST_SECONDS


def _refuse_another_gpu(rows: Sequence[Row], cases: Sequence[Case], path: Path) -> None:
    """One table, one GPU: a file begun on another is not gone on with."""
    here = machine.gpu_facts().get("device") if any(case.device == "cuda" for case in cases) else None
    there = {row["machine"]["device"] for row in rows if row["device"] == "cuda" and "machine" in row}
    if here is not None and there - {here}:
        raise BadOption(
            f"{path} holds rows of {', '.join(sorted(there))}, and this is {here}",
            hint="give another --out, or --fresh to start over",
        )
