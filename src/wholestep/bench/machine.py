"""On what a row was measured: device, clocks, versions, commit, date. Whatever does not answer is left out."""

from __future__ import annotations

import datetime
import functools
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("wholestep", "torch", "triton", "transformers", "liger-kernel")
PACKAGE = Path(__file__).resolve().parent.parent
_ASKED = {"device": "name", "sm_clock_mhz": "clocks.sm", "most_sm_clock_mhz": "clocks.max.sm", "power_watts": "power.draw",
          "driver": "driver_version"}  # fmt: skip


def facts(*, on_gpu: bool) -> dict[str, Any]:
    """Everything about the machine, for one row; on a GPU right after the window, while its clocks are those of the work."""
    import torch

    from wholestep.compat import installed_version

    device: dict[str, Any] = {"device": cpu_name(), "threads": torch.get_num_threads()}
    if on_gpu:
        device = gpu_facts() or {"device": torch.cuda.get_device_name()}
        device["cuda"] = torch.version.cuda
    versions = {name: version for name in PACKAGES if (version := installed_version(name))}
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {**device, "versions": versions, "python": platform.python_version(), "commit": commit(), "date": now}


def gpu_facts() -> dict[str, Any]:
    """Name, clocks, power and driver of the first visible GPU, by nvidia-smi; empty when it does not answer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    query = [
        "nvidia-smi",
        f"--id={visible}",
        f"--query-gpu={','.join(_ASKED.values())}",
        "--format=csv,noheader,nounits",
    ]
    said = _answer(query)
    values = [value.strip() for value in said.splitlines()[0].split(",")] if said else []
    if len(values) != len(_ASKED):
        return {}
    found: dict[str, Any] = dict(zip(_ASKED, values))
    for name in ("sm_clock_mhz", "most_sm_clock_mhz", "power_watts"):
        try:
            found[name] = float(found[name])
        except ValueError:  # "[N/A]"
            del found[name]
    return found


def cpu_name() -> str:
    """As the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def commit() -> str:
    """As the environment says it (for a copy of the files), else of the checkout, with a mark when its files were changed."""
    return os.environ.get("WHOLESTEP_COMMIT") or _checked_out(PACKAGE) or "unknown"


@functools.cache
def _checked_out(folder: Path) -> str:
    """Once per process: what is imported does not change with the files."""
    git = ["git", "-C", str(folder)]
    if (
        _answer([*git, "ls-files", "--error-unmatch", "__init__.py"]) is None
    ):  # installed, perhaps inside another checkout
        return ""
    found = _answer([*git, "rev-parse", "HEAD"]) or ""
    return found + ("+changes" if found and _answer([*git, "status", "--porcelain", "--", "."]) else "")


def _answer(command: list[str]) -> str | None:
    """What a program prints; None when it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
