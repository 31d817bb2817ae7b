"""Updates of parameters: FLOPs per element of the parameters, as torch.optim writes the arithmetic.

Whether weight decay or dampening is zero is known only when the step runs (the numbers are inputs), so they count always.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount
from wholestep.ops.call import Call, elements
from wholestep.ops.record import flops_of

ADAM = 14
"""Decay 1; first moment, a lerp, 3; second moment 4; denominator: sqrt, divide, add eps 3; divide, times step size, subtract 3."""
SGD = 4
"""Decay 2; times learning rate, subtract 2."""


def _scaling(call: Call) -> int:
    """The clipping factor multiplies every gradient."""
    return 0 if call.get("scale") is None and call.get("grad_scale") is None else 1


@flops_of("ws::adamw", "aten::_fused_adamw", "aten::_fused_adam", kind="optimizer")
def adam(call: Call) -> Amount:
    params = call.tensors("params") or call.tensors("self")
    return (ADAM + _scaling(call) + int(bool(call["amsgrad"]))) * elements(params)


@flops_of("ws::sgd", "aten::_fused_sgd", kind="optimizer")
def sgd(call: Call) -> Amount:
    """Momentum adds 3 (the buffer times momentum plus the dampened gradient), Nesterov 2 more."""
    params = call.tensors("params") or call.tensors("self")
    momentum = bool(call.tensors("momentum_buffers") or call.tensors("momentum_buffer_list"))
    return (SGD + 3 * momentum + 2 * bool(call["nesterov"]) + _scaling(call)) * elements(params)


@flops_of("ws::clip", kind="optimizer")
def clip(call: Call) -> Amount:
    """Square and add every element of every gradient."""
    return 2 * elements(call.tensors("grads"))
