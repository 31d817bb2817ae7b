"""The card a plan is made for, from what is typed: a name of the table, an amount of memory, or `this`.

In: `h200`, `24GiB`, `this`. Out: a Card: the device, and what its times are worth. A card of which only the memory is known
has no speed: it takes the H200's ratios, and its times are shown relative to its fastest plan.
"""

from __future__ import annotations

import dataclasses
import re

from wholestep.cost.devices import DEVICES, Device, find_device
from wholestep.errors import BadOption
from wholestep.graph.bytes import parse_bytes, show_bytes

CALIBRATED = ("h200",)
"""Cards on which predicted times were compared with measured ones."""
_RATIOS_OF = "h200"


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A device, and how far its predicted times can be trusted."""

    device: Device
    times: str
    """`calibrated`, `not calibrated` (from its data sheet), or `relative` (only its memory is known)."""

    @property
    def is_gpu(self) -> bool:
        return not self.device.name.startswith("cpu")


def refuse_units(device: Device, precision: str) -> None:
    """An error where the card cannot compute in `precision`."""
    if precision not in device.peaks:
        has = ", ".join(device.peaks)
        raise BadOption(f"{device.title} has no units for {precision}", hint=f"use --precision fp32; it has {has}")


def budget_on(card: Card, memory: str | int | None, asked: str) -> int:
    """The budget in bytes, all that the card has where none is named; `asked`: how it was written, for the error."""
    has = card.device.memory_bytes
    budget = has if memory in (None, "auto") else parse_bytes(memory)  # type: ignore[arg-type]
    if budget > has:
        what = f"{asked}: {card.device.title} has {show_bytes(has)}"
        raise BadOption(what, hint="leave it out for all of it, or name a larger device")
    return budget


def find_target(text: str) -> Card:
    """The target of that name; an error that names the nearest for anything else."""
    name = text.strip()
    if name.lower() in ("this", "cpu"):
        from wholestep.cost.measure import measure_device, this_device

        device = this_device() if name.lower() == "this" else measure_device("cpu")
        return Card(device, "calibrated" if device.name in CALIBRATED else "not calibrated")
    if re.match(r"[\d.]", name):
        amount = parse_bytes(name)
        title = f"a card of {show_bytes(amount)}"
        return Card(dataclasses.replace(DEVICES[_RATIOS_OF], name=name, title=title, memory_bytes=amount), "relative")
    try:
        device = find_device(name)
    except BadOption as error:
        raise BadOption(
            f"--{error.what.replace('no device is called', 'device')} is not known", hint=error.hint
        ) from None
    return Card(device, "calibrated" if device.name in CALIBRATED else "not calibrated")
