"""One run of the loss on given tensors: what it returned, and what each module did.

`run_loss` runs the user's own code under our modes, as the eager reference does; a `Tracer` runs a LossGraph under the same ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wholestep import compat
from wholestep.capture.chunked_loss import ChunkedLoss
from wholestep.capture.front.replay import Assumed
from wholestep.capture.modes import keyed
from wholestep.capture.preflight import autocast_for
from wholestep.capture.provenance import ModuleCalls
from wholestep.capture.sites import Sites
from wholestep.capture.subject import Subject
from wholestep.errors import BadLoss
from wholestep.graph.notes import Note


@dataclasses.dataclass(slots=True)
class Forward:
    """One run of the loss on given tensors."""

    loss: torch.Tensor
    aux: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    """Module path (`path#2` at its second call) -> what it returned, in order of completion."""
    kept: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Further tensors that the Python around the loss holds on to."""
    gradients: list[torch.Tensor] | None = None
    """Of the trained parameters, where hooks had their say."""
    reassigned: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Buffers that were replaced, by name."""
    unrolled: bool = False
    """Whether a recurrent layer ran, which tracing turns into one copy of the cell per time step."""
    losses: list[Note] = dataclasses.field(default_factory=list)
    """One line per loss that is computed in chunks."""
    assumed: list[Assumed] = dataclasses.field(default_factory=list)


def run_loss(
    subject: Subject,
    tensors: Mapping[str, torch.Tensor] | None,
    batch: Any,
    sites: Sites,
    *,
    tracing: bool = False,
    chunked: ChunkedLoss | None = None,
    noted: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Forward:
    """The user's own code under our modes, with `tensors` in place of parameters and buffers where they are given.

    Of every module's output `noted` is kept, the output itself without it.
    """
    calls = ModuleCalls(subject.root, noted)
    named = {} if tensors is None else {name: tensors[canonical] for name, canonical in subject.aliases.items()}
    # a copy: torch writes the replaced ones into what it is given
    swapped = contextlib.nullcontext() if tensors is None else compat.swapped_tensors(subject.root, dict(named))
    with (
        swapped,
        calls.recorded(annotate=tracing),
        keyed(sites, on_gpu=subject.target.is_gpu, chunked=chunked) as modes,
        autocast_for(subject),
    ):
        loss, aux = check_loss(subject.loss_fn(subject.model, batch))
        live = dict(subject.root.named_buffers(remove_duplicate=False))
    reassigned = {
        subject.aliases[n]: t for n, t in live.items() if n in named and t is not named[n] and n in subject.aliases
    }
    return Forward(loss, aux, calls.outputs, reassigned=reassigned, unrolled=modes.unrolled)


def check_loss(result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Split what loss_fn returned into the scalar loss and its aux tensors."""
    aux: dict[str, torch.Tensor] = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result, aux = result
    if not isinstance(result, torch.Tensor):
        raise BadLoss(
            f"loss_fn returned a {type(result).__name__}",
            hint="return a scalar tensor, or (loss, aux) with aux a dict of tensors",
        )
    if result.numel() != 1:
        raise BadLoss(
            f"the loss has shape {tuple(result.shape)}", hint="reduce it to a scalar, for example with .mean()"
        )
    if not result.is_floating_point():
        raise BadLoss(f"the loss has dtype {result.dtype}", hint="a loss must be a floating-point scalar")
    for name, value in aux.items():
        if not isinstance(value, torch.Tensor):
            raise BadLoss(f"aux[{name!r}] is a {type(value).__name__}", hint="aux must hold tensors")
    return result.reshape(()), aux
