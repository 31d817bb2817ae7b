"""Captured graphs, kept on disk across processes: tracing a 24-layer model takes seconds, loading it a fraction of one.

A graph is found by what it was traced from: Dynamo's graph of the loss, operation by operation with every constant in it, the
shapes and types of its inputs, the optimizer's structure, the options, and the versions of Python, torch and Wholestep itself.
Whatever the user's Python read is in Dynamo's graph or in its guards, so nothing else can matter. And a cached graph passes
`check="first"` like any other: the first live step is compared with eager PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from wholestep import compat
from wholestep.capture import optimizers
from wholestep.capture.ladder import capture_whole
from wholestep.capture.optimizers import UpdatePlan
from wholestep.capture.preflight import refuse_unsupported
from wholestep.capture.reading import Reading
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture
from wholestep.disk import cache_folder, read_bytes, read_sealed, write_atomically, write_sealed
from wholestep.graph.notes import Note
from wholestep.graph.plan import Plan
from wholestep.graph.serialise import dumps, loads
from wholestep.graph.training_graph import Role


def cached_capture(
    subject: Subject,
    reading: Reading | None,
    batch: Any,
    finish: Callable[[Capture], None],
    *,
    finished_by: str | None = None,
    missed: Callable[[], None] = lambda: None,
    dynamic: Sequence[dict[int, str]] | None = None,
    enabled: bool = True,
) -> Capture:
    """`capture_whole`, then `finish` (passes and a plan), or their result from an earlier process.

    `finished_by` names all that `finish` depends on; without it only what was captured is kept. `missed` is called before
    anything is traced.
    """
    if not enabled or dynamic is not None or reading is None:
        missed()
        made = capture_whole(subject, reading, batch, dynamic=dynamic)
        finish(made)
        return made
    refuse_unsupported(subject)
    key = capture_key(subject, reading, finished_by)
    path = cache_folder("captures") / f"{key}.graph"
    found = _load(path, reading)
    if found is None:
        missed()
        found = capture_whole(subject, reading)
        keeps = len(found.constants) == len(reading.tensors(Role.CONSTANT))  # none of the graph's own
        if finished_by is not None:
            finish(found)
        if keeps:
            _store(path, found)
    if finished_by is None:  # other passes or another plan make another step of it, which nobody has compared yet
        finish(found)
    else:
        found.key = key
    return found


def was_checked(capture: Capture) -> bool:
    """Whether an earlier process compared the first step of this very capture with eager PyTorch, on this kind of machine."""
    return capture.from_cache and capture.key is not None and read_bytes(_checked(capture.key)) is not None


def remember_checked(capture: Capture) -> None:
    if capture.key is not None:
        write_atomically(_checked(capture.key), b"compared with eager PyTorch\n")


def _checked(key: str) -> Path:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return cache_folder("captures") / f"{key}-{hashlib.sha256(gpu.encode()).hexdigest()[:8]}.checked"


def _store(path: Path, capture: Capture) -> None:
    try:
        parts = [dumps(capture.graph), dumps(capture.update) if capture.update else b""]
    except ValueError:  # symbolic sizes, or constants too large to keep
        return
    facts = {
        "num_sites": capture.num_sites,
        "plans": [dataclasses.asdict(p) for p in capture.plans],
        "notes": [note.to_json() for note in capture.notes],
        "used": capture.used,
        "assumed": capture.assumed,
        "facts": capture.facts,
        "plan": None if capture.plan is None else capture.plan.to_json(),
        "sizes": [len(p) for p in parts],
    }
    write_sealed(path, json.dumps(facts).encode() + b"\n" + b"".join(parts))


def _load(path: Path, reading: Reading) -> Capture | None:
    data = read_sealed(path)
    if data is None:
        return None
    mode = compat.new_fake_mode()
    try:
        header, body = data.split(b"\n", 1)
        facts = json.loads(header)
        first, second = facts["sizes"]
        if len(body) != first + second:
            return None
        graph = loads(body[:first], mode)
        update = loads(body[first:], mode) if second else None
        plans = tuple(
            UpdatePlan(p["group"], p["part"], p["kind"], tuple(p["names"]), tuple(p["state_keys"]),
                       tuple((k, v) for k, v in p["flags"]))
            for p in facts["plans"]
        )  # fmt: skip
        plan = None if facts["plan"] is None else Plan.from_json(facts["plan"])
        notes = [Note.from_json(stored) for stored in facts["notes"]]
    except (ValueError, KeyError, TypeError):  # written by another version, or torn: traced anew
        return None
    return Capture(
        graph, update, reading.graph.aux_names, facts["num_sites"], plans, tuple(reading.tensors(Role.CONSTANT)),
        notes, tuple(facts["used"]), fake_mode=mode, from_cache=True, plan=plan, assumed=tuple(facts["assumed"]),
        facts=tuple(facts["facts"]),
    )  # fmt: skip


def capture_key(subject: Subject, reading: Reading, finished_by: str | None = None) -> str:
    """One hash over all that the trace, and what finishes it, depends on."""
    digest = hashlib.sha256()
    trained = subject.trained
    live = [*subject.parameters.items(), *subject.buffers.items()]
    for part in (
        _versions(),
        reading.graph.digest,
        reading.places,
        [_kind(t) for t, place in zip(reading.args, reading.places, strict=True) if place is not None],
        [(name, _kind(t), name in trained) for name, t in live],
        sorted(subject.aliases.items()),
        reading.graph.ranks or subject.ranks,
        [path for path, _ in subject.root.named_modules()],
        _optimizer(subject),
        finished_by,
        (subject.precision, subject.accumulate, subject.clip_norm is None, subject.nonfinite, subject.chunked_loss),
        (torch.is_autocast_enabled(subject.device.type), torch.get_autocast_dtype(subject.device.type)),
        (torch.get_default_dtype(), subject.target, torch.backends.cudnn.enabled, str(subject.device)),
    ):
        digest.update(repr(part).encode())
        digest.update(b"\0")
    return digest.hexdigest()[:40]


def _kind(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), tensor.requires_grad


def _versions() -> tuple:
    return (torch.__version__, platform.python_version(), own_sources())


@functools.cache
def own_sources() -> str:
    """A hash of Wholestep's own code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _optimizer(subject: Subject) -> tuple:
    optimizer = subject.optimizer
    if optimizer is None:
        return ("none",)
    if optimizers.supported(optimizer) is not None:
        return ("eager",)
    names = {id(p): n for n, p in subject.trained.items()}
    return tuple(dataclasses.astuple(p) for p in optimizers.plan_updates(optimizer, names))
