"""How far the first step may be from eager PyTorch, by the precision it computes in."""

from __future__ import annotations

import dataclasses

import torch

from wholestep.graph.training_graph import TrainingGraph
from wholestep.verify.compare import compute_dtype


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Errors relative to the norm of the tensor. They find a wrong step, not a rounding: `verify` measures that."""

    graph: float
    """The captured graph, interpreted: the same operators as eager."""
    lowered: float
    """The compiled step, which sums in another order."""
    floor: float
    """In units of the root mean square of all gradients: a gradient that is truly zero is noise in eager as well."""
    loss: float


LIMITS = {
    "fp32": Limits(1e-3, 5e-3, 1e-4, 1e-4),
    "tf32": Limits(5e-3, 2e-2, 2e-3, 2e-3),
    "bf16": Limits(6e-2, 0.1, 2e-2, 2e-2),
}


def precision_of(graph: TrainingGraph, device: torch.device) -> str:
    """Which of them holds."""
    if compute_dtype(graph) in (torch.bfloat16, torch.float16):
        return "bf16"
    if device.type != "cuda":
        return "fp32"
    convolves = any("convolution" in str(node.target) for node in graph.operations())
    loose = torch.get_float32_matmul_precision() != "highest" or (convolves and torch.backends.cudnn.allow_tf32)
    return "tf32" if loose else "fp32"
