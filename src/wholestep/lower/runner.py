"""Runner: a lowered training graph that can be called.

In goes the list of input tensors, aligned with `TrainingGraph.inputs`; out comes the list of every output that is not
an update, followed by the watched values. When the call returns, each updated input tensor holds its new value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

StepFunction = Callable[[list[Any]], tuple[Any, ...]]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """The graph holds its casts; a caller's autocast around the step must not add others."""
    stack = contextlib.ExitStack()
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


class Runner:
    """Calls one generated function under `no_grad`; knows how it was made."""

    __slots__ = ("_around", "_facts", "_function", "_keep", "num_inputs")

    def __init__(
        self,
        function: StepFunction,
        num_inputs: int,
        facts: dict[str, Any],
        keep: Any = None,
        around: Around = contextlib.nullcontext,
    ) -> None:
        self._function: StepFunction | None = function
        self._facts = facts
        self._keep = keep
        self._around = around
        self.num_inputs = num_inputs

    def __call__(self, inputs: list[torch.Tensor]) -> list[Any]:
        if self._function is None:
            raise RuntimeError("this runner was released; lower the graph again")
        if len(inputs) != self.num_inputs:
            raise ValueError(f"the graph has {self.num_inputs} inputs, {len(inputs)} were given")
        with torch.no_grad(), _without_autocast(), self._around():
            return list(self._function(inputs))

    def describe(self) -> dict[str, Any]:
        """Facts for reports: backend, regions, seconds, cache hits, the driver's source, notes."""
        return dict(self._facts)

    def with_facts(self, **facts: Any) -> Runner:
        """The same code, described by more facts."""
        assert self._function is not None
        return Runner(self._function, self.num_inputs, {**self._facts, **facts}, self._keep, self._around)

    def within(self, around: Around) -> Runner:
        """The same code, called within a context."""
        assert self._function is not None
        return Runner(self._function, self.num_inputs, self._facts, self._keep, around)

    def release(self) -> None:
        """Drop the compiled code and the constants it holds."""
        self._function = self._keep = None
