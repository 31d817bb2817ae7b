"""FLOPs of one node of a TrainingGraph: a multiply and an add count 2.

In: an fx node with `meta["val"]`. Out: how many FLOPs, of which kind, and by which rule it was found. In order:

1. `formula`    the operator's record has one;
2. `view`       its schema says that it hands back its input's memory, or it makes no tensor: 0;
3. `pointwise`  torch tags it so: 1 per element of the output;
4. `reduction`  torch tags it so: 1 per element of the first input;
5. `default`    anything else: kind `other`, 1 per element of the largest tensor that goes in or comes out.

Nothing is silently zero: a node that fell to the default says so, and `defaulted` lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from torch import fx

from wholestep.ops.amounts import Amount, largest, numel
from wholestep.ops.call import Call, elements, read_call
from wholestep.ops.record import KINDS, TENSOR_KINDS, Kind, record_of

__all__ = ["KINDS", "TENSOR_KINDS", "Flops", "Kind", "defaulted", "flops"]

Found = Literal["formula", "view", "pointwise", "reduction", "default"]


@dataclasses.dataclass(frozen=True, slots=True)
class Flops:
    """What one call computes."""

    kind: Kind
    count: Amount
    """FLOPs that are executed."""
    model: Amount
    """FLOPs of the mathematics: without what the operator itself computes a second time."""
    found: Found


def flops(node: fx.Node | Call) -> Flops:
    """FLOPs of a `call_function` node."""
    call = node if isinstance(node, Call) else read_call(node)
    known = record_of(call)
    if known.flops is not None and known.kind is not None:
        counted = known.flops(call)
        executed, model = counted if isinstance(counted, tuple) else (counted, counted)
        return Flops(known.kind, executed, model, "formula")
    kind, count, found = _by_schema(call)
    return Flops(kind, count, count, found)


def _by_schema(call: Call) -> tuple[Kind, Amount, Found]:
    if call.is_view or call.name == "python::getitem" or (not call.outputs and not call.inputs):
        return "movement", 0, "view"
    if call.name.startswith("_c10d_functional::"):  # the network does the adding; its time is not this device's
        return "movement", 0, "view"
    if call.name.startswith("aten::_foreach_"):
        return "elementwise", elements(call.outputs or call.tensors("self")), "pointwise"
    if call.has_tag("pointwise") and call.outputs:
        return "elementwise", numel(call.outputs[0]), "pointwise"
    if call.has_tag("reduction") and call.inputs:
        return "reduction", numel(call.first), "reduction"
    return "other", largest(numel(tensor) for tensor in (*call.inputs, *call.outputs)), "default"


def defaulted(nodes: Iterable[fx.Node]) -> list[str]:
    """The names of operators that no rule knows, sorted."""
    calls = (read_call(node) for node in nodes if node.op == "call_function")
    return sorted({call.name for call in calls if flops(call).found == "default"})
