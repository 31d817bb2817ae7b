"""Linear + cross-entropy in chunks of rows: FLOPs, and the bytes that chunks move beyond inputs and outputs.

N rows, H width, V classes; one product of x and weight is 2 N H V FLOPs. The forward makes the logits: one product. The backward
makes them again and both gradients: three, of which two are mathematics. The fused operator: three, all of them mathematics. A
gradient that is not wanted is not made. Softmax is left out, as torch does.

The logits do not stay on the chip, although they are never whole: a chunk is written by one kernel and read by the next. Every
product reads the whole weight once per chunk, and the gradient of the weight is read and written once per chunk, in float32.
"""

from __future__ import annotations

from wholestep.ops.amounts import Amount, stored_bytes
from wholestep.ops.call import Call
from wholestep.ops.registry import flops_of


def _product(call: Call) -> Amount:
    (rows, width), classes = call.shape("x"), call.shape("weight")[0]
    return 2 * rows * width * classes


def _wanted(call: Call) -> int:
    """How many of the two products for gradients are made."""
    return sum(bool(one) for one in call["wanted"][:2])


@flops_of("ws::linear_cross_entropy", kind="matmul")
def linear_cross_entropy(call: Call) -> Amount:
    return _product(call)


@flops_of("ws::linear_cross_entropy_backward", kind="matmul")
def linear_cross_entropy_backward(call: Call) -> tuple[Amount, Amount]:
    return _product(call) * (1 + _wanted(call)), _product(call) * _wanted(call)


@flops_of("ws::linear_cross_entropy_and_gradients", kind="matmul")
def linear_cross_entropy_and_gradients(call: Call) -> Amount:
    return _product(call) * (1 + _wanted(call))


# ---- bytes ---------------------------------------------------------------------------------------------------


def _logits(call: Call) -> Amount:
    """Bytes of all chunks of logits together, in the dtype of the products."""
    return call.shape("x")[0] * call.shape("weight")[0] * call.tensor("x").element_size()


def _weight_sums(call: Call) -> Amount:
    """Bytes of the gradient of the weight, times the chunks after the first that are added to it."""
    if "wanted" not in call.arguments or not call["wanted"][1]:
        return 0
    shape = call.shape("weight")
    return shape[0] * shape[1] * 4 * (_chunks(call) - 1)


def _chunks(call: Call) -> Amount:
    rows, chunk = call.shape("x")[0], call["chunk"]
    return max((rows + chunk - 1) // chunk, 1) if isinstance(rows, int) else (rows + chunk - 1) // chunk


def chunk_reads(call: Call) -> Amount:
    """Beyond every input once: the weight again per chunk and product, the logits, the sum of the weight's gradient."""
    products = 1 if "wanted" not in call.arguments else 1 + int(bool(call["wanted"][0]))
    again = stored_bytes(call.tensor("weight")) * (_chunks(call) * products - 1)
    passes = {"ws::linear_cross_entropy": 1, "ws::linear_cross_entropy_backward": 1}.get(call.name, 2)
    passes += _wanted(call) if "wanted" in call.arguments else 0
    return again + _logits(call) * passes + _weight_sums(call)


def chunk_writes(call: Call) -> Amount:
    """Beyond every output once: the logits, their gradient over them, the sum of the weight's gradient."""
    return _logits(call) * (2 if "wanted" in call.arguments else 1) + _weight_sums(call)
