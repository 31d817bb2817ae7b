"""Recurrent layers as one operator: the products of all time steps; gates are left out, as torch does.

T steps, B rows, G gates, H width, I inputs: every way does 2 T B G H (I + H) FLOPs forward, and twice that backward.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount
from wholestep.ops.call import Call
from wholestep.ops.registry import flops_of


def _products(call: Call) -> Amount:
    steps, rows, _ = call.shape("x")
    return 2 * steps * rows * sum(w.shape[0] * w.shape[1] for w in call.tensors("weights") if w.dim() == 2)


@flops_of("ws::recurrent", kind="matmul")
def recurrent(call: Call) -> Amount:
    return _products(call)


@flops_of("ws::recurrent_backward", kind="matmul")
def recurrent_backward(call: Call) -> Amount:
    return 2 * _products(call)
