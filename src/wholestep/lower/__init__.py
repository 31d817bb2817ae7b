"""Lowering: TrainingGraph -> Runner, a callable that updates the state in place. The only folder that writes state."""

from wholestep.lower.interpret import lower_interpret
from wholestep.lower.runner import Runner

__all__ = ["Runner", "lower_interpret"]
