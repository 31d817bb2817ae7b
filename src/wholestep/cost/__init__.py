"""What a TrainingGraph costs: FLOPs and bytes of every operator, devices, the least time on one, and MFU and HFU.

In: a TrainingGraph and a Device. Out: NodeCosts, a Roofline, a Utilisation. Conventions: docs/cost.md.
"""

from wholestep.cost.devices import DEVICES, Device, detect, find_device
from wholestep.cost.measure import device_for, measure_device, this_device
from wholestep.cost.node_costs import NodeCost, at_sizes, cost_of, node_costs, total_flops
from wholestep.cost.roofline import Bound, Fp32Units, Roofline, bound, fp32_units_here, roofline
from wholestep.cost.utilisation import Utilisation, utilisation

__all__ = [
    "DEVICES", "Bound", "Device", "Fp32Units", "NodeCost", "Roofline", "Utilisation", "at_sizes", "bound", "cost_of",
    "detect", "device_for",
    "find_device", "fp32_units_here", "measure_device", "node_costs", "roofline", "this_device", "total_flops",
    "utilisation",
]  # fmt: skip
