"""The least time a graph can take on a device: per operator the longer of computing and moving, then sums.

    seconds(node) = max(FLOPs / peak, bytes / bandwidth, bytes sent / bandwidth between ranks + messages * HOP_SECONDS)

In: NodeCosts and a Device. Out: seconds and which of the two binds, and sums by phase, kind and module. The peak is that of the
number format for matrix products, attention and convolutions, and the vector peak for everything else. It is a floor, not a
forecast: it knows nothing of launches, tile shapes or caches. Fusion can go below the sum, because values between fused
operators never reach memory.

With symbolic sizes seconds are expressions too, and what binds is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import NodeCost
from wholestep.ops.amounts import Amount, is_known, largest
from wholestep.ops.flops import TENSOR_KINDS

Limit = Literal["compute", "memory", "link", "nothing", "unknown"]
HOP_SECONDS = 3e-6
"""Of one message between neighbours, however short: assumed, none was measured."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Units:
    """How torch computes fp32 operands on a GPU that has tf32: one switch for matrix products, one for convolutions."""

    matmul: Literal["fp32", "tf32"] = "fp32"
    convolution: Literal["fp32", "tf32"] = "tf32"
    """cuDNN's switch is on in torch unless it is turned off."""


def fp32_units_here() -> Fp32Units:
    """As torch is set in this process. Read per operator: the older switches raise once the newer ones were used."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    return Fp32Units(
        matmul="tf32" if matmul.fp32_precision == "tf32" else "fp32",
        convolution="tf32" if convolution.fp32_precision == "tf32" else "fp32",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """The least time of one operator."""

    seconds: Amount
    limit: Limit


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Of a group of operators."""

    operators: int
    flops: Amount
    bytes: Amount
    seconds: Amount


@dataclasses.dataclass(frozen=True, slots=True)
class Roofline:
    """The floor of a whole graph on one device."""

    device: Device
    total: Sums
    by_phase: Mapping[str, Sums]
    by_kind: Mapping[str, Sums]
    by_module: Mapping[str, Sums]
    """Module path, "" for what no module made."""
    by_limit: Mapping[str, Sums]


def computing_format(cost: NodeCost, device: Device, fp32: Fp32Units) -> str:
    """The format whose peak binds: tf32 for fp32 operands where torch may use it and the device has it."""
    if cost.number_format != "fp32" or "tf32" not in device.peaks:
        return cost.number_format
    return fp32.convolution if cost.kind == "convolution" else fp32.matmul


def peak_of(cost: NodeCost, device: Device, fp32: Fp32Units | None = None) -> float:
    """FLOP/s this operator could reach."""
    if cost.kind in TENSOR_KINDS:
        return device.peak(computing_format(cost, device, fp32 or Fp32Units()))
    return device.peaks["fp64"] if cost.number_format == "fp64" and "fp64" in device.peaks else device.vector_peak


def bound(cost: NodeCost, device: Device, fp32: Fp32Units | None = None) -> Bound:
    """The least seconds of one operator, and what binds."""
    if is_known(cost.flops) and is_known(cost.bytes) and is_known(cost.sent):
        computing = float(cost.flops) / peak_of(cost, device, fp32) if cost.flops else 0.0
        moving = float(cost.bytes) / device.bandwidth
        if not computing and not moving:
            return Bound(0.0, "nothing")
        sending = float(sending_seconds(cost, device))
        if sending > max(computing, moving):
            return Bound(sending, "link")
        return Bound(max(computing, moving), "compute" if computing > moving else "memory")
    computing = cost.flops / peak_of(cost, device, fp32) if cost.flops != 0 else 0
    return Bound(largest((computing, cost.bytes / device.bandwidth, sending_seconds(cost, device))), "unknown")


def sending_seconds(cost: NodeCost, device: Device) -> Amount:
    """Of a collective on the links of a ring: what every rank sends, and its messages one after the other."""
    return cost.sent / device.peer_bandwidth + cost.hops * HOP_SECONDS


def roofline(
    costs: Iterable[NodeCost], device: Device, *, fp32: Fp32Units | None = None, depth: int | None = None
) -> Roofline:
    """Sums over a graph. `depth` cuts module paths to so many parts (`encoder.layer.3` is 3)."""
    bounds = [(cost, bound(cost, device, fp32)) for cost in costs]
    return Roofline(
        device=device, total=_sums(bounds), by_phase=_grouped(bounds, lambda cost, _: cost.phase),
        by_kind=_grouped(bounds, lambda cost, _: cost.kind), by_module=_grouped(bounds, lambda cost, _: _module(cost, depth)),
        by_limit=_grouped(bounds, lambda _, found: found.limit),
    )  # fmt: skip


def _module(cost: NodeCost, depth: int | None) -> str:
    path = cost.module or ""
    return path if depth is None else ".".join(path.split(".")[:depth])


Pair = tuple[NodeCost, Bound]


def _grouped(bounds: list[Pair], key: Callable[[NodeCost, Bound], str]) -> dict[str, Sums]:
    groups: dict[str, list[Pair]] = {}
    for cost, found in bounds:
        groups.setdefault(key(cost, found), []).append((cost, found))
    return {name: _sums(pairs) for name, pairs in groups.items()}


def _sums(bounds: list[Pair]) -> Sums:
    return Sums(
        operators=len(bounds), flops=sum((cost.flops for cost, _ in bounds), 0), bytes=sum((cost.bytes for cost, _ in bounds), 0),
        seconds=sum((found.seconds for _, found in bounds), 0),
    )  # fmt: skip
