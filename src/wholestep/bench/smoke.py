"""The smoke run: every workload at its small size on the CPU, eager and captured, and whether that looks like training.

It checks, and measures nothing: two workloads run at a time with one thread each, all contenders of a workload in one process.
What must hold: every loss is finite, losses fall, and the captured step's losses are those of eager PyTorch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from wholestep.bench import process
from wholestep.bench.child import make_request
from wholestep.bench.losses import trouble
from wholestep.bench.process import ask_child
from wholestep.bench.protocol import SMOKE
from wholestep.bench.results import Row, judged
from wholestep.bench.workload import Workload
from wholestep.disk import json_ready

CONTENDERS = ("eager", "wholestep-interpret")
LIMIT = 180.0
"""Seconds for one workload; most take ten."""
WORKERS = 2

Run = Callable[[Workload, Sequence[str], int], list[Row]]
"""(workload, contenders, seed) -> their rows."""


def run_workload(workload: Workload, contenders: Sequence[str], seed: int) -> list[Row]:
    """All contenders of a workload, in one process."""
    request = make_request(
        workload.name, contenders, size="smoke", device="cpu", seed=seed, protocol=SMOKE, own_passes=None
    )
    answer = ask_child(request, LIMIT, threads=1)
    status = "failed" if answer.status == "ok" else answer.status
    head = {"workload": workload.name, "size": "smoke", "device": "cpu", "seed": seed, "sizes": workload.smoke}
    missing = [name for name in contenders if name not in {row["contender"] for row in answer.rows}]
    reason = answer.reason or "the process ended without an answer"
    lacking = [{**head, "contender": name, "status": status, "reason": reason} for name in missing]
    return [json_ready({**row, "protocol": SMOKE.to_json()}) for row in [*answer.rows, *lacking]]


def run_smoke(
    workloads: Sequence[Workload], contenders: Sequence[str] = CONTENDERS, *, seed: int = 0, run: Run = run_workload,
    tell: Callable[[Workload, list[Row]], None] = lambda workload, rows: None,
) -> list[Row]:  # fmt: skip
    """The rows of all workloads; `tell` hears of each as it is done."""
    found: list[Row] = []
    workers = min(WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        coming = {workload.name: pool.submit(run, workload, contenders, seed) for workload in workloads}
        try:
            for workload in workloads:
                rows = judged(coming[workload.name].result())
                tell(workload, rows)
                found += rows
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in list(process.running):
                process.end(child)
            raise
    return found


def problems(rows: Sequence[Row]) -> list[str]:
    """What does not hold, one line each; a package that is not installed is no fault of anybody's."""
    found = []
    for row in rows:
        said = None
        if row["status"] == "ok":
            said = trouble(row["curve"]) or row.get("departs")
        elif row["status"] != "not installed":
            said = f"{row['status']}: {row['reason']}"
        if said is not None:
            found.append(f"{row['workload']} by {row['contender']}: {said}")
    return found
