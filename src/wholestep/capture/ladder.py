"""The fallback ladder: whole step; Dynamo's forward, then whole step; eager. Each fall is told with its reason.

A rung refuses by raising `CaptureRefused` or by failing; errors meant for the user (`WholestepError`) end the climb.
"""

from __future__ import annotations

import dataclasses
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from wholestep import compat
from wholestep.capture.batch import BatchSpec, flatten
from wholestep.capture.preflight import notes_on, refuse_unsupported
from wholestep.capture.python_random import python_randomness_watched
from wholestep.capture.reach import reached
from wholestep.capture.snapshot import Snapshot
from wholestep.capture.subject import Subject
from wholestep.capture.trace import Capture, capture
from wholestep.errors import CaptureRefused, WholestepError


@dataclasses.dataclass(frozen=True, slots=True)
class Fall:
    """Why a rung was left."""

    rung: str
    reason: str
    where: str | None

    def __str__(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        return f"{self.rung}: {self.reason}{place}"


@dataclasses.dataclass(frozen=True, slots=True)
class Climb:
    """The outcome: a capture, or None when only eager is left, and the falls on the way."""

    capture: Capture | None
    falls: tuple[Fall, ...]
    notes: tuple[str, ...] = ()


def climb(
    subject: Subject,
    tensors: Sequence[torch.Tensor],
    spec: BatchSpec,
    *,
    dynamic: Sequence[dict[int, str]] | None = None,
) -> Climb:
    """Capture on the highest rung that is faithful."""
    falls: list[Fall] = []
    try:
        refuse_unsupported(subject)
    except CaptureRefused as refused:
        return Climb(None, (Fall("whole step", refused.reason, refused.where),))
    notes = tuple(notes_on(subject))
    rungs: list[tuple[str, Callable[[], Capture]]] = [
        ("whole step", lambda: capture(subject, tensors, spec, dynamic=dynamic)),
        ("Dynamo forward", lambda: _with_dynamo_forward(subject, tensors, spec, dynamic)),
    ]
    for name, attempt in rungs:
        try:
            made = attempt()
        except WholestepError:
            raise
        except CaptureRefused as refused:
            # what is refused would be burned in by Dynamo as well, without a word: straight to eager
            falls.append(Fall(name, refused.reason, refused.where))
            break
        except Exception as error:
            falls.append(Fall(name, _first_line(error), _user_line(error)))
        else:
            made.rung = name
            return Climb(made, tuple(falls), notes)
    return Climb(None, tuple(falls), notes)


class _LossModule(nn.Module):
    """The loss as a module of the batch's tensors, which is the form Dynamo exports."""

    def __init__(self, subject: Subject, spec: BatchSpec) -> None:
        super().__init__()
        self.subject_root = subject.root
        self._subject, self._spec = (subject,), spec  # in a tuple: not a submodule

    def forward(self, *tensors: torch.Tensor) -> Any:
        from wholestep.capture.batch import unflatten

        subject = self._subject[0]
        return subject.loss_fn(subject.model, unflatten(tensors, self._spec))


def _with_dynamo_forward(subject: Subject, tensors: Any, spec: BatchSpec, dynamic: Any) -> Capture:
    """Let Dynamo turn the Python of forward and loss into a graph (it knows torch.cond and guards), then trace that."""
    snapshot = Snapshot(subject.root, reached(subject)[1])
    try:
        with python_randomness_watched(), warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*certain side effects.*")
            exported = compat.dynamo_export(_LossModule(subject, spec), tuple(tensors))
        changed = snapshot.changes()
    finally:
        snapshot.restore()
    if changed:
        raise CaptureRefused(f"the forward depends on Python state: {changed[0]} is written")
    inner = dict(exported.named_modules())

    def loss_from_graph(model: Any, batch: Any) -> Any:
        flat, _ = flatten(batch)
        return exported(*flat)

    stand_in = dataclasses.replace(subject, model=exported, root=exported, loss_fn=loss_from_graph)
    stand_in.refresh()
    renamed = {id(p): n for n, p in [*subject.parameters.items(), *subject.buffers.items()]}
    if any(id(p) not in renamed for p in [*stand_in.parameters.values(), *stand_in.buffers.values()]):
        raise CaptureRefused("Dynamo's graph holds copies of parameters")
    made = capture(stand_in, tensors, spec, dynamic=dynamic)
    names = {n: renamed[id(p)] for n, p in [*stand_in.parameters.items(), *stand_in.buffers.items()]}
    _rename(made, names)
    made.notes.append(f"forward exported by Dynamo first ({len(inner)} modules)")
    return made


def _rename(made: Capture, names: dict[str, str]) -> None:
    """Give the tensors of a Dynamo graph their names in the user's model."""

    def new(name: str) -> str:
        head, slash, key = name.rpartition("/")
        return names.get(head, head) + slash + key if slash else names.get(name, name)

    for graph in (made.graph, made.update):
        if graph is None:
            continue
        graph.inputs = tuple(dataclasses.replace(entry, name=new(entry.name)) for entry in graph.inputs)
        graph.gradients = {new(n): v for n, v in graph.gradients.items()}
    made.plans = tuple(dataclasses.replace(p, names=tuple(map(new, p.names))) for p in made.plans)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _user_line(error: Exception) -> str | None:
    """The innermost frame of the user's code in a traceback."""
    from wholestep.capture.modes import is_user_file

    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_user_file(f.filename)]
    return f"{frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else None
