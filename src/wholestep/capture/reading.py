"""One call of a LossGraph: its arguments, and what each of them is to the captured step.

A tensor that the model holds is a PARAMETER or a BUFFER and is looked up live. What the batch brings, and tensors that the
Python around the model keeps (a hidden state, a running mean), are inputs of every call: BATCH. Parameters and buffers of
modules that only the loss knows (a teacher) are CONSTANT: read where they lie, bound again when they move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from wholestep import compat
from wholestep.capture.batch import flatten
from wholestep.capture.front.loss_graph import LossGraph
from wholestep.capture.subject import Subject
from wholestep.errors import BadBatch, CaptureRefused
from wholestep.graph.training_graph import Input, Role


@dataclasses.dataclass(slots=True)
class Reading:
    """The arguments of one call, with their roles."""

    graph: LossGraph
    args: Sequence[Any]
    places: tuple[Input | None, ...]
    """None for sizes and numbers."""
    numbers: list[Any] = dataclasses.field(default_factory=list)
    """Python numbers that tensor operators take."""

    def tensors(self, role: Role) -> list[torch.Tensor]:
        return [self.args[i] for i, place in enumerate(self.places) if place is not None and place.role is role]

    def names(self, role: Role) -> list[str]:
        return [place.name for place in self.places if place is not None and place.role is role]


def read(subject: Subject, graph: LossGraph, args: Sequence[Any], batch: Any = None) -> Reading:
    """Give every argument its role; raises CaptureRefused for a tensor that no captured step can have as input."""
    known = {id(t): Input(Role.PARAMETER, n) for n, t in subject.root.named_parameters()}
    known |= {id(t): Input(Role.BUFFER, n) for n, t in subject.root.named_buffers()}
    labels = _batch_labels(batch)
    places: list[Input | None] = [None] * len(graph.arguments)
    used: set[str] = set()
    constants = 0
    for i in graph.tensors:
        tensor, argument = args[i], graph.arguments[i]
        _refuse(tensor, argument.source, graph.detaches(i))
        found = known.get(id(tensor))
        if found is not None and i not in graph.copied_in:
            places[i] = found
        elif argument.in_module and i not in graph.copied_in:
            places[i] = Input(Role.CONSTANT, f"constant{constants}")
            constants += 1
        else:
            label = labels.get(id(tensor)) or _plain(argument.source)
            while label in used:
                label += "'"
            used.add(label)
            places[i] = Input(Role.BATCH, label)
    return Reading(graph, args, tuple(places))


def _refuse(tensor: Any, source: str, detached: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise CaptureRefused(f"{source} is a {type(tensor).__name__}")
    if tensor.requires_grad and tensor.grad_fn is not None and not detached:
        raise CaptureRefused(f"{_plain(source)} has a history: backward would go through an earlier step; detach it")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not compat.is_fake(tensor):
        raise CaptureRefused(f"{_plain(source)} is a {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise CaptureRefused(f"{_plain(source)} is a sparse tensor")


def _batch_labels(batch: Any) -> dict[int, str]:
    try:
        tensors, spec = flatten(batch)
    except BadBatch:  # a structure of the user's own, which Dynamo can read
        return {}
    return {id(t): name for t, name in zip(reversed(tensors), reversed(spec.names))}


def _plain(source: str) -> str:
    """`L['batch']['x']` -> `batch.x`, and the like."""
    for old, new in (
        ("L['", ""),
        ("G['", ""),
        ("']['", "."),
        ("'].", "."),
        ("']", ""),
        ("['", "."),
        ("[", "."),
        ("]", ""),
    ):
        source = source.replace(old, new)
    return source.removeprefix("batch.") or "batch"
