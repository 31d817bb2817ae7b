"""A budget that is kept: the allocator is held to it from the call of `compile` on, and recordings of other sizes give way."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from wholestep.errors import WholestepWarning
from wholestep.graph.bytes import show_bytes
from wholestep.plan.budget import LIBRARY_BYTES, Budget, context_bytes, limit_now


@contextlib.contextmanager
def memory_cap(budget: Budget, device: torch.device, more_bytes: int = 0) -> Iterator[None]:
    """The allocator does not go beyond the budget (and `more_bytes`) while this is open.

    Where segments grow, it first gives back what lies free between live tensors, so a step that fits by its tensors runs.
    """
    before = torch.cuda.get_per_process_memory_fraction(device)
    total = torch.cuda.get_device_properties(device).total_memory
    limit = (
        max(budget.card_bytes - budget.context_bytes + more_bytes, 0) / total
    )  # less than the context has to be refused, too
    torch.cuda.set_per_process_memory_fraction(min(before, limit), device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(f"Wholestep keeps the step within memory={budget.said}: ask for more, or for a smaller batch.")
        raise
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def held_to(budget: Budget | None, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """For whatever is done before a step runs, on a GPU: compiling, tuning and measuring stay within the budget too.

    What they leave cached is given back before the step begins.
    """
    if budget is None or device.type != "cuda":
        return contextlib.nullcontext()
    return memory_cap(budget, device, limit_now(budget, device) - (budget.card_bytes - budget.context_bytes))


class Enforced:
    """A context for every call of a step: the budget holds, and what the process took for itself since is added to it."""

    def __init__(self, budget: Budget, device: torch.device) -> None:
        self.budget, self.device = budget, device
        self.held: int | None = None
        """Allocated when the first step began."""
        self.context = budget.context_bytes
        self.warned = False

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        now = torch.cuda.memory_allocated(self.device)
        if self.held is None:
            self.held, self.context = (
                now,
                max(self.context, context_bytes(self.device)),
            )  # the check has loaded kernels since
        more = max(0, now - self.held)
        if more > LIBRARY_BYTES and not self.warned:
            self.warned = True
            taken = f"{show_bytes(more)} were allocated beside the step since its first call"
            text = f"{taken}: memory={self.budget.said} is exceeded by that"
            warnings.warn(text, WholestepWarning, stacklevel=2)
        return memory_cap(self.budget, self.device, more - (self.context - self.budget.context_bytes))


def make_room(budget: Budget, device: torch.device, variant: Any, recordings: list[Any]) -> None:
    """Recordings of other sizes give their memory back unless the variant fits beside them; one that is not made yet never does."""
    if not recordings:
        return
    plan = None if variant is None else variant.capture.plan
    if plan is not None and plan.predicted_bytes is not None:
        torch.cuda.empty_cache()
        needed = max(0, plan.predicted_bytes + budget.others_bytes - torch.cuda.memory_allocated(device))
        if torch.cuda.memory_reserved(device) + (1 + budget.slack) * needed <= budget.card_bytes - budget.context_bytes:
            return
    for recording in recordings:
        recording.make_room()
