"""What every node of a TrainingGraph costs on any device: FLOPs and bytes, with kind, number format, phase and module.

In: a TrainingGraph. Out: one NodeCost per operator. With symbolic sizes the amounts are expressions: count once, then evaluate at
any batch or length. Device-independent; `roofline.py` turns it into seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import TrainingGraph, module_of, phase_of
from wholestep.ops.amounts import Amount, evaluate
from wholestep.ops.call import Call, read_call
from wholestep.ops.collectives import ring_hops
from wholestep.ops.flops import Found, Kind, flops
from wholestep.ops.record import record_of
from wholestep.ops.traffic import traffic

_FORMATS = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.complex64: "fp32", torch.complex128: "fp64",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCost:
    """One operator of the graph."""

    node: str
    operator: str
    kind: Kind
    number_format: str
    """Of the values that go in: fp64, fp32, bf16, fp16, fp8; integers count as fp32."""
    phase: str
    module: str | None
    flops: Amount
    """Executed."""
    model_flops: Amount
    """Without anything computed a second time; 0 for a node that is a recomputation."""
    read: Amount
    written: Amount
    found: Found
    """Which rule gave the FLOPs; `default` where none knows the operator."""

    sent: Amount = 0
    """Bytes that a rank sends to others, by the ring formulas of `ops/collectives.py`."""
    hops: int = 0
    """Messages that follow on each other."""

    @property
    def bytes(self) -> Amount:
        return self.read + self.written


def node_costs(graph: TrainingGraph | fx.Graph) -> tuple[NodeCost, ...]:
    """The costs of every operator, in the order of the graph."""
    nodes = graph.graph.nodes if isinstance(graph, TrainingGraph) else graph.nodes
    return tuple(cost_of(node) for node in nodes if node.op == "call_function")


def cost_of(node: fx.Node) -> NodeCost:
    call = read_call(node)
    found, moved = flops(call), traffic(call)
    on_link = record_of(call).on_link
    sent, hops = (0, 0) if on_link is None else (on_link(call), ring_hops(call))
    return NodeCost(
        node=node.name, operator=call.name, kind=found.kind, number_format=number_format(call), phase=phase_of(node),
        module=module_of(node), flops=found.count, model_flops=0 if is_recomputed(node) else found.model, read=moved.read,
        written=moved.written, found=found.found, sent=sent, hops=hops,
    )  # fmt: skip


def is_recomputed(node: fx.Node) -> bool:
    """Whether a pass put the node there to compute again what an earlier node computed (`meta["custom"]["recomputed"]`)."""
    return bool((node.meta.get("custom") or {}).get("recomputed", False))


def number_format(call: Call) -> str:
    """The format an operator computes in: that of its first floating-point tensor that is no single number (a loss's gradient)."""
    tensors = (*call.inputs, *call.outputs)
    for tensor in sorted(tensors, key=lambda tensor: tensor.dim() == 0):
        if tensor.dtype in _FORMATS:
            return _FORMATS[tensor.dtype]
        if tensor.dtype.is_floating_point:
            return "fp8" if tensor.element_size() == 1 else "fp32"
    return "fp32"


def at_sizes(costs: Sequence[NodeCost], sizes: Mapping[str, int]) -> tuple[NodeCost, ...]:
    """The same costs with numbers for the symbols."""
    fields = ("flops", "model_flops", "read", "written", "sent")
    changed: list[dict[str, Any]] = [{name: evaluate(getattr(cost, name), sizes) for name in fields} for cost in costs]
    return tuple(dataclasses.replace(cost, **values) for cost, values in zip(costs, changed, strict=True))


def total_flops(
    costs: Iterable[NodeCost], kinds: Sequence[str] | None = None, *, phases: Sequence[str] | None = None
) -> Amount:
    """The FLOPs executed, of some kinds and phases or all."""
    chosen = (c for c in costs if (kinds is None or c.kind in kinds) and (phases is None or c.phase in phases))
    return sum((cost.flops for cost in chosen), 0)
