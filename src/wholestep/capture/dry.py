"""A capture to plan with: the graph that a GPU would get, made on a machine that need not have one.

In: model, loss, optimizer and one micro-batch, on the meta device or real. Out: a Capture that must not be run. Only the whole
step is tried: a plan for a lower rung would be a plan for another program.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from wholestep.capture.batch import flatten
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture, capture
from wholestep.errors import CaptureRefused, UnsupportedModel, WholestepError


def dry_capture(
    model: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
    optimizer: Optimizer | None,
    example: Any,
    *,
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    device: str = "cuda",
) -> Capture:
    """Trace the step without data, as a `device` (cuda or cpu) would run it."""
    subject = make_subject(
        model, loss_fn, optimizer, precision=precision, accumulate=accumulate, clip_norm=clip_norm, dry=device
    )
    tensors, spec = flatten(example)
    try:
        refuse_unsupported(subject)
        with no_collection():
            return capture(subject, tensors, spec)
    except CaptureRefused as refused:
        raise UnsupportedModel(
            f"the whole step cannot be captured, so it cannot be planned: {refused.reason}", where=refused.where,
            hint="`wholestep show` and `wholestep train` take the next rung",
        ) from refused  # fmt: skip
    except WholestepError:
        raise
    except Exception as error:  # a model may do anything; some of it does not work on tensors without data
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise UnsupportedModel(
            f"the step cannot be captured without data: {type(error).__name__}: {said}",
            hint="`wholestep train` tries the next rung; a model of your own is planned with its values",
        ) from error


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """A trace makes a million objects that all stay: looking for garbage among them is a fifth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
