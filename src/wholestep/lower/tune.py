"""Tuning when a step is lowered: a graph in, what was chosen for each of its calls that have several implementations out.

Each distinct call is measured once, on stand-ins of its sizes and strides, before anything of the step runs; the operators then
find the answer. So the first step measures nothing, and a recording finds everything decided. Calls whose sizes are symbols are
measured at the first call of each size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wholestep.graph.training_graph import TrainingGraph
from wholestep.lower.cuda_graph import give_back
from wholestep.ops.tuned import calls_that_ask
from wholestep.ops.tuner import NAMED, TUNER, Choice


def kernels_of(choices: Mapping[str, Choice]) -> dict[str, str]:
    """The part of choices that a plan can name: key of a call -> its kernel."""
    return {key: choice.name for key, choice in choices.items() if key != choice.what}


def tune_calls(graph: TrainingGraph) -> dict[str, Choice]:
    """Key of the call (graph/keys.py) -> its choice."""
    chosen: dict[str, Choice] = {}
    before = TUNER.measurements
    for call in calls_that_ask(graph):
        question = call.question
        if question.device.type == "cuda" and not torch.cuda.is_available():  # captured to be planned, not to run
            continue
        if call.kernel:
            # equal layers of which only some are named: their key tells what the others take
            chosen.setdefault(call.key, Choice(question.what, str(question.call), call.kernel, NAMED))
        else:
            chosen[call.key] = TUNER.choose(question)
    if TUNER.measurements > before:
        give_back()  # what the stand-ins took
    return chosen
