"""One point measured, in a process of its own: a Point in, a row out, whatever happens.

    python -m wholestep.search.measure REQUEST

The step is compiled as `compile` compiles it, its first step checked against eager PyTorch, warmed up and timed as `wholestep
bench` does. A process that ran out of memory, hangs or crashes is a row with its reason, and takes nothing else with it.
Compile caches are the user's own: what one point compiled, another need not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from wholestep.bench.process import ask_child
from wholestep.bench.protocol import Protocol
from wholestep.search.space import Point, recipe_of_lines

PROTOCOL = Protocol(seconds=20.0, warm_up_seconds=30.0)
Row = dict[str, Any]


def measure_in_child(point: Point, limit: float, *, clock: str = "wall", protocol: Protocol = PROTOCOL) -> Row:
    """The row of a point, made by a process of its own in at most `limit` seconds."""
    request = {
        "model": point.model, "sets": point.sets, "settings": point.settings, "lines": point.lines, "expects": point.expects,
        "source": point.source, "clock": clock, "protocol": protocol.to_json(), "folder": os.getcwd(),
    }  # fmt: skip
    return ask_child(json.dumps(request), limit, program="wholestep.search.measure", cold=False).row()


def answered(request: str) -> Row:
    """What the child does."""
    from wholestep.bench.measure import failure_of

    asked = json.loads(request)
    os.chdir(asked["folder"])  # a model of the user's own is found from there
    try:
        return {"status": "ok"} | measured(asked)
    except Exception as error:  # other people's models: anything may happen
        return failure_of(error)


class _Steps:
    """Batches as the training loop takes them."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def iterate(self, calls: Sequence[Any], number: int) -> Any:
        result = calls[0](self.batches.batch(number))
        return result[0] if isinstance(result, tuple) else result


def measured(asked: dict[str, Any]) -> Row:
    """Seconds of a step and bytes at its peak; raises whatever goes wrong."""
    from wholestep.api import compile
    from wholestep.bench.measure import Timed, sampled, summarised, warmed_up
    from wholestep.bench.memory import MemoryMeter
    from wholestep.bench.turns import my_turn, tune_in_turns
    from wholestep.profile.memory.profile import memory_profile
    from wholestep.train.job import make_job

    tune_in_turns()
    settings, protocol = asked["settings"], Protocol(**asked["protocol"])
    sizes = {name: settings.get(name) for name in ("batch", "seq", "precision", "data")}
    job = make_job(asked["model"], sets=asked["sets"], **sizes)
    recipe = recipe_of_lines(asked["lines"], asked["expects"], asked["source"])
    began = time.perf_counter()
    first = job.batches.batch(0)
    step = compile(
        job.model, job.loss_fn, job.optimizer, first, memory=settings.get("memory"),
        backend=settings.get("backend", "inductor"), recipe=recipe if len(recipe) else None, **job.compile_options,
    )  # fmt: skip
    device = step.subject.device
    meter = MemoryMeter(device)
    timed = Timed(_Steps(job.batches), [meter.watched(step)], device, _clock(asked["clock"]))
    with my_turn():
        timed.iterate()
        row: Row = {"first_step_seconds": time.perf_counter() - began}
        row |= warmed_up(timed, protocol)
        window = summarised(sampled(timed, protocol, meter))
    if device.type == "cuda":
        peak = meter.read()["peak_bytes"]
    else:  # the allocator's own account: a resident set holds what compiling left behind
        peak = memory_profile(step, model=job.model, optimizer=job.optimizer, batch=first, settle=0).step_peak_bytes
    return row | {
        "seconds": window["median"] / 1e3, "interval": [value / 1e3 for value in window["interval"]],
        "steps": len(window["all"]), "peak_bytes": peak, "rung": step.rung, "loss": timed.curve[-1],
    }  # fmt: skip


def _clock(name: str) -> Callable[[], float]:
    """`cpu`: the processor's time, shared by the threads: what a step would take if nobody else used the machine."""
    if name == "wall":
        return time.perf_counter
    import torch

    threads = torch.get_num_threads()
    return lambda: time.process_time() / threads


if __name__ == "__main__":
    from wholestep.bench.child import answer

    answer(answered(request) for request in sys.argv[1:2])
