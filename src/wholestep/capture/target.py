"""What the capture at work is for: asked where a program is decided on before there is a graph that says so.

Tensors do not tell: those of a dry capture are said to be on a CPU, whatever it is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from wholestep.graph.training_graph import Target

_at_work: ContextVar[Target | None] = ContextVar("target", default=None)


@contextlib.contextmanager
def capturing_for(target: Target) -> Iterator[None]:
    """While the context is open, what is captured is for `target`."""
    before = _at_work.set(target)
    try:
        yield
    finally:
        _at_work.reset(before)


def on_gpu() -> bool:
    """Whether a capture is at work, and for a GPU."""
    target = _at_work.get()
    return target is not None and target.is_gpu
