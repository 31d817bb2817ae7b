"""Where the memory of a training step goes: measured, predicted, and what to do when it is too much."""

from wholestep.report.memory.blocks import CATEGORIES, Block, Held, MemoryProfile, Phase, icicle, peak_if
from wholestep.report.memory.oom import Fix, explain_oom, ranked_fixes
from wholestep.report.memory.predict import predict_profile
from wholestep.report.memory.profile import memory_profile
from wholestep.report.memory.regions import predict_compiled
from wholestep.report.memory.scratch import measure_scratch

__all__ = [
    "CATEGORIES",
    "Block",
    "Fix",
    "Held",
    "MemoryProfile",
    "Phase",
    "explain_oom",
    "icicle",
    "measure_scratch",
    "memory_profile",
    "peak_if",
    "predict_compiled",
    "predict_profile",
    "ranked_fixes",
]
