"""Does a system still compute the same training? Its losses beside those of eager PyTorch, at the same iterations.

Same weights, same data, same seed: at iteration 0 only rounding is left between two honest systems. From then on rounding goes
through the update into the next loss, and a sampled action or a ReLU at zero makes it larger, so later iterations are held to
less. The tolerances are relative to the loss, or to how far eager's loss moved over the run where that is more (the loss of a
GAN crosses zero):

                                       iteration 0   later
    fp32 on a CPU                         1e-4        2e-2
    fp32 on a GPU (TF32 is allowed)       3e-3        3e-2
    bf16                                  1e-2        5e-2
    dropout, whose masks differ           1e-1        1e-1

Some trainings do not repeat their own losses on a GPU: cuDNN adds in another order every time, Adam without momentum takes the
sign of gradients near zero, and a few steps later the losses are others. So eager PyTorch is trained a second time there, with
cuDNN's deterministic algorithms, and a row may be as far from eager as twice what lies between these two, up to that iteration.
Where that is more than the tolerance, the table says so.

At the small sizes in fp32, a system that leaves out the update is seen on every one of the 19 workloads (checked). One that
leaves out the clipping is seen on three of them: Adam hardly notices it, and a loss is no proof; `wholestep verify` compares
gradients and updates. With dropout, whose masks differ, only coarse errors show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TOLERANCES = {"fp32": (1e-4, 2e-2), "tf32": (3e-3, 3e-2), "bf16": (1e-2, 5e-2), "dropout": (1e-1, 1e-1)}


def tolerance_for(row: Mapping[str, Any], step: int) -> float:
    """Of a row's loss at an iteration, relative."""
    kind = "bf16" if row.get("precision") == "bf16" else "tf32" if row.get("device") == "cuda" else "fp32"
    first, later = _TOLERANCES["dropout" if row.get("dropout") else kind]
    return first if step == 0 else later


OWN = 2.0
"""Two runs of eager PyTorch are a small sample of how far apart they may be."""


def departure(row: Mapping[str, Any], eager: Mapping[str, Any]) -> str | None:
    """What is wrong with a row's losses, given eager's row for the same workload; None when nothing is."""
    own = 0.0
    for name, expected in eager["losses"].items():
        if name not in row["losses"]:
            continue
        step, found = int(name), row["losses"][name]
        if expected is None and found is None:
            continue
        if found is None:
            return f"loss not finite at step {step} where eager has {expected:.5g}"
        if expected is None:
            return f"loss {found:.5g} at step {step} where eager's is not finite"
        tolerance, again = tolerance_for(row, step), eager.get("again", {}).get(name)
        own = max(own, abs(again - expected)) if again is not None else own
        if abs(found - expected) > max(tolerance * _scale(eager, expected), OWN * own):
            allowed = f"tolerance {100 * tolerance:.3g} %" + (f", and eager itself moved by {own:.3g}" if own else "")
            return f"loss {found:.5g} at step {step} where eager has {expected:.5g} ({allowed})"
    return None


def unsteadiness(eager: Mapping[str, Any]) -> str | None:
    """Where eager PyTorch, trained a second time, has other losses than the tolerance allows; None where it repeats itself."""
    for name, again in eager.get("again", {}).items():
        expected = eager["losses"].get(name)
        if expected is None or again is None:
            continue
        if abs(again - expected) > tolerance_for(eager, int(name)) * _scale(eager, expected):
            return f"eager does not repeat its own losses: {again:.5g} at step {name} where it had {expected:.5g}"
    return None


def _scale(eager: Mapping[str, Any], expected: float) -> float:
    """What tolerances are relative to."""
    curve = [value for value in eager["curve"] if value is not None]
    return max(abs(expected), max(curve) - min(curve) if curve else 0.0)


def trouble(curve: Sequence[float | None]) -> str | None:
    """Why a short run does not look like training: a loss that is not finite, or does not fall; None when it does.

    The mean of the last third is compared with that of the first, for batches differ.
    """
    for step, value in enumerate(curve):
        if value is None or not math.isfinite(value):
            return f"loss not finite at step {step}"
    first, last = ends(curve)
    return (
        None
        if last < first
        else f"loss does not fall ({first:.5g} over the first third of the steps, {last:.5g} over the last)"
    )


def ends(curve: Sequence[float | None]) -> tuple[float, float]:
    """The mean loss of the first third of the steps, and of the last; of finite values."""
    values = [value for value in curve if value is not None and math.isfinite(value)]
    third = max(len(values) // 3, 1)
    return sum(values[:third]) / third, sum(values[-third:]) / third
