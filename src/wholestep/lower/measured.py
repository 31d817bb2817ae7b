"""Never slower: compiled code is kept only if it beats running the graph operator by operator.

In go a graph and its two lowerings; out comes the faster one, with the choice in its facts. They are run on stand-in tensors
of the right shapes, so nothing of the user's is touched. The verdict is kept on disk: a run that is resumed in another process
must take the same code, or its last bits could differ. Only on the CPU: there compiling tiny regions can lose, and a second
copy of the state is affordable. On CUDA the choice that is measured is the CUDA graph (cuda_graph.py).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from wholestep.graph.serialise import dumps_module
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.lower.runner import Runner
from wholestep.ops.timing import Rules
from wholestep.ops.tuner import REFUSED, TUNER, Candidate, Choice, Question, source_of

WHAT, COMPILED, INTERPRETED = "lowering", "inductor", "interpret"
RULES = Rules(warmups=1, rounds=2, most_rounds=10, summary=min, tolerated=1.05)
"""On a busy machine two runs of the same code differ by a few per cent, and threads that wait for each other make single runs ten
times slower. So the best runs count, and compiled code is dropped only if it loses for many rounds."""


def faster_of(graph: TrainingGraph, compiled: Runner, interpreted: Runner) -> Runner:
    """The faster of two runners of one graph."""
    program = _program(graph)
    if program is None:  # symbolic sizes: there is no one shape to measure
        return compiled
    choice = TUNER.choose(_question(graph, program, {COMPILED: compiled, INTERPRETED: interpreted}))
    chosen = {"choices": {**compiled.describe().get("choices", {}), choice.what: choice}}
    if choice.name == COMPILED:
        return compiled.with_facts(**chosen)
    failed = choice.ruled_out.get(COMPILED)
    why = f"it fails on stand-ins: {failed}" if failed else f"it measures slower: {choice}"
    kept = {**compiled.describe(), **chosen, "backend": INTERPRETED, "notes": [f"compiled code dropped, {why}"]}
    return interpreted.with_facts(**{**kept, "driver": interpreted.describe().get("driver")})


def unmeasured(reason: str) -> Choice:
    """Compiled code, because the two cannot be compared."""
    return Choice(WHAT, "the step", COMPILED, REFUSED, ruled_out={INTERPRETED: reason})


def _program(graph: TrainingGraph) -> str | None:
    """A hash of the operators alone: not how long capturing them took."""
    try:
        return hashlib.sha256(dumps_module(graph.module)).hexdigest()[:40]
    except ValueError:
        return None


def _question(graph: TrainingGraph, program: str, runners: dict[str, Runner]) -> Question:
    def prepared(runner: Runner) -> Callable[[Any], Callable[[], Any]]:
        def prepare(_: Any) -> Callable[[], Any]:
            inputs = stand_ins(graph)  # fresh ones for every run, which writes to them
            return lambda: runner(inputs)

        return prepare

    candidates = [Candidate(name=name, prepare=prepared(runner)) for name, runner in runners.items()]
    return Question(
        what=WHAT,
        call=(program, torch.get_num_threads()),
        candidates=candidates,
        reference=COMPILED,
        stand_ins=lambda parts: () if parts == 1 else None,
        device=torch.device("cpu"),
        source=source_of(sys.modules["wholestep.lower"]),
        rules=RULES,
    )


def stand_ins(graph: TrainingGraph) -> list[torch.Tensor]:
    """Tensors of the inputs' shapes: small noise for numbers, zeros for ids and keys, plausible optimizer numbers."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        fake = node.meta["val"]
        tensor = torch.empty_strided(tuple(fake.shape), tuple(fake.stride()), dtype=fake.dtype, device=fake.device)
        if entry.role in (Role.HYPER, Role.SCALE):
            tensor.fill_(0.5).view(-1)[0] = 1.0
        elif tensor.is_floating_point():
            tensor.uniform_(0.001, 0.02, generator=generator)
        else:
            tensor.zero_()
        values.append(tensor)
    return values
