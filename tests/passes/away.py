"""Plans that move all that can move, and graphs run by themselves, for tests of any model."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.graph.keys import value_keys
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.graph.views import is_cheap_view
from wholestep.lower import lower_interpret
from wholestep.ops.record import may_recompute
from wholestep.passes.trips import Trips
from wholestep.plan.budget import ForSpeed


def movable(graph: TrainingGraph) -> list[str]:
    """Keys of values that could leave the card, time or not."""
    trips = Trips(graph)
    return sorted({key for node, key in value_keys(graph).items() if trips.why_not(node) is None})


def all_away(graph: TrainingGraph, *, state: bool = True, half_recomputed: bool = False) -> Plan:
    """Every value that can, and all state; or half of the values recomputed from the rest."""
    keys = movable(graph)
    again: list[str] = []
    if half_recomputed:
        by_key = {key: node for node, key in value_keys(graph).items()}
        again = [k for k in keys[::2] if may_recompute(by_key[k]) and not is_cheap_view(by_key[k])]
        again = [k for k in again if not k.partition("/")[0].endswith("*")]  # what a layer hands on stays
        keys = [k for k in keys if k not in again]
    has_state = any(entry.role is Role.STATE for entry in graph.inputs)
    return Plan(
        host=tuple(keys),
        recompute=tuple(again),
        state={"*": "host"} if state and has_state else {},
    )


def run_graph(graph: TrainingGraph, steps: int = 2, **options: Any) -> list[torch.Tensor]:
    """Everything that steps of a graph return and write, from inputs that are the same at every call."""
    source = torch.Generator().manual_seed(5)
    inputs = []
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        fake = node.meta["val"]
        if fake.is_floating_point():
            value = torch.randn(fake.shape, generator=source, dtype=torch.float64).to(fake.dtype)
            value = value.abs() * 0.01 if entry.role in (Role.STATE, Role.HYPER) else value
        else:
            value = torch.randint(0, 3, fake.shape, generator=source).to(fake.dtype)
        inputs.append(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value))
    runner = lower_interpret(graph, **options)
    returned = [value for _ in range(steps) for value in runner(inputs) if isinstance(value, torch.Tensor)]
    found = [*returned, *inputs]
    assert all(bool(value.isfinite().all()) for value in found)
    return found


class Away(ForSpeed):
    """In the place of the planner: everything leaves."""

    moved = 0
    half_recomputed = False

    def plan(self, prepared: object) -> Plan:
        graph = prepared.graph  # type: ignore[attr-defined]
        plan = all_away(graph, half_recomputed=self.half_recomputed)
        Away.moved += len(plan.host) + len(plan.state)
        return plan
