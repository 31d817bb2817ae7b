"""MFU and HFU: which share of the device's peak a measured step used, with every number that went into it.

    MFU = FLOPs of the model's forward and backward / (seconds x peak)      nothing computed twice is counted
    HFU = FLOPs the step executed                   / (seconds x peak)      recomputation counts

Both count matrix products, attention and convolutions, since the peak is that of the units which run them. In: NodeCosts, the
seconds of a step, a Device. Out: the two shares, and a line for each that names numerator, denominator and source: a share
without its formula cannot be compared with anyone else's.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from wholestep.cost.devices import Device
from wholestep.cost.node_costs import NodeCost
from wholestep.cost.roofline import Fp32Units, computing_format
from wholestep.errors import BadOption
from wholestep.ops.amounts import is_known
from wholestep.ops.flops import TENSOR_KINDS

COUNTED = "matrix products, attention, convolutions"


@dataclasses.dataclass(frozen=True, slots=True)
class Utilisation:
    """What was counted, and what it was divided by."""

    model_flops: float
    executed_flops: float
    seconds: float
    number_format: str
    """The format that most of the executed FLOPs are in; the peak is its."""
    share_in_format: float
    """Of the executed FLOPs: the rest ran in another format, for which this is the wrong peak."""
    device: Device

    @property
    def peak(self) -> float:
        return self.device.peak(self.number_format)

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        return self.executed_flops / (self.seconds * self.peak)

    def lines(self) -> tuple[str, str]:
        """For people: MFU, then HFU."""
        rate = f"{show_flops(self.peak)}/s {self.number_format} dense"
        peak = f"{rate}, {self.device.title}: {self.device.source('peaks')}"
        counted = f"{show_flops(self.model_flops)} of forward and backward, nothing twice"
        mixed = (
            ""
            if self.share_in_format > 0.995
            else f"; {1 - self.share_in_format:.1%} of them not in {self.number_format}"
        )
        return (
            f"MFU {self.mfu:.1%} = {counted} ({COUNTED}{mixed}) / ({self.seconds * 1e3:.4g} ms x {peak})",
            f"HFU {self.hfu:.1%} = {show_flops(self.executed_flops)} executed, recomputation included / the same",
        )


def utilisation(
    costs: Sequence[NodeCost], seconds: float, device: Device, *, fp32: Fp32Units | None = None, repeats: int = 1
) -> Utilisation:
    """Of one step that took `seconds` and ran this graph `repeats` times (micro-batches of an accumulation)."""
    if not seconds > 0:
        raise BadOption(f"seconds={seconds!r}", hint="give the time of one step")
    counted = [cost for cost in costs if cost.kind in TENSOR_KINDS]
    if not all(is_known(cost.flops) for cost in counted):
        raise BadOption("the graph has symbolic sizes", hint="give numbers first: at_sizes(costs, sizes)")
    formats: collections.Counter[str] = collections.Counter()
    for cost in counted:
        formats[computing_format(cost, device, fp32 or Fp32Units())] += int(cost.flops)
    executed = sum(formats.values())
    if not executed:
        raise BadOption(f"the graph has no {COUNTED}", hint="MFU says nothing about it; use the roofline's seconds")
    number_format, most = formats.most_common(1)[0]
    model = sum(int(cost.model_flops) for cost in counted if cost.phase != "update")
    return Utilisation(
        model_flops=float(model * repeats), executed_flops=float(executed * repeats), seconds=seconds, number_format=number_format,
        share_in_format=most / executed, device=device,
    )  # fmt: skip


def show_flops(count: float) -> str:
    """`8.18 GFLOP`."""
    for unit, amount in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= amount:
            return f"{count / amount:.4g} {unit}FLOP"
    return f"{count:.0f} FLOP"
