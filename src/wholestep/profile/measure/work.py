"""What one call of a lowered step has to do: nodes in, FLOPs, bytes and the least seconds out.

For one operator that is its row of `wholestep.cost`. For a compiled region it is the sum over its nodes, with one
correction: operators that a compiler fuses hand values to each other on the chip, so of elementwise work, reductions and
copies only what enters and leaves the fused group moves. Matrix products, convolutions, attention and optimizer updates
stay operators of their own. So the least seconds of a region are a floor for any fusion, however good.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import NodeCost, cost_of
from wholestep.cost.roofline import Fp32Units, bound, peak_of
from wholestep.graph.training_graph import tensors_in
from wholestep.ops.amounts import is_known, stored_bytes
from wholestep.ops.traffic import READS

FUSABLE = ("elementwise", "reduction", "movement")
"""Kinds that a compiler fuses with each other."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Of one call."""

    flops: float
    bytes: float
    compute_seconds: float
    """At the peaks of the device, were memory free."""
    floor_seconds: float
    """By the roofline."""

    @property
    def limit(self) -> str:
        """What binds most of the least time: `compute`, `memory`, or `nothing` where nothing is to be done."""
        if not self.floor_seconds:
            return "nothing"
        return "compute" if 2 * self.compute_seconds >= self.floor_seconds else "memory"


def sum_of(works: Iterable[Work]) -> Work:
    """Of several calls, one after the other."""
    listed = list(works)
    return Work(
        sum(w.flops for w in listed), sum(w.bytes for w in listed), sum(w.compute_seconds for w in listed),
        sum(w.floor_seconds for w in listed),
    )  # fmt: skip


def work_of_cost(cost: NodeCost, device: Device, fp32: Fp32Units) -> Work | None:
    """Of one operator; None where a size is symbolic."""
    if not (is_known(cost.flops) and is_known(cost.bytes)):
        return None
    seconds = float(cost.flops) / peak_of(cost, device, fp32) if cost.flops else 0.0
    return Work(float(cost.flops), float(cost.bytes), seconds, float(bound(cost, device, fp32).seconds))


def work_of_region(
    body: Sequence[fx.Node],
    defines: Iterable[fx.Node],
    origin: Mapping[fx.Node, fx.Node],
    device: Device,
    fp32: Fp32Units,
) -> Work | None:
    """Of a fused region; `origin` leads to the training graph's node, which still names the operator. None: symbolic."""
    costs = {node: cost_of(origin.get(node, node)) for node in body if node.op == "call_function"}
    alone = [work_of_cost(c, device, fp32) for c in costs.values() if c.kind not in FUSABLE]
    fused = {node: c for node, c in costs.items() if c.kind in FUSABLE}
    flops = sum((c.flops for c in fused.values()), 0)
    moved = _crossing_bytes(body, defines, costs, fused)
    if any(work is None for work in alone) or not is_known(flops) or not is_known(moved):
        return None
    computing = sum(float(c.flops) / peak_of(c, device, fp32) for c in fused.values() if c.flops)
    together = Work(float(flops), float(moved), computing, max(computing, float(moved) / device.bandwidth))
    return sum_of([together, *(work for work in alone if work is not None)])


def _crossing_bytes(
    body: Sequence[fx.Node],
    defines: Iterable[fx.Node],
    costs: Mapping[fx.Node, NodeCost],
    fused: Mapping[fx.Node, NodeCost],
) -> float:
    """Bytes that enter or leave the fused operators of a region, each value once."""
    read: dict[fx.Node, float] = {}
    picked: float = 0
    written: set[fx.Node] = set()

    def maker(value: fx.Node) -> fx.Node:
        """The node that computed the memory behind a value: through views and entries of lists."""
        while value in costs and costs[value].found == "view" and value.all_input_nodes:
            value = value.all_input_nodes[0]
        return value

    for node in body:
        if node not in costs or costs[node].found == "view":
            continue
        for entry in node.all_input_nodes:
            source = maker(entry)
            if node not in fused:
                written.add(source)
            elif source not in fused and costs[node].operator not in READS:
                size = sum(stored_bytes(tensor) for tensor in tensors_in(entry.meta.get("val")))
                key = entry if entry.target is operator.getitem else source
                read[key] = max(read.get(key, 0), size)
        if node in fused and costs[node].operator in READS:
            picked += costs[node].read  # looks at a part of its table only
        if getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            written.add(node)
    written.update(maker(node) for node in defines)
    return sum(read.values()) + picked + sum(fused[node].written for node in written if node in fused)
