"""A workload: one representative training job of one domain, as data, in a size for a laptop and one for a GPU.

In: a size. Out: a `Training`: what is trained, and what one iteration does. A contender (eager PyTorch, torch.compile,
Wholestep, a user's own) turns each part into a call `step(batch) -> loss`; the workload says in which order those are called.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the table of workloads is read before torch is loaded
    import torch
    from torch.optim import Optimizer

StepCall = Callable[[Any], "torch.Tensor"]
"""A contender's step: batch in, detached loss out; the update has been made."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Part:
    """What one Step trains; most workloads have one part, a GAN has two."""

    name: str
    model: Any
    """A Module, or a dict of them, as for `wholestep.compile`."""
    loss_fn: Callable[[Any, Any], Any] | None
    optimizer: Optimizer
    example_batch: Any
    clip_norm: float | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class Training:
    """A workload built for one size and device."""

    parts: Sequence[Part]
    iterate: Callable[[Sequence[StepCall], int], torch.Tensor]
    """(one call per part, iteration number from 0) -> the loss to report; batches are a pure function of the number."""
    units: float
    """How many of the workload's units one iteration goes through."""
    precision: str = "fp32"


Build = Callable[[dict[str, Any], "torch.device", int], Training]


def later(name: str) -> Build:
    """`images.build_resnet` of bench/workloads, whose module is imported by the first call."""
    module, _, function = name.partition(".")

    def build(sizes: dict[str, Any], device: torch.device, seed: int) -> Training:
        found: Build = getattr(importlib.import_module(f"wholestep.bench.workloads.{module}"), function)
        return found(sizes, device, seed)

    return build


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A row of the table."""

    name: str
    domain: str
    """`image classification`, `machine translation` ..."""
    unit: str
    """Of throughput: `images`, `tokens`, `seconds of audio`, `frames` ..."""
    data: str
    """`real: ...` or `synthetic: ...`: what is trained on."""
    summary: str
    """One line: the model and where it comes from."""
    build: Build
    """(sizes, device, seed) -> Training."""
    smoke: dict[str, Any]
    """Sizes for a CPU: seconds per system."""
    gpu: dict[str, Any]
    """Sizes for a large GPU."""
    tbd: str = ""
    """Which of TBD's models it stands for; empty for what came later."""
    needs: tuple[str, ...] = ()
    """Packages it needs beyond torch."""
    rewritten: Build | None = None
    """The same training in layers of Wholestep's own, which its contenders train: parameters of the same names and values, the same
    losses. Peers keep `build`."""

    def training(self, sizes: dict[str, Any], device: torch.device, seed: int, *, ours: bool) -> Training:
        """What a contender trains; `ours`: whether it is one of Wholestep's."""
        build = self.rewritten if ours and self.rewritten is not None else self.build
        return build(sizes, device, seed)


def one_part(part: Part, batches: Callable[[int], Any], units: float, precision: str = "fp32") -> Training:
    """The usual case: one model, one batch per iteration."""
    return Training(
        parts=[part], iterate=lambda calls, number: calls[0](batches(number)), units=units, precision=precision
    )
