"""The one call: `memory_profile(step, ...)` says where the memory of a training step goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from wholestep.errors import BadOption, did_you_mean
from wholestep.lower.footprint.blocks import MemoryProfile
from wholestep.lower.footprint.owners import named_parameters
from wholestep.profile.memory.cpu import measure_step

SYSTEMS = ("wholestep", "eager", "compile")


def memory_profile(
    step_call: Callable[[Any], Any],
    *,
    model: Any,
    optimizer: Optimizer | None,
    batch: Any,
    system: str = "wholestep",
    device: torch.device | str | None = None,
    settle: int = 2,
) -> MemoryProfile:
    """Where the memory of `step_call(batch)` goes. The step runs `settle` + 2 times, for real.

    Args:
        step_call: a Step of `wholestep.compile`, or a function that does one training step.
        model, optimizer, batch: whose parameters, buffers, gradients, state and inputs are told apart.
        system: "wholestep", "eager" or "compile" (torch.compile: its modules get no hooks, they would be compiled anew).
        device: whose memory; None is that of the parameters.
        settle: steps before measuring: compilation and the first optimizer step are not what is asked about.
    """
    if system not in SYSTEMS:
        hint = did_you_mean(str(system), SYSTEMS, f"use {', '.join(SYSTEMS)}", shown="'{}'")
        raise BadOption(f"system={system!r}", hint=hint)
    if device is None:
        device = next((parameter.device for _, parameter in named_parameters(model)), torch.device("cpu"))
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise BadOption(f"device={str(place)!r}: memory can be followed on cpu and cuda", hint="use one of them")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise BadOption(f"device={str(place)!r}: this machine has no GPU that torch can use", hint="use cpu")
    return measure_step(
        step_call, model=model, optimizer=optimizer, batch=batch, system=system, device=place, settle=settle
    )
