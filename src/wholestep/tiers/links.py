"""How fast memory beyond the card is: the link to the host each way and both ways, what it costs to start a copy, whether copies
slow the computation down, and what a folder's disk does past the page cache.

Measured once, in less than ten seconds, and kept on disk by card or by the device of a folder. `wholestep doctor` prints it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wholestep.disk import cache_folder, read_bytes, write_json
from wholestep.errors import WholestepError
from wholestep.tiers.arena import host_memory
from wholestep.tiers.files import REQUEST_BYTES, THREADS, FileStore, aligned

COPY_BYTES = 512 << 20
REPEATS = 4
FILE_BYTES = 256 << 20
"""Of a folder's measurement: 0.1 s of a disk of 2.5 GB/s each way, and never more than a few seconds of a slow one."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinkRates:
    """Between a card and the host; bytes per second of pinned memory."""

    out: float
    back: float
    both: float
    """Each way, when both are busy."""
    latency: float
    """Seconds of a copy of next to nothing."""
    slowdown: float
    """Time of matrix products beside copies both ways, over their time alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class FolderRates:
    """Of a folder, with direct I/O; bytes per second."""

    write: float
    read: float


def measure_link(device: torch.device, *, fresh: bool = False) -> LinkRates:
    """Of this card; needs a GPU."""
    name = torch.cuda.get_device_name(device).replace(" ", "_").replace("/", "_")
    return _kept(f"link-{name}", LinkRates, lambda: _measure_link(device), fresh)


def measure_folder(folder: str | Path) -> FolderRates:
    """Of the disk on which a folder lies; raises BadOption where it cannot be written or has no direct I/O."""
    store = FileStore([folder])
    try:
        return _kept(f"folder-{os.stat(folder).st_dev:x}", FolderRates, lambda: _measure_folder(store))
    finally:
        store.close()


def _kept(name: str, kind: Any, measure: Callable[[], Any], fresh: bool = False) -> Any:
    path = cache_folder("links") / f"{name}.json"
    data = None if fresh else read_bytes(path)
    if data is not None:
        try:
            return kind(**{key: float(value) for key, value in json.loads(data).items()})
        except (ValueError, TypeError, AttributeError):
            pass  # of another version, or damaged: measured again
    found = measure()
    write_json(path, dataclasses.asdict(found))
    return found


def _measure_folder(store: FileStore) -> FolderRates:
    memory = aligned(FILE_BYTES)
    memory.random_(0, 255)
    slot = store.reserve(FILE_BYTES)
    rates = []
    for start in (store.write, store.read):
        began = time.perf_counter()
        store.wait(start(slot, memory), slot)
        rates.append(FILE_BYTES / (time.perf_counter() - began))
    return FolderRates(*rates)


def _measure_link(device: torch.device) -> LinkRates:
    card, other = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    host, beside = (host_memory(COPY_BYTES, pinned=True) for _ in range(2))
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copies(*pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
        for stream, (target, source) in zip(streams, pairs, strict=False):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    out, back = _seconds(device, lambda: copies((host, card))), _seconds(device, lambda: copies((card, host)))
    both = _seconds(device, lambda: copies((host, card), (other, beside)))
    small = _seconds(device, lambda: copies((host[:4096], card[:4096])))
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def products() -> None:
        for _ in range(16):
            left @ left

    def products_beside() -> None:
        copies((host, card), (other, beside))
        products()

    alone, slowed = _seconds(device, products), _seconds(device, products_beside)
    return LinkRates(COPY_BYTES / out, COPY_BYTES / back, COPY_BYTES / both, small, slowed / alone)


def _seconds(device: torch.device, work: Callable[[], None]) -> float:
    """The quickest of a few, from and to a device at rest."""
    found = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


def told_links(folder: str | Path) -> list[str]:
    """For people: the link of the first card, and the disk of a folder."""
    lines = []
    if torch.cuda.is_available():
        link = measure_link(torch.device("cuda"))
        rates = (
            f"{link.out / 1e9:.1f} GB/s out, {link.back / 1e9:.1f} in, {link.both / 1e9:.1f} each when both are busy"
        )
        lines.append(
            f"host: {rates}; {1e6 * link.latency:.0f} us to start; computation beside copies takes {link.slowdown:.2f}x"
        )
    else:
        lines.append("host: no card here, so there is no link to measure")
    try:
        disk = measure_folder(folder)
        how = f"{THREADS} requests of {REQUEST_BYTES >> 20} MiB, direct I/O"
        lines.append(f"{folder}: {disk.write / 1e9:.2f} GB/s written, {disk.read / 1e9:.2f} read ({how})")
    except WholestepError as error:
        lines.append(f"{folder}: {error}")
    return lines
