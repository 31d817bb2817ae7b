"""The process in which rows are measured: `python -m wholestep.bench.child REQUEST`, one JSON line per row as the answer.

In: a request (see `make_request`) as JSON. Out: on stdout, one line per contender that begins with MARK; whatever else systems
print is left alone. Normally a process measures one contender, so that no system sees what another left behind; a smoke run,
which measures nothing, has several in one process to import torch once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wholestep.bench.protocol import Protocol
from wholestep.bench.turns import tune_in_turns

MARK = '{"wholestep_bench_row": '


def make_request(
    workload: str,
    contenders: Sequence[str],
    *,
    size: str,
    device: str,
    seed: int,
    protocol: Protocol,
    own_passes: str | None,
) -> str:
    """What the parent sends."""
    asked = {"workload": workload, "contenders": list(contenders), "size": size, "device": device, "seed": seed}
    return json.dumps(asked | {"protocol": protocol.to_json(), "own_passes": own_passes})


def rows_in(output: str) -> list[dict[str, Any]]:
    """What the parent reads."""
    return [json.loads(line)["wholestep_bench_row"] for line in output.splitlines() if line.startswith(MARK)]


def answers(request: str) -> Iterator[dict[str, Any]]:
    """The rows a request asks for."""
    import torch

    from wholestep.bench.measure import attempt, failure_of
    from wholestep.bench.own_code import OwnPasses, load_passes
    from wholestep.bench.workloads import WORKLOADS

    asked = json.loads(request)
    for contender in asked["contenders"]:
        own_passes = asked["own_passes"] if "+" in contender else None
        try:
            own = load_passes(own_passes) if own_passes else OwnPasses((), "")
        except Exception as error:
            yield {"workload": asked["workload"], "contender": contender, **failure_of(error)}
            continue
        yield attempt(
            WORKLOADS[asked["workload"]], contender, size=asked["size"], device=torch.device(asked["device"]),
            seed=asked["seed"], protocol=Protocol(**asked["protocol"]), passes=own.passes,
            recipe=own.recipe,
        )  # fmt: skip


def _end_with(parent: int) -> None:
    """A parent that was killed leaves nobody to read the answer; compiler processes of ours go as well."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def answer(rows: Iterable[dict[str, Any]]) -> None:
    """Send the rows to the parent as they are made, and end when it does."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    for row in rows:
        print("\n" + MARK + json.dumps(row) + "}", flush=True)


def main() -> None:
    tune_in_turns()
    answer(answers(sys.argv[1]))


if __name__ == "__main__":
    main()
