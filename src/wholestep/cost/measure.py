"""The device at hand: from the table when its name is known there, measured otherwise (fp8 is not).

`measure_device` times matrix products per number format and a large copy, takes the best of a few, and keeps the result on disk
by device, torch version and threads: seconds once. What it finds is what torch reaches, below what a data sheet would print,
so a share of it (MFU) reads higher; it is labelled `measured` wherever it is shown.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch

from wholestep.cost.devices import FORMATS, Device, detect
from wholestep.disk import cache_folder, read_bytes, write_json
from wholestep.errors import BadOption
from wholestep.graph.counted import counted

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REPEATS = 5
LONGEST = 1.0
"""Seconds for one number: a format that a CPU emulates is measured with fewer, smaller products."""


def this_device(kind: str | None = None) -> Device:
    """The device at hand; `kind` is cuda or cpu, by default cuda where there is one."""
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    known = detect(torch.cuda.get_device_name()) if kind == "cuda" and torch.cuda.is_available() else None
    return known if known is not None else measure_device(kind)


def measure_device(kind: str = "cpu", *, fresh: bool = False) -> Device:
    """Measure peaks and bandwidth, or read what was measured before.

    `fresh` measures again and keeps the better of the two: a busy machine reaches less than it could, never more.
    """
    if kind not in ("cpu", "cuda"):
        raise BadOption(f"device {kind!r} cannot be measured", hint="use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadOption("there is no GPU here to measure", hint="use cpu, or name a device of the table")
    path = cache_folder("devices") / f"{_key(kind)}.json"
    facts = _read(read_bytes(path))
    if facts is None or fresh:
        facts = _better(facts, _measure(kind))
        write_json(path, facts)
    return _from_facts(facts)


def _key(kind: str) -> str:
    """What the figures depend on."""
    title = torch.cuda.get_device_name() if kind == "cuda" else _processor()
    parts = (kind, title, torch.__version__, *([] if kind == "cuda" else [f"{torch.get_num_threads()} threads"]))
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(parts)).strip("-").lower()


def _read(data: bytes | None) -> dict[str, Any] | None:
    """What was kept, or None when it cannot be used."""
    try:
        facts = json.loads(data) if data else None
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and facts.keys() >= _FIELDS and "fp32" in facts["peaks"] else None


def _better(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    if before is None:
        return now
    peaks = {name: max(peak, before["peaks"].get(name, 0.0)) for name, peak in now["peaks"].items()}
    return now | {"peaks": peaks, "bandwidth": max(before["bandwidth"], now["bandwidth"])}


_FIELDS = {"name", "title", "peaks", "bandwidth", "memory_bytes", "link_bandwidth", "source"}


def _from_facts(facts: dict[str, Any]) -> Device:
    fields = {key: facts[key] for key in _FIELDS - {"source", "peaks"}}
    return Device(
        **fields, peaks=MappingProxyType(facts["peaks"]), vector_peak=facts["peaks"]["fp32"],
        sources=MappingProxyType({"all": facts["source"]}), measured=True,
    )  # fmt: skip


def _measure(kind: str) -> dict[str, Any]:
    source = f"measured here by torch {torch.__version__}"
    if kind == "cpu":
        threads = torch.get_num_threads()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        facts = {"name": "cpu", "title": f"{_processor()}, {counted(threads, 'thread')}", "memory_bytes": memory,
                 "link_bandwidth": 0.0}  # fmt: skip
    else:
        card = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts = {"name": "this", "title": card.name, "memory_bytes": card.total_memory,
                 "link_bandwidth": _link_bandwidth()}  # fmt: skip
    return facts | {"peaks": _peaks(kind), "bandwidth": _bandwidth(kind), "source": source}


def _peaks(kind: str) -> dict[str, float]:
    """FLOP/s of square products. tf32 is fp32 with torch's switch on."""
    found = {}
    for number_format in FORMATS:
        if number_format == "tf32":
            if kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
                found[number_format] = _with_tf32(lambda: _matmul_peak(kind, torch.float32))
            continue
        dtype = DTYPES.get(number_format)
        emulated = kind == "cuda" and number_format == "bf16" and torch.cuda.get_device_capability() < (8, 0)
        if dtype is not None and not emulated:
            found[number_format] = _matmul_peak(kind, dtype)
    return found


def _with_tf32(measure: Callable[[], float]) -> float:
    kept = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return measure()
    finally:
        torch.backends.cuda.matmul.fp32_precision = kept


def _matmul_peak(kind: str, dtype: torch.dtype) -> float:
    best = 0.0
    for side in (512, 1024, 2048) if kind == "cpu" else (2048, 4096, 8192):
        a, b = (torch.randn(side, side, device=kind).to(dtype) for _ in range(2))
        out = torch.empty(side, side, device=kind, dtype=dtype)
        seconds, spent = _best_seconds(kind, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        best = max(best, 2 * side**3 / seconds)
        if spent * 8 > LONGEST:  # the next size takes eight times as long
            break
    return best


def _bandwidth(kind: str) -> float:
    """Bytes read plus bytes written per second of a copy too large for any cache."""
    count = 2**26 if kind == "cpu" else 2**28
    source = torch.ones(count, device=kind)
    target = torch.empty_like(source)
    seconds, _ = _best_seconds(kind, lambda: target.copy_(source))
    return 2 * source.nbytes / seconds


def _link_bandwidth() -> float:
    source = torch.ones(2**26, pin_memory=True)
    target = torch.empty(2**26, device="cuda")
    seconds, _ = _best_seconds("cuda", lambda: target.copy_(source, non_blocking=True))
    return source.nbytes / seconds


def _best_seconds(kind: str, call: Callable[[], Any]) -> tuple[float, float]:
    """(the fastest of a few calls, all of them together)."""
    wait = torch.cuda.synchronize if kind == "cuda" else lambda: None
    began = time.perf_counter()
    call()
    wait()
    best = time.perf_counter() - began
    for _ in range(REPEATS):
        if time.perf_counter() - began > LONGEST:
            break
        start = time.perf_counter()
        call()
        wait()
        best = min(best, time.perf_counter() - start)
    return best, time.perf_counter() - began


def _processor() -> str:
    """The model of the CPU, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "CPU"
