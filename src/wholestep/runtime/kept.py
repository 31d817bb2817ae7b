"""Buffers as they were before a step, for a step that fails: nothing of it may stay behind.

Parameters and optimizer state are written at the end of a step, after all that can fail for what a batch holds. Buffers are
not: a BatchNorm counts in its forward, and the loss after it may still find a target out of range.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import is_

import torch

from wholestep.capture.subject import Subject


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

    def forget(self) -> None:
        self.holds = False


class KeptBuffers:
    """The buffers of a subject while the user's own code runs. Those that no step has written so far are not copied again."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.kept = subject, Kept()
        self.written: set[str] | None = None
        """None until a step has shown which."""

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        """Put back if an exception comes out."""
        held = {name: tensor for name, tensor in self.subject.buffers.items() if not tensor.is_inference()}
        versions = {name: tensor._version for name, tensor in held.items()}
        self.kept.keep([tensor for name, tensor in held.items() if self.written is None or name in self.written])
        try:
            yield
        except Exception:
            self.kept.put_back()
            raise
        finally:
            self.kept.forget()
        self.written = (self.written or set()) | {name for name, tensor in held.items() if tensor._version != versions[name]}
