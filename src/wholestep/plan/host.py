"""Whether a step on the CPU fits into what the machine has left: told before it runs, not by the kernel that kills the process.

In: a TrainingGraph. Out: nothing, or NotEnoughMemory. What is needed is the predicted peak beyond the tensors that are there
already: of an interpreted step by `predict.py`, of a compiled one by `plan/peak.py`, in both cases without what operators take for
themselves, which would have to be run to be known. Only a share of it (`SURELY`) is compared, so that a step that would run is not
refused. What is left is what the kernel says it can give (MemAvailable, free swap), and no more than what the control groups of
the process leave; memory of caches of files counts as free.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.optim import Optimizer

from wholestep.errors import NotEnoughMemory
from wholestep.graph.bytes import show_bytes
from wholestep.graph.liveness import tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, tensors_in
from wholestep.lower.footprint.predict import predict_profile
from wholestep.plan.peak import timeline

SURELY = {"interpret": 0.95, "inductor": 0.7}
"""Of the prediction. Measured on five kinds of models: an interpreted step took 1.3 times of it or more, a compiled one 0.81."""
_CACHES = ("inactive_file", "active_file")


def refuse_what_cannot_fit(graph: TrainingGraph, optimizer: Optimizer | None, backend: str) -> None:
    """An error when the step surely takes more than the machine has left; nothing where that cannot be known."""
    available = available_bytes()
    if available is None or _all_values(graph) + _inputs(graph, Role.STATE) <= available:
        return
    try:
        needed = transient_bytes(graph, backend)
    except ValueError:  # symbolic sizes
        return
    if optimizer is not None and not optimizer.state:  # made by the first step
        needed += _inputs(graph, Role.STATE)
    if SURELY[backend] * needed > available:
        raise NotEnoughMemory(
            f"the step needs about {show_bytes(needed)} ({needed:,} bytes) beside its weights and batch, and this machine has "
            f"{show_bytes(available)} ({available:,} bytes) left",
            hint="use a smaller batch, or a budget below that (memory=, --memory), which recomputes values in the backward pass",
        )


def fits_beside(graph: TrainingGraph) -> bool:
    """Whether the interpreted step fits once more, with copies of its inputs: to measure it, or to compare it with eager."""
    available = available_bytes()
    held = _inputs(graph, *Role)
    if available is None or held + _all_values(graph) <= available:
        return True
    try:
        return held + transient_bytes(graph, "interpret") <= available
    except ValueError:
        return True


def transient_bytes(graph: TrainingGraph, backend: str) -> int:
    """The peak of a step beyond what lasts from step to step; a ValueError where sizes are symbolic."""
    if backend == "interpret":
        return predict_profile(graph).peak_bytes - _inputs(graph, *Role)
    return max(timeline(graph, workspace=0).alive, default=0)


def _all_values(graph: TrainingGraph) -> int:
    """All results of the graph at once: no order of events takes more, and adding them up takes no time."""
    try:
        return sum(tensor_bytes(tensor) for node in graph.operations() for tensor in tensors_in(node.meta.get("val")))
    except ValueError:
        return 0


def _inputs(graph: TrainingGraph, *roles: Role) -> int:
    """Bytes of the inputs of these roles; 0 where sizes are symbolic."""
    values = [
        node.meta.get("val")
        for entry, node in zip(graph.inputs, graph.placeholders, strict=True)
        if entry.role in roles
    ]
    try:
        return sum(tensor_bytes(tensor) for value in values for tensor in tensors_in(value))
    except ValueError:
        return 0


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process can still take; None where the system does not say."""
    facts = _numbers(proc / "meminfo")
    if "MemAvailable:" not in facts:
        return None
    free = 1024 * (facts["MemAvailable:"] + facts.get("SwapFree:", 0))
    return max(0, min([free, *_left_in_groups(proc, groups)]))


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What every control group around the process leaves: version 2, and the memory controller of version 1."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, inside = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current", "memory.swap.max", "memory.swap.current")
        elif "memory" in controllers.split(","):
            # the limit with swap counts memory and swap together
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "", "")
        else:
            continue
        folder = root / inside.strip("/")
        for place in (folder, *folder.parents):
            limit, used = _number(place / names[0]), _number(place / names[1])
            if limit is not None and used is not None:
                caches = _numbers(place / "memory.stat")
                yield limit - used + sum(caches.get(name, 0) for name in _CACHES) + _swap_left(place, *names[2:])
            if place == root:
                break


def _swap_left(place: Path, limit: str, used: str) -> int:
    if not limit:
        return 0
    most, now = _number(place / limit), _number(place / used)
    return max(0, most - now) if most is not None and now is not None else 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _numbers(path: Path) -> dict[str, int]:
    """`name value` lines."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
