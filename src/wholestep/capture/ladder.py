"""The ladder: a whole step; torch.compile with graph breaks and the optimizer's own update; eager. Each fall tells its reason.

A whole step that cannot be captured at first is tried once more after one real eager step, in which libraries install their
hooks and fill their caches. A rung is left by `CaptureRefused`; errors meant for the user (`WholestepError`) go through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from wholestep import compat
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.reading import Reading
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture, capture
from wholestep.capture.undo import Undo
from wholestep.errors import CaptureRefused, WholestepError, one_line

WHOLE, COMPILED, EAGER = "whole step", "torch.compile", "eager"


@dataclasses.dataclass(frozen=True, slots=True)
class Fall:
    """Why a rung was left."""

    rung: str
    reason: str
    where: str | None

    def __str__(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        return f"{self.rung}: {self.reason}{place}"


def capture_whole(
    subject: Subject, reading: Reading | None, batch: Any = None, *, dynamic: Sequence[dict[int, str]] | None = None
) -> Capture:
    """The whole step, or CaptureRefused with a reason that names what was met."""
    refuse_unsupported(subject)
    undo = None if reading is not None else Undo(subject.loss_fn, subject.model)
    try:
        return capture(subject, reading, batch, dynamic=dynamic)
    except (WholestepError, CaptureRefused):
        raise
    except Exception as error:
        raise CaptureRefused(_told(error)) from error
    finally:
        if undo is not None:  # the user's own code ran, on tensors without data
            undo.restore()


def _told(error: BaseException) -> str:
    return compat.about_picked_places(error) if isinstance(error, compat.SizeFromData) else one_line(error)
