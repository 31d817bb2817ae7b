"""ws::ctc: connectionist temporal classification as one operator, its gradient computed with its value.

Legend: T frames, N rows, C classes, S the longest target. log_probs (T, N, C); targets (N, S), or (sum of lengths,) one after
the other; frames and lengths (N,), whole numbers on any device. Out: a loss per row, and the gradient of each loss (T, N, C).

Why an operator: the size of what `F.ctc_loss` keeps for its backward is the longest target of the batch, which is known only
when it runs, so it cannot be traced. Here that stays inside, as in the first libraries for this loss; the work is the same.
The lengths are read on the host, as torch's own operator reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wholestep.ops.amounts import Amount
from wholestep.ops.aten import reductions
from wholestep.ops.call import Call
from wholestep.ops.record import record

LIBRARY = torch.library.Library("ws", "FRAGMENT")
LIBRARY.define(
    "ctc(Tensor log_probs, Tensor targets, Tensor frames, Tensor lengths, int blank, bool zero_infinity) -> "
    "(Tensor losses, Tensor gradient)"
)


def reference(
    log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int = 0, zero_infinity: bool = False
) -> Tensor:
    """The specification: losses (N,)."""
    return torch.nn.functional.ctc_loss(
        log_probs, targets, frames, lengths, blank=blank, reduction="none", zero_infinity=zero_infinity
    )


def ctc(
    log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    # What autograd would call, one after the other: below autograd, where an operator's body runs, it cannot be asked.
    facts = (log_probs, targets.to(log_probs.device, torch.int64), frames.tolist(), lengths.tolist())
    losses, kept = torch.ops.aten._ctc_loss.default(*facts, blank, zero_infinity)
    gradient = torch.ops.aten._ctc_loss_backward.default(
        torch.ones_like(losses), *facts, losses, kept, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses.isinf(), 0.0, losses)
    return losses, gradient.contiguous()


for _device in ("CPU", "CUDA"):
    LIBRARY.impl("ctc", ctc, _device)


@torch.library.register_fake("ws::ctc", lib=LIBRARY)
def _fake(
    log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, losses: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
    (gradient,) = ctx.saved_tensors
    return losses[None, :, None] * gradient, None, None, None, None, None


torch.library.register_autograd("ws::ctc", _backward, setup_context=_setup_context, lib=LIBRARY)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """torch.ctc_loss by the operator; `reduction` by number, as there: none, mean, sum."""
    if log_probs.dtype in (torch.bfloat16, torch.float16):  # as autocast has it, without which torch takes neither
        log_probs = log_probs.float()
    frames, lengths = as_lengths(input_lengths), as_lengths(target_lengths)
    alone = log_probs.dim() == 2
    if alone:
        log_probs = log_probs.unsqueeze(1)
        targets, frames, lengths = targets.reshape(1, -1), frames.reshape(1), lengths.reshape(1)
    losses = torch.ops.ws.ctc(log_probs, targets, frames, lengths, blank, zero_infinity)[0]
    if reduction == 1:
        return (losses / lengths.to(losses.device, losses.dtype).clamp(min=1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses[0] if alone else losses


def as_lengths(lengths: Any) -> Tensor:
    """Lengths as a tensor; F.ctc_loss also takes a tuple of numbers."""
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)


def _flops(call: Call) -> Amount:
    return reductions.ctc(call) + reductions.ctc_backward(call)


def _with_gradient(
    log_probs: Tensor, targets: Tensor, frames: Tensor, lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The reference, and what autograd makes of it."""
    with torch.enable_grad():
        given = log_probs.detach().requires_grad_()
        losses = reference(given, targets, frames, lengths, blank, zero_infinity)
        (gradient,) = torch.autograd.grad(losses.sum(), given)
    return losses.detach(), gradient


def _cases() -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int, bool]]:
    log_probs, targets = torch.randn(6, 3, 5).log_softmax(-1), torch.randint(1, 5, (3, 4))
    for lengths in ([2, 3, 1], [4, 0, 1]):
        yield log_probs, targets, torch.tensor([6, 5, 4]), torch.tensor(lengths), 0, True


record(
    "ws::ctc",
    reference=_with_gradient,
    cases=_cases,
    kind="reduction",
    flops=_flops,
    compiled=False,  # data tells the size of what it keeps
)
