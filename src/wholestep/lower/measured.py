"""Never slower: compiled code is kept only if it beats running the graph operator by operator.

In go a graph and its two lowerings; out comes the faster one, with both times in its facts. They are run on stand-in tensors
of the right shapes, so nothing of the user's is touched. The verdict is kept on disk: a run that is resumed in another process
must take the same code, or its last bits could differ. Only on the CPU: there compiling tiny regions can lose, and a second
copy of the state is affordable. On CUDA the choice that is measured is the CUDA graph (cuda_graph.py).
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

import torch

from wholestep.disk import cache_folder, read_bytes, write_atomically
from wholestep.graph.serialise import dumps_module
from wholestep.graph.training_graph import Role, TrainingGraph
from wholestep.lower.runner import Runner

TIMED = 2
MOST_TIMED = 10
"""Rounds before compiled code is dropped: on a busy machine threads that wait for each other make single runs ten times slower."""
TOLERATED = 1.05
"""Two runs of the same code differ by a few per cent on a busy machine."""


def faster_of(graph: TrainingGraph, compiled: Runner, interpreted: Runner) -> Runner:
    """The faster of two runners of one graph."""
    key = _key(graph)
    if key is None:  # symbolic sizes: there is no one shape to measure
        return compiled
    path = cache_folder("choices") / f"{key}.json"
    times = _remembered(path)
    if times is None:
        times = _measured(graph, compiled, interpreted)
        write_atomically(path, json.dumps(times).encode())
    said = f"{1e3 * times['inductor']:.2f} ms compiled, {1e3 * times['interpret']:.2f} ms interpreted"
    if times["inductor"] <= TOLERATED * times["interpret"]:
        return compiled.with_facts(measured=said)
    notes = [f"compiled code dropped, it measures slower: {said}"]
    kept = {**compiled.describe(), "backend": "interpret", "measured": said, "notes": notes}
    return interpreted.with_facts(**{**kept, "driver": interpreted.describe().get("driver")})


def _key(graph: TrainingGraph) -> str | None:
    try:
        stored = dumps_module(graph.module)  # the operators alone: not how long capturing them took
    except ValueError:
        return None
    surroundings = f"{torch.__version__} {torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"
    return hashlib.sha256(stored + surroundings.encode()).hexdigest()[:40]


def _remembered(path: Any) -> dict[str, float] | None:
    data = read_bytes(path)
    try:
        times = json.loads(data) if data else None
        return None if times is None else {k: float(times[k]) for k in ("inductor", "interpret")}
    except (ValueError, KeyError, TypeError):
        return None


def _measured(graph: TrainingGraph, compiled: Runner, interpreted: Runner) -> dict[str, float]:
    """The best of some runs each, by turns; the verdict is for good, so a loss has to be a lasting one."""
    best = {"inductor": float("inf"), "interpret": float("inf")}
    _seconds(compiled, graph), _seconds(interpreted, graph)  # the first run loads code
    for count in range(MOST_TIMED):
        for name, runner in (("inductor", compiled), ("interpret", interpreted)):
            best[name] = min(best[name], _seconds(runner, graph))
        if count + 1 >= TIMED and best["inductor"] <= TOLERATED * best["interpret"]:
            break
    return best


def _seconds(runner: Runner, graph: TrainingGraph) -> float:
    inputs = stand_ins(graph)
    began = time.perf_counter()
    runner(inputs)
    return time.perf_counter() - began


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
