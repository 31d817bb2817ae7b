"""`ws::ctc`: connectionist temporal classification as one operator, its gradient computed with its value.

In: log-probabilities, transcripts and their lengths. Out: a loss per row, and the gradient of each loss.

`F.ctc_loss` cannot be traced: the size of what it keeps for its backward is the longest transcript of the batch, which is known
only when it runs. Here that stays inside the operator, as in the first libraries for this loss, and the work is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLANK = 0


def reference(log_probs: Tensor, transcripts: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """The specification: losses [rows]; a transcript that does not fit into its frames counts 0."""
    return torch.nn.functional.ctc_loss(
        log_probs, transcripts, frames, lengths, blank=BLANK, reduction="none", zero_infinity=True
    )


@torch.library.custom_op("ws::ctc", mutates_args=())
def _ctc(log_probs: Tensor, transcripts: Tensor, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    # What autograd would call, one after the other: below autograd, where an operator's body runs, it cannot be asked.
    facts = (log_probs, transcripts, frames.tolist(), lengths.tolist())
    losses, kept = torch.ops.aten._ctc_loss.default(*facts, BLANK, True)
    ones = torch.ones_like(losses)
    gradient = torch.ops.aten._ctc_loss_backward.default(ones, *facts, losses, kept, BLANK, True)
    return torch.where(losses.isinf(), 0.0, losses), gradient.contiguous()


@_ctc.register_fake
def _(log_probs: Tensor, transcripts: Tensor, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _keep_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, losses: Tensor, unused: Tensor | None) -> tuple[Tensor, None, None, None]:
    (gradient,) = ctx.saved_tensors
    return losses[None, :, None] * gradient, None, None, None


_ctc.register_autograd(_backward, setup_context=_keep_gradient)


def ctc_loss(log_probs: Tensor, transcripts: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """Losses [rows] for log-probabilities [frames, rows, characters] and transcripts [rows, longest]."""
    return _ctc(log_probs, transcripts, frames, lengths)[0]
