"""What is known of linear + cross-entropy in chunks of rows: mathematics, FLOPs, bytes that chunks move beyond inputs and outputs.

N rows, H width, V classes; one product of x and weight is 2 N H V FLOPs. The forward makes the logits: one product. The backward
makes them again and both gradients: three, of which two are mathematics. The fused operator: three, all of them mathematics. A
gradient that is not wanted is not made. Softmax is left out, as torch does.

The logits do not stay on the chip, although they are never whole: a chunk is written by one kernel and read by the next. Every
product reads the whole weight once per chunk, and the gradient of the weight is read and written once per chunk, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wholestep.ops.amounts import Amount, stored_bytes
from wholestep.ops.call import Call
from wholestep.ops.record import Precision, record


def _product(call: Call) -> Amount:
    (rows, width), classes = call.shape("x"), call.shape("weight")[0]
    return 2 * rows * width * classes


def _wanted(call: Call) -> int:
    """How many of the two products for gradients are made."""
    return sum(bool(one) for one in call["wanted"][:2])


def _forward(call: Call) -> Amount:
    return _product(call)


def _backward(call: Call) -> tuple[Amount, Amount]:
    return _product(call) * (1 + _wanted(call)), _product(call) * _wanted(call)


def _fused(call: Call) -> Amount:
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


def _chunk_reads(call: Call) -> Amount:
    """Beyond every input once: the weight again per chunk and product, the logits, the sum of the weight's gradient."""
    products = 1 if "wanted" not in call.arguments else 1 + int(bool(call["wanted"][0]))
    again = stored_bytes(call.tensor("weight")) * (_chunks(call) * products - 1)
    passes = {"ws::linear_cross_entropy": 1, "ws::linear_cross_entropy_backward": 1}.get(call.name, 2)
    passes += _wanted(call) if "wanted" in call.arguments else 0
    return again + _logits(call) * passes + _weight_sums(call)


def _chunk_writes(call: Call) -> Amount:
    """Beyond every output once: the logits, their gradient over them, the sum of the weight's gradient."""
    return _logits(call) * (2 if "wanted" in call.arguments else 1) + _weight_sums(call)


def _through_memory(call: Call) -> tuple[Amount, Amount]:
    return _chunk_reads(call), _chunk_writes(call)


def _scratch(call: Call) -> int:
    """One chunk of logits, the weight filled up to whole rows, and the float32 sum of its gradient over chunks."""
    x, weight, chunk = call.tensor("x"), call.tensor("weight"), int(call["chunk"])
    classes, width = weight.shape
    padded = -(-classes * x.element_size() // 128) * 128 // x.element_size()
    found = min(chunk, x.shape[0]) * padded * x.element_size()
    if padded != classes:
        found += padded * width * weight.element_size()
    if "wanted" in call.arguments and x.shape[0] > chunk and weight.element_size() < 4:
        found += 4 * padded * width
    return found


# ---- what it computes, in plain PyTorch ------------------------------------------------------------------------


def _loss(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rule: Any) -> tuple[Tensor, Tensor]:
    ignore, smoothing, z_loss, softcap, reduction, _ = rule
    logits = F.linear(x, weight, bias)
    logits = logits if softcap == 0.0 else softcap * torch.tanh(logits / softcap)
    lse = logits.logsumexp(-1)
    counted = target != ignore
    picked = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
    losses = lse - (1 - smoothing) * picked - smoothing * logits.mean(-1) + z_loss * lse.square()
    total = torch.where(counted, losses, 0.0).sum()
    return total if reduction == "sum" else total / counted.sum(), lse


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    *rule, wanted = rest
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight) if t is not None]
        leaf = None if bias is None else bias.detach().requires_grad_()
        loss, _ = _loss(*leaves, leaf, target, *rule)
        found = torch.autograd.grad(loss, [*leaves, *([] if leaf is None else [leaf])], grad)
    found = (*found, *([x.new_empty(0)] if leaf is None else []))
    return tuple(g if one else x.new_empty(0) for g, one in zip(found, wanted, strict=True))


def _plain_backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Any, target: Tensor, lse: Tensor, *rest: Any) -> Any:
    return _gradients(grad, x, weight, bias, target, *rest)


def _plain_fused(grad: Tensor, x: Tensor, weight: Tensor, bias: Any, target: Tensor, *rest: Any) -> Any:
    return _loss(x, weight, bias, target, *rest[:-1])[0], *_gradients(grad, x, weight, bias, target, *rest)


def _cases() -> Iterator[tuple[Any, ...]]:
    target = torch.tensor([0, 6, -100, 3, 6])
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = (torch.randn(*s, dtype=dtype) for s in ((5, 4), (7, 4), (7,)))
        yield x, weight, None, target, -100, 0.0, 0.0, 0.0, "mean", 2
        yield x, weight, bias, target, -100, 0.1, 1e-3, 5.0, "sum", 128


def _backward_cases() -> Iterator[tuple[Any, ...]]:
    for x, weight, bias, target, *rule in _cases():
        lse = _loss(x, weight, bias, target, *rule)[1]
        for wanted in ([True, True, bias is not None], [False, True, False]):
            yield torch.tensor(0.7, dtype=x.dtype), x, weight, bias, target, lse, *rule, wanted


def _fused_cases() -> Iterator[tuple[Any, ...]]:
    for grad, x, weight, bias, target, _, *rest in _backward_cases():
        yield grad, x, weight, bias, target, *rest


for _name, _flops, _reference, _tried in (
    ("", _forward, _loss, _cases),
    ("_backward", _backward, _plain_backward, _backward_cases),
    ("_and_gradients", _fused, _plain_fused, _fused_cases),
):
    record(
        f"ws::linear_cross_entropy{_name}",
        reference=_reference,
        cases=_tried,
        tolerance=1e-5,
        kind="matmul",
        flops=_flops,
        passes_through=_through_memory,
        scratch=_scratch,
        spares=lambda call: call.shape("x")[0] * call.shape("weight")[0],
        precision=Precision("matmul", "low", 4, first=1) if _name else Precision("matmul", "low", 3),
    )
