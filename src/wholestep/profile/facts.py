"""Parts of a Profile that are only gathered: times, predictions beside measurements, the device, the machine; as plain values."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch

from wholestep.cost.devices import Device
from wholestep.lower.footprint.blocks import MemoryProfile
from wholestep.profile.measure.timing import Timing


def times(timing: Timing, units: int) -> dict[str, Any]:
    return {
        "median": 1e3 * timing.median, "lowest": 1e3 * min(timing.steps), "highest": 1e3 * max(timing.steps),
        "all": [1e3 * s for s in timing.steps], "data_median": 1e3 * timing.data_median, "first": 1e3 * timing.first_step,
        "warm_up_steps": timing.warm_up_steps, "settled": timing.settled, "units_per_second": units / timing.median,
    }  # fmt: skip


def predictions(
    memory: MemoryProfile | None, predicted: MemoryProfile | None, floor: float | None, step_ms: float
) -> list[dict[str, Any]]:  # fmt: skip
    found: list[dict[str, Any]] = []
    if memory is not None and predicted is not None:
        found.append({
            "name": "memory peak", "predicted": predicted.step_peak_bytes, "measured": memory.peak_bytes, "unit": "bytes",
        })  # fmt: skip
    if floor is not None:
        found.append(
            {"name": "step time (least, by the roofline)", "predicted": floor, "measured": step_ms, "unit": "ms"}
        )
    return found


def device_facts(device: Device) -> dict[str, Any]:
    return {
        "title": device.title, "peaks": dict(device.peaks), "vector_peak": device.vector_peak, "bandwidth": device.bandwidth,
        "memory_bytes": device.memory_bytes, "source": device.source("peaks"), "measured": device.measured,
    }  # fmt: skip


def environment(place: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__, "python": platform.python_version(), "system": platform.platform(terse=True),
        "threads": torch.get_num_threads(), "device": str(place),
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    if place.type == "cuda":
        found |= {"cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name(place)}
    return found
