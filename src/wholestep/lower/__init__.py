"""Lowering: TrainingGraph -> Runner, a callable that updates the state in place. The only folder that writes state."""

from wholestep.lower.cuda_graph import AutoCudaGraph, CudaGraphRunner, CudaGraphsByShape, NotRecordable, give_back
from wholestep.lower.inductor import lower_inductor
from wholestep.lower.interpret import lower_interpret
from wholestep.lower.measured import faster_of, unmeasured
from wholestep.lower.overlap import warm_up
from wholestep.lower.runner import Runner
from wholestep.lower.tune import kernels_of, tune_calls

__all__ = [
    "AutoCudaGraph",
    "CudaGraphRunner",
    "CudaGraphsByShape",
    "NotRecordable",
    "Runner",
    "faster_of",
    "give_back",
    "kernels_of",
    "lower_inductor",
    "lower_interpret",
    "tune_calls",
    "unmeasured",
    "warm_up",
]
