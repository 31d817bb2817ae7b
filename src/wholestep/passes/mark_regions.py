"""What a plan fuses is marked as a region of its own, which lowering then compiles by itself.

In: a graph, and a Plan whose `fuse` names modules, or operators that a line of a recipe matched. Out: the graph whose nodes know
their region: one for every module, forward and backward apart. Equal ones still compile once.
"""

from __future__ import annotations

from torch import fx

from wholestep.errors import BadOption, did_you_mean
from wholestep.graph.layers import holds_module, without_calls
from wholestep.graph.plan import Plan
from wholestep.graph.training_graph import TrainingGraph, matched_by, module_of, phase_of
from wholestep.passes.pipeline import compiler_pass

MATCHED = "matched: "
"""Before the line of a recipe, in `Plan.fuse`."""
THE_MODEL = "the model"
"""The region of all that the empty path names."""


@compiler_pass(numerics="rounding")
def mark_regions(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """node => node of region `layers.0.mlp`, for every node that `plan.fuse` names; the innermost counts."""
    if not plan.fuse:
        return graph
    nodes = [node for node in graph.operations() if phase_of(node) != "update"]
    for place in sorted(plan.fuse, key=lambda place: (place != "", place.count("."))):
        named = {node: region for node in nodes if (region := _region(node, place)) is not None}
        if not named:
            known = sorted({without_calls(module_of(node) or "") for node in nodes} - {""})
            hint = did_you_mean(place, known, "the plan was made for another model or version: plan again")
            raise BadOption(f"the plan fuses {place!r}, which the step does not compute", hint=hint)
        for node, region in named.items():
            node.meta["custom"] = {**(node.meta.get("custom") or {}), "region": region}
    return graph


def _region(node: fx.Node, place: str) -> str | None:
    """The module that a place names around a node, or the marked operators it belongs to."""
    module = module_of(node) or ""
    if place.startswith(MATCHED):
        mark = place.removeprefix(MATCHED)
        return f"{module}: {mark}" if mark in matched_by(node) else None
    if not place:
        return THE_MODEL
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        path = without_calls(".".join(parts[:count]))
        if holds_module(place, path):
            return ".".join(parts[:count])
    return None
