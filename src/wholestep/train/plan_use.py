"""What a plan was made for, and whether that still holds for the job at hand.

In: the settings of a Job and the name of a device. Out: the flat table under `made_for`, the same for the dry job that is
planned and for the real one that is trained, so that they can be compared field by field.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from wholestep.compat import installed_version
from wholestep.cost.devices import DEVICES, detect
from wholestep.errors import BadOption, WholestepWarning
from wholestep.graph.bytes import parse_bytes
from wholestep.graph.plan import Plan

SIZES = ("model", "batch", "seq", "precision", "accumulate", "optimizer")
VERSIONS = ("torch", "wholestep")
"""A plan may travel from a laptop to another torch: another version is said, not refused."""


def made_for(settings: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Everything a plan depends on; nothing that only training does (learning rate, data, seed)."""
    config = settings.get("config") or {}
    table = {name: settings[name] for name in SIZES if settings.get(name) is not None}
    table |= {"device": device, "clips": settings.get("clip_norm") is not None}
    table |= {f"config.{name}": _plain(value) for name, value in sorted(config.items())}
    return table | {"torch": torch.__version__, "wholestep": installed_version("wholestep") or "unknown"}


def device_here() -> str:
    """The name a plan would have been made for on this machine; nothing is measured."""
    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name()
    known = detect(name)
    return known.name if known is not None else name


def fitting(plan: Plan | None, settings: Mapping[str, Any]) -> Plan | None:
    """The same plan; an error that names the field where it was made for something else."""
    if plan is None:
        return None
    device = str(plan.made_for.get("device", ""))
    here = made_for(settings, device if _only_memory(device) else device_here())
    told = {name: plan.made_for[name] for name in VERSIONS if name in plan.made_for}
    changed = plan.changed_field(here | told)
    if changed is not None:
        raise BadOption(
            f"the plan does not fit this run: {changed}", hint="make a new one with `wholestep plan ... --out FILE`"
        )
    for name, version in told.items():
        if version != here[name]:
            text = f"the plan was made with {name} {version}, this is {here[name]}: peak and time may differ a little"
            warnings.warn(text, WholestepWarning, stacklevel=2)
    return plan


def _only_memory(device: str) -> bool:
    """Made for any card of so much memory."""
    if device in DEVICES:
        return False
    try:
        parse_bytes(device)
    except BadOption:
        return False
    return True


def _plain(value: Any) -> Any:
    """What a file gives back as it was: TOML has no null."""
    return value if isinstance(value, (bool, int, float, str, list)) else "none" if value is None else str(value)
