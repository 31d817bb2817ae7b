"""Wholestep: a holistic compiler for training PyTorch models.

    step = wholestep.compile(model, loss_fn, optimizer, example_batch)
    for batch in loader:
        loss = step(batch)

`import wholestep` itself imports no torch: the public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "compile": "wholestep.api",
    "verify": "wholestep.api",
    "schedule": "wholestep.api",
    "offload": "wholestep.runtime.offload",
    "default_passes": "wholestep.passes.pipeline",
    "save": "wholestep.train.checkpoint",
    "load": "wholestep.train.checkpoint",
    "Plan": "wholestep.graph.plan",
    "Step": "wholestep.runtime.step",
    "TrainingGraph": "wholestep.graph.training_graph",
    "WholestepError": "wholestep.errors",
    "WholestepWarning": "wholestep.errors",
}

_MODULES = {
    "nn": "wholestep.nn",
    "hf": "wholestep.train.hf",
    "optim": "wholestep.optim",
    "recipes": "wholestep.schedule.recipes",
}

__all__ = [
    "Plan", "Step", "TrainingGraph", "WholestepError", "WholestepWarning", "compile", "default_passes", "load", "offload", "save",
    "schedule", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'wholestep' has no attribute {name!r}")
