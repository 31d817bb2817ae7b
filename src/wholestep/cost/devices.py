"""Devices as data: peak arithmetic per number format, memory bandwidth, sizes, and where each number comes from.

In: a name (`h200`), or what the driver calls the card. Out: a frozen `Device`. Peaks are dense: vendors print twice as much for
matrices that are half zeros, and those figures are halved here. A card that is not in the table gives None, never another
card's numbers: `measure.py` measures it instead.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from wholestep.errors import BadOption, did_you_mean

FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
TERA, GIGA, MEBI = 1e12, 1e9, 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One card, or one machine's processor."""

    name: str
    """As on the command line: `h200`, `a100-80gb`, `cpu`."""
    title: str
    peaks: Mapping[str, float]
    """Number format -> FLOP/s of dense matrix products, accumulated in fp32; a format without units of its own is absent."""
    vector_peak: float
    """FLOP/s in fp32 outside matrix units: what elementwise operators and reductions have."""
    bandwidth: float
    """Bytes per second between memory and chip, reads and writes together."""
    memory_bytes: int
    """All of it, as the driver reports it; the CUDA context and the allocator's slack are not taken off."""
    link_bandwidth: float
    """Bytes per second from the host to the device, one direction; 0 where they are the same."""
    sources: Mapping[str, str]
    """Field -> where its number comes from."""
    measured: bool = False
    nvlink_bandwidth: float = 0.0
    """Bytes per second to other cards by NVLink, one direction; 0 where there is none."""

    @property
    def peer_bandwidth(self) -> float:
        """Bytes per second from one rank to the next, one direction: assumed to be all of NVLink, else of PCIe; ranks of a
        machine without cards hand over through its memory."""
        return self.nvlink_bandwidth or self.link_bandwidth or self.bandwidth

    @property
    def link_alone(self) -> float:
        """Bytes per second that copies of pinned memory reach in one direction, the other at rest."""
        return MEASURED_LINKS.get(self.name, (SHARE_OF_LINK * self.link_bandwidth, 0.0))[0]

    @property
    def link_both(self) -> float:
        """The same in each direction when both are busy."""
        return MEASURED_LINKS.get(self.name, (0.0, SHARE_OF_LINK * SHARE_OF_BOTH * self.link_bandwidth))[1]

    def peak(self, number_format: str) -> float:
        """FLOP/s of matrix products in this format."""
        if number_format in self.peaks:
            return self.peaks[number_format]
        has = ", ".join(self.peaks)
        raise BadOption(f"{self.title} has no peak for {number_format}", hint=f"it has {has}")

    def source(self, field: str) -> str:
        return self.sources.get(field) or self.sources["all"]


PCIE = {3: 16.0, 4: 32.0, 5: 64.0}
"""GB/s of 16 lanes in one direction, as data sheets round it; transfers reach about 85 % (55 of 64 measured on an H200)."""
SHARE_OF_LINK, SHARE_OF_BOTH = 0.85, 0.73
"""What copies reach of a link, and of that each way when both are busy: measured on an H200, taken for other cards too."""
MEASURED_LINKS = {"h200": (55e9, 40e9)}
"""Card -> bytes per second one way, and each way when both are busy: 1 GiB copies of pinned memory."""
NO = None
Peaks = tuple[float, float, float | None, float | None, float, float | None]


def _device(
    name: str, title: str, source: str, peaks: Peaks, *, bandwidth: float, mib: int, pcie: int, nvlink: int = 0
) -> Device:  # fmt: skip
    """A row of the table: peaks in TFLOP/s in the order of FORMATS, bandwidth in GB/s, memory in MiB, the generation of
    16 PCIe lanes, GB/s of NVLink in both directions together."""
    rates = {key: value * TERA for key, value in zip(FORMATS, peaks) if value is not None}
    link = f"PCIe {pcie}.0 x16, one direction"
    sources = {"all": source, "memory_bytes": f"{mib} MiB, what the driver reports", "link_bandwidth": link}
    return Device(
        name=name, title=title, peaks=MappingProxyType(rates), vector_peak=peaks[1] * TERA, bandwidth=bandwidth * GIGA,
        memory_bytes=mib * MEBI, link_bandwidth=PCIE[pcie] * GIGA,
        sources=MappingProxyType(sources), nvlink_bandwidth=nvlink * GIGA / 2,
    )  # fmt: skip


# TFLOP/s:       fp64    fp32    tf32    bf16    fp16    fp8
_B200: Peaks = (37.0, 75.0, 1100.0, 2250.0, 2250.0, 4500.0)
_HOPPER: Peaks = (67.0, 67.0, 494.7, 989.4, 989.4, 1978.9)
_HOPPER_NVL: Peaks = (60.0, 60.0, 417.5, 835.5, 835.5, 1670.5)
_HOPPER_PCIE: Peaks = (51.0, 51.0, 378.0, 756.0, 756.0, 1513.0)
_AMPERE: Peaks = (19.5, 19.5, 156.0, 312.0, 312.0, NO)
_L4: Peaks = (0.473, 30.3, 60.0, 121.0, 121.0, 242.5)
_A10: Peaks = (0.488, 31.2, 62.5, 125.0, 125.0, NO)
_T4: Peaks = (0.254, 8.1, NO, NO, 65.0, NO)
_4090: Peaks = (1.29, 82.6, 82.6, 165.2, 165.2, 330.3)
_3090: Peaks = (0.556, 35.6, 35.6, 71.0, 71.0, NO)

