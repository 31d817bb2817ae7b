"""Stand-ins for the planner: two or three plans for any graph, from its predicted profile, in no time."""

from __future__ import annotations

from typing import Any

from wholestep.cost.devices import Device
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.footprint.predict import predict_profile
from wholestep.plan.frontier import Apply, Point

KINDS = ("weights", "optimizer state", "gradients", "saved activations", "temporaries", "workspace")


def frontier(
    graph: TrainingGraph,
    device: Device,
    apply: Apply | None,
    *,
    targets: int = 2,
    near: int | None = None,
    timed: bool = True,
    room: Any = None,
) -> list[Point]:
    split = predict_profile(graph, rounding=512).at_peak
    kinds = {kind: split.get(kind, 0) for kind in KINDS}
    kinds["temporaries"] += sum(split.values()) - sum(kinds.values())
    points = []
    for number, part in enumerate((1.0, 0.6, 0.3)):
        breakdown = kinds | {"saved activations": int(kinds["saved activations"] * part)}
        names = tuple(f"blocks.*.mlp/gelu_{i}" for i in range(number))
        why = {name: f"frees {name}, made from what is kept" for name in names}
        change = f"recompute {names[-1]}" if names else ""
        seconds = 0.010 * (1 + 0.1 * number)
        points.append(Point(Plan(recompute=names, reasons=why), sum(breakdown.values()), seconds, breakdown, change))
    return points


def leanest(graph: TrainingGraph, device: Device, apply: Apply, room: Any = None) -> Point:
    return frontier(graph, device, None)[-1]
