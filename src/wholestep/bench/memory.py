"""How much memory a training takes: the allocator's own account on a GPU, the process's resident set on a CPU.

On a GPU `peak_bytes` is the most that was allocated at once, in the window or in the second call of a step: the first may compile,
and a CUDA graph recorded later keeps its memory out of the allocator's sight. `reserved_bytes` is what the allocator held in the
window, blocks left from compilation handed back before it; `steady_bytes` is what stays between steps.

On a CPU peak and steady bytes are above the resident set right after the model was built, so imports, weights and data are not
in them; what a compiler left in the process is, for the C library seldom hands memory back.
"""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import psutil
import torch

from wholestep.bench.workload import StepCall

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What Linux takes as: forget the highest resident set seen so far."""


class MemoryMeter:
    """Made right after the build, told when the window begins, read at its end."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.early = 0
        self.base = 0
        self.resets = True
        gc.collect()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.base = psutil.Process().memory_info().rss

    def watched(self, call: StepCall) -> StepCall:
        """The call, its second time looked at by itself. An iteration may be several calls, so iterations would not do."""
        return _Watched(self, call) if self.on_gpu else call

    def before_window(self) -> None:
        """A little before the window, for the blocks given back are asked for again by the next step."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def window_begins(self) -> None:
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # not Linux, or not allowed: the peak is then over the life of the process
            self.resets = False

    def read(self) -> dict[str, Any]:
        if self.on_gpu:
            return {
                "measured": "allocated on the GPU",
                "peak_bytes": max(self.early, torch.cuda.max_memory_allocated()),
                "window_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "steady_bytes": torch.cuda.memory_allocated(),
            }
        since = "in the window" if self.resets else "since the process began"
        steady = max(psutil.Process().memory_info().rss - self.base, 0)
        return {
            "measured": f"resident set above that after the build, highest {since}",
            "peak_bytes": max(
                _peak_resident(self.resets) - self.base, steady
            ),  # Linux counts the peak in lumps, a little late
            "steady_bytes": steady,
        }


class _Watched:
    """A step on a GPU whose second call tells what it takes."""

    def __init__(self, meter: MemoryMeter, call: StepCall) -> None:
        self.meter, self.call, self.count = meter, call, 0

    def __call__(self, batch: Any) -> torch.Tensor:
        self.count += 1
        if self.count != 2:
            return self.call(batch)
        torch.cuda.reset_peak_memory_stats()
        loss = self.call(batch)
        self.meter.early = max(self.meter.early, torch.cuda.max_memory_allocated())
        return loss


def _peak_resident(resets: bool) -> int:
    if resets:
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
