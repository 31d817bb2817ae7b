"""Blame: which module departs first, and which pass made it so.

In goes a step that failed, on the state it started from; out comes a module path. Forward values are looked at in
execution order (the boundaries of the graph against eager's module outputs); where all of them hold, the fault lies
in the backward, and the failing gradient that is computed first is the one nearest to the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from wholestep.graph.training_graph import TrainingGraph
from wholestep.passes.pipeline import Pipeline, name_of
from wholestep.verify.compare import Comparison, Yardstick
from wholestep.verify.reference import Reference
from wholestep.verify.report import Departure, TensorRow


def module_of_tensor(name: str) -> str:
    """The path of the module that owns a parameter or buffer; state is named after its parameter."""
    return name.split("/")[0].rpartition(".")[0]


def nearest_to_loss(graph: TrainingGraph, names: Iterable[str]) -> str:
    """Of the named gradients, the one the backward computes first; one the graph lacks comes before all others."""
    position = {node.name: index for index, node in enumerate(graph.graph.nodes)}
    return min(names, key=lambda name: position.get(graph.gradients.get(name, ""), -1))


def departing_boundary(
    ours: Mapping[str, Any], eager: Reference, exact: Reference | None, rule: Yardstick, slack: float
) -> tuple[str, Comparison] | None:
    """The first module, in order of completion, whose output is not eager's.

    `slack` widens the rule for compiled code: rounding just beyond the rule in an early layer must not be blamed for
    what a wrong operator does later.
    """
    for path, value in ours.items():
        theirs = eager.module_outputs.get(path)
        if theirs is None or not isinstance(value, torch.Tensor):
            continue
        truth = None if exact is None else exact.module_outputs.get(path)
        compared = rule.compare(value, theirs, truth, slack=slack)
        if not compared.ok:
            return path, compared
    return None


def departure(graph: TrainingGraph, rows: Iterable[TensorRow], boundary: tuple[str, Comparison] | None) -> Departure:
    """Where a failed step goes wrong first; `boundary` is what `departing_boundary` found."""
    failing = [row for row in rows if not row.ok]
    if boundary is not None:
        path, compared = boundary
        return Departure(path, "output", path, failing[0].step, compared.error, compared.tolerance)
    by_kind = {kind: {r.name: r for r in failing if r.kind == kind} for kind in {r.kind for r in failing}}
    for kind in ("random", "loss", "aux", "gradient", "buffer", "parameter", "state"):
        rows_of = by_kind.get(kind)
        if not rows_of:
            continue
        name = nearest_to_loss(graph, rows_of) if kind == "gradient" else next(iter(rows_of))
        module = "" if kind in ("random", "loss", "aux") else module_of_tensor(name)
        row = rows_of[name]
        return Departure(module, kind, name, row.step, row.error, row.tolerance)
    raise AssertionError("a departure is asked for, but no row fails")


def guilty_pass(pipeline: Pipeline, fails: Callable[[int], bool], backend: str) -> str | None:
    """The first pass whose inclusion makes the step fail; None when the captured graph fails by itself.

    `fails(n)` runs the step with the first n passes on backend `interpret`. When that holds with all of them, the
    graph is right and what compiled it is not.
    """
    if backend != "interpret" and not fails(len(pipeline)):
        return f"lower_{backend}"
    if len(pipeline) == 0 or fails(0):
        return None
    good, bad = 0, len(pipeline)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if fails(middle) else (middle, bad)
    return name_of(pipeline.passes[bad - 1])
