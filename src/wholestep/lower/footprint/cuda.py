"""What only CUDA's caching allocator knows: blocks alive now, sizes as it rounds them, its own history of a step.

Everything returns something harmless without a GPU. The profiler's events (`events.py`) are the first source on CUDA too; the
allocator's memory history (`allocator_history`) is a second, independent one: every allocation and release in the order of
the allocator, with the Python lines that asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wholestep.lower.footprint.blocks import OTHER, WORKSPACE, Block

_WORKSPACE_FRAMES = ("cublas", "cudnn", "workspace")
_MIB = 1 << 20
_CUBLAS_SIZES = (8_519_680,)
"""Workspaces of cuBLAS that are no whole number of MiB: torch's default before Hopper. On Hopper it takes 32 MiB."""


def wait(device: torch.device) -> None:
    """Wait for the device, so that what was asked before is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def requested(device: torch.device) -> tuple[int, int]:
    """(bytes asked of the allocator and not released, the most of it since `reset_peak`)."""
    wait(device)
    stats = torch.cuda.memory_stats(device)
    return int(stats["requested_bytes.all.current"]), int(stats["requested_bytes.all.peak"])


def reset_peak(device: torch.device) -> None:
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)


def active_blocks(device: torch.device) -> dict[int, int] | None:
    """Address -> bytes of every block that is allocated now; None on a CPU."""
    if device.type != "cuda":
        return None
    return blocks_of_segments(torch.cuda.memory_snapshot(), _index(device))


def blocks_of_segments(segments: list[dict[str, Any]], index: int) -> dict[int, int]:
    """The allocated blocks of one device in the allocator's list of segments."""
    return {
        int(block["address"]): int(block["size"])
        for segment in segments if segment["device"] == index
        for block in segment["blocks"] if block["state"] == "active_allocated"
    }  # fmt: skip


def as_allocated(before: Mapping[int, Block], taken: Mapping[int, int]) -> dict[int, Block]:
    """The blocks that the allocator says are alive, with its sizes; those nobody owns are workspace or other.

    A storage may begin inside a block (tensors over memory that another library carved up), so a block is looked up by range.
    """
    found: dict[int, Block] = {}
    owners = sorted((address, block) for address, block in before.items())
    position = 0
    for address, count in sorted(taken.items()):
        inside = []
        while position < len(owners) and owners[position][0] < address + count:
            if owners[position][0] >= address:
                inside.append(owners[position][1])
            position += 1
        if inside:
            found[address] = dataclasses.replace(max(inside, key=lambda block: block.bytes), bytes=count)
        else:
            # cuBLAS keeps one block per handle and stream; told by its size, nothing else says whose it is
            workspace = count in _CUBLAS_SIZES or (count >= _MIB and count % _MIB == 0)
            why = "held by a library between steps" if workspace else "held outside the step"
            found[address] = Block(bytes=count, category=WORKSPACE if workspace else OTHER, why=why)
    return found


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
    index = _index(device)
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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
