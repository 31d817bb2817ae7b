"""What CUDA's allocator itself recorded of a step: every allocation and release in its order, with the lines that asked.

A second source beside the profiler's events, independent of them, with which they are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wholestep.lower.footprint.cuda import requested, wait

_WORKSPACE_FRAMES = ("cublas", "cudnn", "workspace")


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """One step as the allocator itself recorded it, in bytes that were asked for: blocks may be up to 1 MiB larger."""

    peak_bytes: int
    peak_reserved_bytes: int
    fragmentation_bytes: int
    """Reserved and not asked for, at the peak."""
    timeline: tuple[tuple[int, int], ...]
    """(bytes allocated, bytes reserved) after each entry."""
    workspace_bytes: int
    """At the peak, in blocks asked for from lines that name cuBLAS, cuDNN or a workspace."""
    phases: tuple[tuple[str, int], ...]
    """(name, number of entries before it)."""


def allocator_history(
    step: Callable[[Callable[[str], None]], Any], device: torch.device, *, entries: int = 1_000_000
) -> History:
    """Run `step(phase)` with the allocator's history on; `step` calls `phase("backward")` where a phase begins.

    A phase is found again by the number of entries recorded when it began: that needs a snapshot, which takes time but no
    device memory.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    asked, reserved = requested(device)[0], torch.cuda.memory_reserved(device)
    torch.cuda.memory._record_memory_history("all", context="all", stacks="all", max_entries=entries, device=device)
    phases: list[tuple[str, int]] = [("forward", 0)]

    def phase(name: str) -> None:
        phases.append((name, len(torch.cuda.memory._snapshot(device)["device_traces"][index])))

    try:
        step(phase)
        wait(device)
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(None, device=device)
    return read_history(snapshot["device_traces"][index], asked, reserved, phases)


def read_history(
    trace: list[dict[str, Any]], allocated: int, reserved: int, phases: list[tuple[str, int]] | None = None
) -> History:
    """The peak and the course of a trace that began with so many bytes allocated and reserved."""
    timeline: list[tuple[int, int]] = []
    workspaces: dict[int, int] = {}
    peak, at_peak, workspace = allocated, reserved, 0
    for entry in trace:
        action, size = entry["action"], int(entry["size"])
        if action == "alloc":
            allocated += size
            if any(part in _frames(entry) for part in _WORKSPACE_FRAMES):
                workspaces[entry["addr"]] = size
        elif action == "free_completed":
            allocated -= size
            workspaces.pop(entry["addr"], None)
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        timeline.append((allocated, reserved))
        if allocated > peak:
            peak, at_peak, workspace = allocated, reserved, sum(workspaces.values())
    most = max([reserved, *(entry[1] for entry in timeline)])
    return History(peak, most, at_peak - peak, tuple(timeline), workspace, tuple(phases or ()))


def _frames(entry: Mapping[str, Any]) -> str:
    return " ".join(f"{frame.get('name', '')}" for frame in entry.get("frames", ())).lower()
