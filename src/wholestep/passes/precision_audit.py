"""What runs in which precision: a TrainingGraph in, a table of operator family, type, phase, module and count out.

Mixed precision hides in casts that nobody sees; this says it. Works on any graph, however it got its types: traced under
autocast, rewritten by `amp`, or from a model whose weights are narrow.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import fx

from wholestep.graph.layers import layer_pattern, without_calls
from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of, tensors_in
from wholestep.graph.views import shares_memory
from wholestep.ops.aten.precision import precision_of

NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SILENT = frozenset(("other", "made", "update", "cast"))
"""Families left out of the one-line summary."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionRow:
    """So many operators of one family compute in one type, in one phase, in one kind of module."""

    family: str
    dtype: str
    """Of the floating-point values that go in, or come out where none goes in; `bf16 -> fp32` for a cast."""
    phase: str
    module: str
    """Numbers in the path are written `*`: equal layers are one row."""
    count: int


def precision_audit(graph: TrainingGraph) -> list[PrecisionRow]:
    """All floating-point operators of the graph, counted; views are none."""
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for node in graph.operations():
        dtype = _computes_in(node)
        if dtype is not None:
            counts[
                precision_of(node).family, dtype, phase_of(node), layer_pattern(without_calls(module_of(node) or ""))
            ] += 1
    order = {"forward": 0, "backward": 1, "update": 2}
    rows = [PrecisionRow(*key, count) for key, count in counts.items()]
    return sorted(rows, key=lambda r: (r.family in _SILENT, r.family, r.dtype, order[r.phase], r.module))


def table(rows: list[PrecisionRow]) -> str:
    """The audit as text, one row per line."""
    lines = [f"{'family':<16} {'type':<14} {'phase':<9} {'count':>5}  module"]
    lines += [f"{r.family:<16} {r.dtype:<14} {r.phase:<9} {r.count:>5}  {r.module or '-'}" for r in rows]
    return "\n".join(lines)


def summary(graph: TrainingGraph) -> str | None:
    """One line: families and their types; None where all of the graph computes in one type."""
    counts: Counter[tuple[str, str]] = Counter()
    casts = 0
    for row in precision_audit(graph):
        casts += row.count if row.family == "cast" else 0
        if row.family not in _SILENT:
            counts[row.family, row.dtype] += row.count
    if len({dtype for _, dtype in counts}) < 2:
        return None
    parts = [f"{family} {count} {dtype}" for (family, dtype), count in counts.items()]
    return "; ".join([*parts, f"{casts} casts"])


def _computes_in(node: fx.Node) -> str | None:
    """The type an operator computes in; None for views, and for what touches no floating-point value."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or shares_memory(node.target):
        return None
    made = _floating(node)
    read = [d for source in node.all_input_nodes for d in _floating(source)]
    if precision_of(node).family == "cast":
        return f"{NAMES.get(read[0], read[0])} -> {NAMES.get(made[0], made[0])}" if read and made else None
    # an operator that reads several types computes in the widest of those its first arguments have: weights and statistics differ
    types = read or made
    if not types:
        return None
    widest = max(types, key=lambda d: d.itemsize) if precision_of(node).positions is None else types[0]
    return NAMES.get(widest, str(widest).removeprefix("torch."))


def _floating(node: fx.Node) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in(node.meta.get("val")) if t.is_floating_point()]
