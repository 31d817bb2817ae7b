"""`precision`: in which type a module computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from wholestep.capture.edits import Change
from wholestep.errors import BadOption
from wholestep.graph.plan_file import PRECISIONS
from wholestep.schedule.changes import wrapping_change
from wholestep.schedule.modules import Modules
from wholestep.schedule.verb import AUTO, Verb, verb


@verb
class precision(Verb):
    """Compute a module, and all inside of it, in fp32, bf16 or fp16; parameters stay as they are.

    to: "fp32", "bf16", "fp16", or "auto": as the whole step. At the model itself it is that of the whole step.
    Example: sch["lm_head"].precision("fp32")
    """

    numbers = True

    to: str

    def check(self, modules: Modules) -> None:
        modules.select(self.at)
        if self.to not in (*PRECISIONS, AUTO):
            raise BadOption(f"precision {self.to!r}", hint=f"use one of {', '.join(PRECISIONS)}, or auto")

    def eager(self, modules: Modules) -> Sequence[Change]:
        if self.to == AUTO:
            return ()
        found = modules.select(self.at)
        return [wrapping_change(p, m, functools.partial(_cast, self.to), "Cast") for p, m in found.items()]


def _cast(to: str, original: Any) -> Any:
    """torch's autocast around a forward, for a model that runs in eager PyTorch."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(to, torch.float32)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((t.device.type for t in (*self.parameters(), *args) if isinstance(t, torch.Tensor)), "cpu")
        if to != "fp32":
            with torch.autocast(device, dtype):
                return original.forward(self, *args, **kwargs)
        wide = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        with torch.autocast(device, enabled=False):
            return original.forward(self, *wide, **kwargs)

    return forward
