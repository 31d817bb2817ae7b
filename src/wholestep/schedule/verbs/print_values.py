"""`print_values`: a line about what a module returns, at every step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture.edits import Change
from wholestep.errors import BadOption
from wholestep.schedule.changes import ClassChange, wrapping_change
from wholestep.schedule.modules import Modules, once
from wholestep.schedule.verb import Verb, verb

VALUES = "_wholestep_values"
"""Attribute in which a call leaves what it saw; printed and cleared when the step is over."""


@verb
class print_values(Verb):
    """Print, at every step, the least, the mean and the largest number that a module returns, and how many are not finite.

    to: "stderr" or "stdout". A step that is checked against eager PyTorch (the first one) prints nothing.
    Example: sch["layers.0.mlp"].print_values()
    """

    to: str = "stderr"

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        if self.to not in ("stderr", "stdout"):
            raise BadOption(f"print_values to {self.to!r}", hint="use stderr or stdout")

    def changes(self, modules: Modules) -> Sequence[Change]:
        return [_printing(path, module, self.to) for path, module in once(modules.select(self.at)).items()]

    def eager(self, modules: Modules) -> Sequence[Change]:
        return [
            _printing(path, module, self.to, at_once=True) for path, module in once(modules.select(self.at)).items()
        ]


def _printing(path: str, module: Any, to: str, at_once: bool = False) -> ClassChange:
    seen: list[torch.Tensor] = []
    show = functools.partial(_show, path, to, seen)

    def wrap(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = original.forward(self, *args, **kwargs)
            tensor = _first(out)
            if tensor is not None:
                self._wholestep_values.append(_numbers(tensor))
            return out

        def shown_at_once(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            show()
            return out

        return shown_at_once if at_once else forward

    return wrapping_change(path, module, wrap, "Printed", attributes={VALUES: seen}, before=seen.clear, after=show)


def _first(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for entry in value:
            found = _first(entry)
            if found is not None:
                return found
    return None


def _numbers(value: torch.Tensor) -> torch.Tensor:
    wide = value.detach().float()
    return torch.stack([wide.amin(), wide.mean(), wide.amax(), (~torch.isfinite(wide)).sum().float()])


def _show(path: str, to: str, seen: list[torch.Tensor]) -> None:
    for least, mean, most, odd in (entry.tolist() for entry in seen):
        text = f"{path or 'the model'}: from {least:.4g} to {most:.4g}, mean {mean:.4g}, {odd:.0f} not finite"
        print(text, file=getattr(sys, to))
    seen.clear()
