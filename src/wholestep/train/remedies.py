"""What would make a step fit that does not: a Fit in, options to type out, the one that changes least first.

Only what helps is named: where weights and optimizer state alone are too large, no batch, length or precision does.
"""

from __future__ import annotations

from collections.abc import Iterator

from wholestep.cost.devices import DEVICES
from wholestep.graph.bytes import show_bytes
from wholestep.plan.frontier import round_up
from wholestep.train.fit import Fit

CARDS = ("t4", "l4", "rtx4090", "a100-40gb", "a100-80gb", "h100", "h200", "b200")
"""Cards that are named as alternatives, smallest first."""


def remedies(fit: Fit) -> list[str]:
    """What would make it fit; empty when it does."""
    return [] if fit.fits else [*_budget(fit), *_smaller(fit), *_larger_card(fit)] or [_nothing(fit)]


def _budget(fit: Fit) -> Iterator[str]:
    """The least that can be asked for on the same card."""
    least, question = round_up(min(fit.cards)), fit.question
    if question.budget_bytes < least <= question.target.device.memory_bytes:
        yield f"--memory {show_bytes(least).replace(' ', '')}: the least that holds it"


def _smaller(fit: Fit) -> Iterator[str]:
    """A smaller batch, a shorter sequence, a narrower format; nothing where what lasts is too large already."""
    settings, budget, lasting = fit.settings, fit.question.budget_bytes, fit.lasting_bytes
    if lasting >= budget:
        return
    batch, accumulate = settings.get("batch"), settings.get("accumulate", 1)
    if fit.largest is not None and fit.largest.batch >= 1 and batch is not None:
        most = fit.largest.batch // accumulate
        parts = next((k for k in range(accumulate, batch + 1) if batch % k == 0 and batch // k <= most), None)
        if parts is not None and parts > accumulate:
            yield f"--set accumulate={parts}: the same batch in {parts} parts of {batch // parts}"
        yield f"--batch {fit.largest.batch}"
    elif fit.largest is not None and fit.shorter is not None:
        yield f"--batch {accumulate} --seq {fit.shorter}: of {settings['seq']} tokens not even one row fits"
    halved = lasting + (min(fit.cards) - lasting) // 2
    if settings.get("precision") == "fp32" and fit.question.target.is_gpu and halved <= budget:
        yield "--precision bf16: about half the activations"


def _larger_card(fit: Fit) -> Iterator[str]:
    """The smallest card that holds it, where it is the card that is too small and not the budget."""
    least, precision = min(fit.cards), fit.settings.get("precision")
    if least <= fit.question.target.device.memory_bytes:
        return
    for name in CARDS:
        device = DEVICES[name]
        if device.memory_bytes >= least and precision in device.peaks:
            yield f"--device {name} ({device.memory_bytes / 2**30:.0f} GiB)"
            return


def _nothing(fit: Fit) -> str:
    lasting = show_bytes(fit.lasting_bytes)
    return f"none of one card: weights and optimizer state alone take {lasting}; make the model smaller with --set"
