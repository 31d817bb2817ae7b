"""A Job: everything one training run needs, built from what was asked on the command line.

In: MODEL (a preset, `hf:<model_type>`, a folder with a config.json, or `package.module:callable`), a data set, sizes.
Out: model, loss, optimizer, schedule and a source of batches, ready for `wholestep.compile`, and the settings they came from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer


class Batches(Protocol):
    """Where batches come from. A batch is a pure function of its number, so one integer is the position in the data."""

    unit: str
    """What a batch holds: `tokens` or `samples`."""
    units: int
    """How many of them per batch."""

    def batch(self, number: int) -> Any:
        """Batch `number` (from 0), on the device of the model."""
        ...

    def describe(self) -> str:
        """One line: what the data is, how much of it, how it is cut."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """What a run needs. Making it again from the same settings gives the same numbers."""

    name: str
    settings: dict[str, Any]
    """Resolved, as JSON: model and its configuration, data, sizes, learning rate ... Saved with every run and checkpoint."""
    model: Any
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Optimizer
    scheduler: Any
    """One of torch's, stepped after every step; or None."""
    batches: Batches
    compile_options: dict[str, Any]
    """For `wholestep.compile`: precision, clip_norm, accumulate."""
    held_out: Sequence[Any] = ()
    """Batches that are not trained on, on the device; may be empty."""
    edge_batches: Sequence[Any] = ()
    """Awkward batches for `verify`."""
    write_sample: Callable[[], str] | None = None
    """A text the model writes, or what it says about a few images; None when there is nothing to show."""
