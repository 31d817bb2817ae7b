"""A step that fails with a batch unlike the example: one line that names the difference, in place of a long traceback.

In: what the example batch was like, the batch, and the error of the user's own code. Out: an error that is caught as ours and as
theirs, or None where the batch is like the example and the error is told as it is.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from typing import Any

import torch

from wholestep.capture.batch import BatchSpec, flatten
from wholestep.capture.modes import is_own_file
from wholestep.errors import BadBatch, WholestepError


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """The structure of the example batch, and what its tensors were like; the tensors themselves are not held."""

    spec: BatchSpec
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]

    @staticmethod
    def of(batch: Any) -> Example | None:
        """None for a batch that cannot be taken apart."""
        try:
            tensors, spec = flatten(batch)
        except BadBatch:
            return None
        return Example(spec, tuple((tensor.shape, tensor.dtype) for tensor in tensors))

    def is_like(self, batch: Any) -> bool:
        """Whether a batch has the structure of this one."""
        other = Example.of(batch)
        return other is not None and other.spec.tree == self.spec.tree


def blamed(example: Example | None, batch: Any, error: Exception) -> WholestepError | None:
    """The error to raise in place of `error`, if the batch differs from the example."""
    now = Example.of(batch)
    if example is None or now is None or isinstance(error, MemoryError | torch.OutOfMemoryError):
        return None
    if now.spec.tree != example.spec.tree:
        found = _structure(example.spec, now.spec)
    else:
        found = "" if _raised_on_purpose(error) else _tensors(example, now)
    if not found:
        return None
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return _both(BadBatch, error)(
        f"{found}, compared with the example batch, and the step fails with it: {text}",
        where=_users_line(error),
        hint=f"the step was compiled for tensors {', '.join(map(repr, example.spec.names))}",
    )


def _structure(first: BatchSpec, spec: BatchSpec) -> str:
    lacking = [name for name in first.names if name not in spec.names]
    new = [name for name in spec.names if name not in first.names]
    parts = [f"{what} {', '.join(map(repr, names))}" for what, names in (("lacks", lacking), ("adds", new)) if names]
    return f"the batch {' and '.join(parts)}" if parts else ""


def _tensors(first: Example, now: Example) -> str:
    """Other dtypes or sizes, in words; how many rows there are may vary, but for all tensors alike."""
    pairs = list(zip(first.spec.names, first.tensors, now.tensors))
    rows = len({after[0][:1] for _, _, after in pairs}) > len({before[0][:1] for _, before, _ in pairs})
    parts = []
    for name, (shape, dtype), (shape_now, dtype_now) in pairs:
        same = len(shape) == len(shape_now) and shape[1:] == shape_now[1:] and (not rows or shape == shape_now)
        if dtype != dtype_now or not same:
            parts.append(f"{name!r} is {_shown(shape_now, dtype_now)} and was {_shown(shape, dtype)}")
    return "; ".join(parts)


def _shown(shape: torch.Size, dtype: torch.dtype) -> str:
    """`float32[16, 8]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _raised_on_purpose(error: Exception) -> bool:
    """By a `raise` or `assert` of the user's own, which says what it has to say."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    return last is not None and is_own_file(last.filename) and (last.line or "").startswith(("raise", "assert"))


def _users_line(error: Exception) -> str | None:
    """`model.py:12`, the innermost line of the user's own code."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_own_file(frame.filename) and os.path.isfile(frame.filename):
            return f"{os.path.relpath(frame.filename)}:{frame.lineno}"
    return None


def _both(kind: type[WholestepError], error: Exception) -> type[WholestepError]:
    """An error that is caught as ours, and as what the user's own code raised."""
    try:
        facts = {"__str__": kind.__str__, "__module__": type(error).__module__}
        return type(type(error).__name__, (kind, type(error)), facts)
    except TypeError:  # exceptions with fields of their own cannot be combined
        return kind
