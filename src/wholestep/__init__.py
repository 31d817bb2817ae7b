"""Wholestep: a holistic compiler for training PyTorch models.

    step = wholestep.compile(model, loss_fn, optimizer, example_batch)
    for batch in loader:
        loss = step(batch)

`import wholestep` itself imports no torch: the public names load on first use.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors: the same names as in the tables below
    from wholestep import nn, optim, relational
    from wholestep.api import compile, schedule, verify
    from wholestep.commands import plan, profile, train
    from wholestep.errors import WholestepError, WholestepWarning
    from wholestep.graph.plan import Plan
    from wholestep.graph.training_graph import TrainingGraph
    from wholestep.passes.pipeline import default_passes
    from wholestep.runtime.step import Step
    from wholestep.schedule import recipes
    from wholestep.train import hf
    from wholestep.train.checkpoint import load, save
    from wholestep.train.loggers import Logger

__version__ = "0.1.0"

_PUBLIC = {
    "compile": "wholestep.api",
    "verify": "wholestep.api",
    "schedule": "wholestep.api",
    "offload": "wholestep.runtime.offload",
    "train": "wholestep.commands",
    "plan": "wholestep.commands",
    "profile": "wholestep.commands",
    "default_passes": "wholestep.passes.pipeline",
    "save": "wholestep.train.checkpoint",
    "load": "wholestep.train.checkpoint",
    "Logger": "wholestep.train.loggers",
    "Mesh": "wholestep.graph.mesh",
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
    "relational": "wholestep.relational",
}

__all__ = [
    "Logger", "Mesh", "Plan", "Step", "TrainingGraph", "WholestepError", "WholestepWarning", "compile", "default_passes", "hf",
    "load", "nn", "offload", "optim", "plan", "profile", "recipes", "relational", "save", "schedule", "train", "verify",
]  # fmt: skip


if not TYPE_CHECKING:  # a checker takes the imports above, and finds what is misspelt

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        raise AttributeError(f"module 'wholestep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(types.ModuleType):
    """Importing `wholestep.verify.report` binds the folder `verify` here, which must not hide the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _PUBLIC and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
