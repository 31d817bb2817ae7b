"""Buffers as they were before a step, for one that fails or whose update is left out: nothing of it may stay behind.

Parameters and optimizer state are written at the end of a step, after all that can fail for what a batch holds. Buffers are
not: a BatchNorm counts in its forward, and the loss after it may still find a target out of range. What eager PyTorch leaves
behind in that case, the user's own code does when it is asked for the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import nn


class Kept:
    """Copies of some tensors, in memory that is used again at the next step."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []
        self.holds = False
        """Whether the copies are those of the step at hand."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy these: about 15 us for the three of a BatchNorm."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        if not same or [t.shape for t in tensors] != [t.shape for t in self.copies]:
            self.tensors = list(tensors)
            self.copies = [torch.empty_like(t, requires_grad=False) for t in tensors]
        with torch.no_grad():
            if self.tensors:
                torch._foreach_copy_(self.copies, self.tensors)
        self.holds = True

    def put_back(self) -> None:
        with torch.no_grad():
            if self.holds and self.tensors:
                torch._foreach_copy_(self.tensors, self.copies)

    def put_back_unless(self, finite: torch.Tensor) -> None:
        """Decided on the device."""
        with torch.no_grad():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.copy_(torch.where(finite.to(tensor.device), tensor, copy))

    def forget(self) -> None:
        self.holds = False


class Places:
    """Which tensor each buffer was before a step: the loss may put another one in its place (`self.mean = ...`)."""

    def __init__(self, root: nn.Module) -> None:
        self.entries = [(m._buffers, key, tensor) for m in root.modules() for key, tensor in m._buffers.items()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return list({id(t): t for _, _, t in self.entries if t is not None and not t.is_inference()}.values())

    def replaced(self) -> bool:
        return any(table.get(key) is not tensor for table, key, tensor in self.entries)

    def put_back(self) -> None:
        for table, key, tensor in self.entries:
            table[key] = tensor
