"""The Triton body of linear_cross_entropy_rows: one program per row. Import only where Triton exists.

In and out as `process_rows`. A row is read once for its statistics (running maximum and sum) and once more for its gradient,
which is written over the logits. A target that is no class and not ignored makes the row's loss and gradient NaN: a kernel
cannot raise, and a wrong number would go unseen.
"""

# Kernel bodies are Triton's language, whose arguments carry no Python types.
# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl
from torch import Tensor

from wholestep.ops.linear_cross_entropy_rows import Rule

BLOCK = 4096
NUM_WARPS = 8


@triton.jit
def _capped(raw, cap, CAP: tl.constexpr):
    if CAP:
        # tanh by its exponential: 1 - 2 / (e^2y + 1) has the right limits on both sides
        raw = cap * (1.0 - 2.0 / (tl.exp(2.0 * (raw / cap)) + 1.0))
    return raw


@triton.jit
def _joined(top, total, value):
    """Running maximum and sum of exponentials, with one more block."""
    highest = tl.maximum(top, tl.max(value, 0))
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    return highest, total * tl.exp(top - shift) + tl.sum(tl.exp(value - shift), 0)


@triton.jit
def _gradient(value, columns, target, lse, weight, smooth, smoothing, cap, SMOOTH: tl.constexpr, CAP: tl.constexpr):
    grad = tl.exp(value - lse) * weight
    if SMOOTH:
        grad -= smooth
    grad = tl.where(columns == target, grad - (1.0 - smoothing), grad)
    if CAP:
        grad *= 1.0 - (value / cap) * (value / cap)
    return grad


@triton.jit(do_not_specialize=["ignore_index"])
def _rows_kernel(
    logits, stride, target_ptr, lse_ptr, loss_ptr, scale_ptr, vocabulary, ignore_index, smoothing, z_loss, cap,
    FORWARD: tl.constexpr, BACKWARD: tl.constexpr, SMOOTH: tl.constexpr, Z: tl.constexpr, CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(target_ptr + row)
    used = target != ignore_index
    known = (target >= 0) & (target < vocabulary)
    smooth = smoothing / vocabulary
    whole = vocabulary // BLOCK * BLOCK  # blocks without a mask are read 16 bytes at a time, whatever the vocabulary
    if FORWARD:
        # read before the reductions below, whose barriers keep it before the first write of any warp
        picked = _capped(tl.load(logits + target, mask=known, other=float("nan")).to(tl.float32), cap, CAP)
        top = -float("inf")
        total = 0.0
        plain = 0.0
        for start in range(0, whole, BLOCK):
            value = _capped(tl.load(logits + start + tl.arange(0, BLOCK)).to(tl.float32), cap, CAP)
            if SMOOTH:
                plain += tl.sum(value, 0)
            top, total = _joined(top, total, value)
        if whole < vocabulary:
            columns = whole + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            value = _capped(tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32), cap, CAP)
            if SMOOTH:
                plain += tl.sum(tl.where(inside, value, 0.0), 0)
            top, total = _joined(top, total, tl.where(inside, value, -float("inf")))
        lse = top + tl.log(total)
        loss = lse - (1.0 - smoothing) * picked
        if SMOOTH:
            loss -= smooth * plain
        if Z:
            loss += z_loss * lse * lse
        tl.store(lse_ptr + row, lse)
        tl.store(loss_ptr + row, tl.where(used, loss, 0.0))
    else:
        lse = tl.load(lse_ptr + row)
    if BACKWARD:
        scale = tl.load(scale_ptr)
        scale = tl.where(known, scale, float("nan"))
        weight = 1.0
        if Z:
            weight = 1.0 + 2.0 * z_loss * lse
        for start in range(0, whole, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            value = _capped(tl.load(logits + columns).to(tl.float32), cap, CAP)
            grad = _gradient(value, columns, target, lse, weight, smooth, smoothing, cap, SMOOTH, CAP)
            tl.store(logits + columns, tl.where(used, grad * scale, 0.0).to(logits.dtype.element_ty))
        if whole < vocabulary:
            columns = whole + tl.arange(0, BLOCK)
            inside = columns < vocabulary
            value = _capped(tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32), cap, CAP)
            grad = _gradient(value, columns, target, lse, weight, smooth, smoothing, cap, SMOOTH, CAP)
            tl.store(logits + columns, tl.where(used, grad * scale, 0.0).to(logits.dtype.element_ty), mask=inside)


def launch(
    logits: Tensor, target: Tensor, rule: Rule, *, lse: Tensor, losses: Tensor | None, scale: Tensor | None
) -> None:
    """Fill losses and lse (with `losses`), then overwrite the logits with their gradient (with `scale`)."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1, "the classes of a row lie next to each other"
    if rows == 0:
        return
    _rows_kernel[(rows,)](
        logits,
        logits.stride(0),
        target.contiguous(),
        lse,
        lse if losses is None else losses,
        lse if scale is None else scale,
        vocabulary,
        rule.ignore_index,
        float(rule.label_smoothing),
        float(rule.z_loss),
        float(rule.softcap),
        FORWARD=losses is not None,
        BACKWARD=scale is not None,
        SMOOTH=rule.label_smoothing != 0.0,
        Z=rule.z_loss != 0.0,
        CAP=rule.softcap != 0.0,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=NUM_WARPS,
    )
