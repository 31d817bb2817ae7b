"""Updates of parameters: FLOPs per element of the parameters, as their records count them (`wholestep.ops.updates`).

Whether weight decay or dampening is zero is known only when the step runs (the numbers are inputs), so they count always.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount
from wholestep.ops.call import Call, elements
from wholestep.ops.record import Formula, flops_of, record
from wholestep.ops.updates import UPDATES, Update


def _formula(update: Update) -> Formula:
    def of_all(call: Call) -> Amount:
        params = call.tensors("params") or call.tensors("self")
        return (update.flops(call) + _scaling(call)) * elements(params)

    return of_all


def _scaling(call: Call) -> int:
    """The clipping factor multiplies every gradient."""
    return 0 if call.get("scale") is None and call.get("grad_scale") is None else 1


for _update in UPDATES.values():
    flops_of(f"ws::{_update.kind}", *_update.torch_operators, kind="optimizer")(_formula(_update))
    record(f"ws::{_update.kind}", in_place=_update.in_place)


@flops_of("ws::clip", kind="optimizer")
def clip(call: Call) -> Amount:
    """Square and add every element of every gradient."""
    return 2 * elements(call.tensors("grads"))
