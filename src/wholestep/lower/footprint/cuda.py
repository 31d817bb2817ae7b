"""What only CUDA's caching allocator knows: blocks alive now, and sizes as it rounds them.

Everything returns something harmless without a GPU. The profiler's events (`events.py`) are the source of all else on CUDA too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from wholestep.lower.footprint.blocks import OTHER, WORKSPACE, Block

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


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