_HALVED = "sparse figures halved"
_ADA = "NVIDIA Ada GPU Architecture (white paper)"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture (white paper)"

# fmt: off
_ROWS = (
    _device("b200", "NVIDIA B200 (SXM)", f"NVIDIA HGX B200 data sheet, per GPU, {_HALVED}", _B200,
            bandwidth=7700, mib=183359, pcie=5, nvlink=1800),
    _device("h200", "NVIDIA H200 (SXM)", f"NVIDIA H200 data sheet, column SXM, {_HALVED}", _HOPPER,
            bandwidth=4800, mib=143771, pcie=5, nvlink=900),
    _device("h200-nvl", "NVIDIA H200 NVL (PCIe)", f"NVIDIA H200 data sheet, column NVL, {_HALVED}", _HOPPER_NVL,
            bandwidth=4800, mib=143771, pcie=5, nvlink=900),
    _device("h100", "NVIDIA H100 (SXM)", f"NVIDIA H100 data sheet, column SXM, {_HALVED}", _HOPPER,
            bandwidth=3350, mib=81559, pcie=5, nvlink=900),
    _device("h100-pcie", "NVIDIA H100 (PCIe)", f"NVIDIA H100 data sheet, column PCIe, {_HALVED}", _HOPPER_PCIE,
            bandwidth=2000, mib=81559, pcie=5),
    _device("h100-nvl", "NVIDIA H100 NVL (PCIe)", f"NVIDIA H100 data sheet, column NVL, {_HALVED}", _HOPPER_NVL,
            bandwidth=3900, mib=95830, pcie=5, nvlink=600),
    _device("a100-80gb", "NVIDIA A100 80GB (SXM)", "NVIDIA A100 data sheet, column 80GB SXM", _AMPERE,
            bandwidth=2039, mib=81920, pcie=4, nvlink=600),
    _device("a100-80gb-pcie", "NVIDIA A100 80GB (PCIe)", "NVIDIA A100 data sheet, column 80GB PCIe", _AMPERE,
            bandwidth=1935, mib=81920, pcie=4),
    _device("a100-40gb", "NVIDIA A100 40GB", "NVIDIA A100 data sheet, columns 40GB (SXM and PCIe: the same figures)", _AMPERE,
            bandwidth=1555, mib=40960, pcie=4),
    _device("l4", "NVIDIA L4", f"NVIDIA L4 data sheet, {_HALVED}", _L4,
            bandwidth=300, mib=23034, pcie=4),
    _device("a10", "NVIDIA A10", f"NVIDIA A10 data sheet, {_HALVED}", _A10,
            bandwidth=600, mib=23028, pcie=4),
    _device("t4", "NVIDIA T4", "NVIDIA T4 data sheet", _T4,
            bandwidth=320, mib=15360, pcie=3),
    _device("rtx4090", "NVIDIA GeForce RTX 4090", f"{_ADA}, dense, fp32 accumulation", _4090,
            bandwidth=1008, mib=24564, pcie=4),
    _device("rtx3090", "NVIDIA GeForce RTX 3090", f"{_GA102}, dense, fp32 accumulation", _3090,
            bandwidth=936, mib=24576, pcie=4),
)
# fmt: on
DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _ROWS})

_DRIVER_NAMES = {
    "b200": r"B200",
    "h200": r"H200",
    "h200-nvl": r"H200 NVL",
    "h100": r"H100 80GB HBM3|H100 SXM5( 80GB)?",
    "h100-pcie": r"H100 PCIE",
    "h100-nvl": r"H100 NVL",
    "a100-80gb": r"A100 SXM4? 80GB",
    "a100-80gb-pcie": r"A100 80GB PCIE|A100 PCIE 80GB",
    "a100-40gb": r"A100 (SXM4?|PCIE) 40GB",
    "l4": r"L4",
    "a10": r"A10",
    "t4": r"T4",
    "rtx4090": r"RTX 4090",
    "rtx3090": r"RTX 3090",
}
"""What `torch.cuda.get_device_name()` says, whole: `RTX 3090 Ti`, `A10G`, `RTX 4090 Laptop GPU` or a MIG slice are other cards."""


def detect(driver_name: str) -> Device | None:
    """The card of the table that the driver calls so, or None."""
    words = re.sub(r"[\s_-]+", " ", driver_name.upper()).strip()
    words = re.sub(r"^(NVIDIA |TESLA |GEFORCE |GRAPHICS DEVICE )+", "", words)
    found = [name for name, pattern in _DRIVER_NAMES.items() if re.fullmatch(pattern, words)]
    return DEVICES[found[0]] if found else None


def find_device(name: str) -> Device:
    """A device by its name in the table; an unknown one is an error that names the nearest."""
    key = name.strip().lower()
    if key in DEVICES:
        return DEVICES[key]
    near, known = (
        did_you_mean(key, DEVICES),
        f"known: {', '.join(DEVICES)}; `this` and `cpu` are looked up or measured here",
    )
    raise BadOption(f"no device is called {name!r}", hint=f"{near} ({known})" if near else known)
