"""A capture to plan with: the graph that a GPU would get, made on a machine that need not have one.

In: model, loss, optimizer and one micro-batch, on the meta device or real. Out: a Capture that must not be run. Only the whole
step is tried: a plan for a lower rung would be a plan for another program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wholestep import compat
from wholestep.capture.batch import flatten, unflatten
from wholestep.capture.front import Front
from wholestep.capture.ladder import capture_whole
from wholestep.capture.reading import read
from wholestep.capture.subject import Subject, make_subject
from wholestep.capture.trace import Capture
from wholestep.errors import CaptureRefused, UnsupportedModel, WholestepError, one_line


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
    return capture_dry(subject, example)


def capture_dry(subject: Subject, example: Any) -> Capture:
    """The same for a subject that was made dry."""
    try:
        with compat.no_collection():
            return capture_example(subject, example)
    except CaptureRefused as refused:
        raise UnsupportedModel(
            f"the whole step cannot be captured, so it cannot be planned: {refused.reason}", where=refused.where,
            hint="`wholestep show` and `wholestep train` take the next rung",
        ) from refused  # fmt: skip
    except WholestepError:
        raise
    except Exception as error:  # a model may do anything; some of it does not work on tensors without data
        raise UnsupportedModel(
            f"the step cannot be captured without data: {one_line(error)}",
            hint="`wholestep train` tries the next rung; a model of your own is planned with its values",
        ) from error


def capture_example(subject: Subject, example: Any) -> Capture:
    """The whole step for one batch, through Dynamo, not run: neither the graph nor what the Python does beside it."""
    with _standing_in(subject, example) as batch:
        return Front(subject).look(batch, lambda graph, args: capture_whole(subject, read(subject, graph, args, batch)))


@contextlib.contextmanager
def _standing_in(subject: Subject, example: Any) -> Iterator[Any]:
    """Tensors on the meta device replaced by fakes on the device of the step, in the modules and in the batch."""
    tensors, spec = flatten(example)
    live = {**subject.parameters, **subject.buffers}
    if all(t.device.type != "meta" for t in (*tensors, *live.values())):
        yield example
        return
    mode = compat.new_fake_mode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = compat.stand_in(mode, tensor, subject.device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    fakes = {name: fake(t) for name, t in live.items()}
    with compat.swapped_tensors(subject.root, {n: fakes[canonical] for n, canonical in subject.aliases.items()}):
        yield unflatten([fake(t) for t in tensors], spec)
