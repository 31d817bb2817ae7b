"""Cross-entropy over one chunk of logits: statistics, losses and gradients, row by row.

In: logits (R, V) that the caller gives up, their targets, and a Rule. Out: losses and lse written into the tensors given, and
the gradient of the logits in their dtype. `reference` is plain PyTorch and the specification; on CUDA one Triton kernel does
all of it and puts the gradient where the logits were, so that a chunk is held once (linear_cross_entropy_triton.py).
"""

import dataclasses

import torch
from torch import Tensor

from wholestep.ops.multi_tensor import triton_reason


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What is computed beyond plain cross-entropy; 0 switches a term off."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float


def process_rows(
    logits: Tensor,
    target: Tensor,
    rule: Rule,
    *,
    lse: Tensor,
    losses: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """With `losses`: fill them and `lse`. With `scale` (0-d, gradient of one row's loss): return the gradient of the
    logits, from `lse`. The logits are used up."""
    if supports(logits) is None:
        from wholestep.ops.linear_cross_entropy_triton import launch

        launch(logits, target, rule, lse=lse, losses=losses, scale=scale)
        return logits
    return reference(logits, target, rule, lse=lse, losses=losses, scale=scale)


def supports(logits: Tensor) -> str | None:
    """Why the Triton kernel cannot be used, or None when it can."""
    if not logits.is_cuda:
        return "not on a CUDA device"
    if logits.dtype == torch.float64:
        return "it computes in float32"
    return triton_reason()


def reference(
    logits: Tensor,
    target: Tensor,
    rule: Rule,
    *,
    lse: Tensor,
    losses: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """The specification, in the dtype of lse. A target that is no class raises on the CPU."""
    wide = logits.to(lse.dtype)
    if rule.softcap:
        wide = torch.tanh(wide / rule.softcap) * rule.softcap
    used = target != rule.ignore_index
    picked = torch.where(used, target, 0).unsqueeze(1)
    smooth, kept = rule.label_smoothing / logits.shape[1], 1.0 - rule.label_smoothing
    if losses is not None:
        torch.logsumexp(wide, dim=1, out=lse)
        rows = lse - kept * wide.gather(1, picked).squeeze(1)
        if smooth:
            rows = rows - smooth * wide.sum(1)
        if rule.z_loss:
            rows = rows + rule.z_loss * lse.square()
        losses.copy_(torch.where(used, rows, 0.0))
    if scale is None:
        return logits
    grad = (wide - lse.unsqueeze(1)).exp_()
    if rule.z_loss:
        grad *= (1.0 + 2.0 * rule.z_loss * lse).unsqueeze(1)
    if smooth:
        grad -= smooth
    grad.scatter_add_(1, picked, torch.full_like(picked, -kept, dtype=grad.dtype))
    if rule.softcap:
        grad *= 1.0 - (wide / rule.softcap).square()
    # filled last: with every target ignored the scale is 1 / 0
    return grad.mul_(scale).masked_fill_(~used.unsqueeze(1), 0.0).to(logits.dtype)
