"""A workload of a few numbers, and contenders that go wrong in the ways real ones do."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from wholestep.bench.contenders import plain_step
from wholestep.bench.measure import attempt
from wholestep.bench.protocol import Protocol
from wholestep.bench.workload import Part, StepCall, Training, Workload, one_part

QUICK = Protocol(steps=6, least_steps=6, least_warm_up=5, most_warm_up=5)

OWN_PASS = """
from wholestep.passes.pipeline import compiler_pass

@compiler_pass(numerics="bitwise")
def leave_alone(graph):
    return graph
"""


def build(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
    """A straight line through a few points."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(4, sizes["width"]), nn.Dropout(sizes.get("dropout", 0.0)), nn.Linear(sizes["width"], 1)
    )
    model, x = model.to(device), torch.randn(3, 16, 4).to(device)
    batches = [{"x": one, "y": one.sum(1, keepdim=True)} for one in x]
    part = Part(
        name="line", model=model, loss_fn=lambda m, b: ((m(b["x"]) - b["y"]).square().mean(), {"x": b["x"].mean()}),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), example_batch=batches[0], clip_norm=1.0,
    )  # fmt: skip
    return one_part(part, lambda number: batches[number % 3], units=16)


def fake(name: str = "line", **changes: Any) -> Workload:
    facts: dict[str, Any] = {
        "name": name, "domain": "lines", "unit": "points", "data": "synthetic: points on a line", "summary": "a line",
        "build": build, "smoke": {"width": 8}, "gpu": {"width": 8},
    }  # fmt: skip
    return Workload(**(facts | changes))


def row_of(contender: str, workload: Workload | None = None, **rest: Any) -> dict[str, Any]:
    """The row of a contender, made in this process."""
    chosen = {
        "size": "smoke",
        "device": torch.device("cpu"),
        "seed": 0,
        "protocol": QUICK,
    } | rest
    with mock.patch(
        "wholestep.bench.memory.gc.collect"
    ):  # the heap of a test run is large, and takes longer than the row
        return attempt(workload or fake(), contender, **chosen)


# ---- contenders, named on the command line as tests.bench.fake_workloads:lazy ----


def plain(part: Part, precision: str) -> StepCall:
    """Does what eager does."""
    return plain_step(part, precision)


def lazy(part: Part, precision: str) -> StepCall:
    """Computes the loss and never trains."""

    def step(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            return part.loss_fn(part.model, batch)[0]  # type: ignore[misc]

    return step


def halved(part: Part, precision: str) -> StepCall:
    """Trains, on another loss."""
    inner = plain_step(part, precision)
    return lambda batch: inner(batch) / 2


def broken(part: Part, precision: str) -> StepCall:
    def step(batch: Any) -> torch.Tensor:
        raise RuntimeError("the device\nis on fire\nand so is the rest")

    return step


def greedy(part: Part, precision: str) -> StepCall:
    raise MemoryError("cannot have 9 TiB")


def greedy_on_gpu(part: Part, precision: str) -> StepCall:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")


def exploding(part: Part, precision: str) -> StepCall:
    inner = plain_step(part, precision)
    return lambda batch: inner(batch) * float("nan")


def no_function(part: Part, precision: str) -> Any:
    return 3
