"""Where values may wait outside of the card, from what is asked for: Options in, a Room out, or one clear line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from wholestep.errors import BadOption, WholestepWarning
from wholestep.graph.bytes import parse_bytes, show_bytes
from wholestep.options import Options
from wholestep.plan.moves import Room
from wholestep.tiers.files import open_direct

MOST_PINNED = 0.9
"""Of the host's memory: what is pinned can neither be paged out nor be used by anyone else."""


def room_of(options: Options) -> Room | None:
    """Where values and state may wait, as asked; a plan of one's own says so itself."""
    return None if options.plan is not None else room_for(options.host_memory, options.folders)


def room_for(host_memory: str | int | None, folders: Sequence[Any] | None) -> Room | None:
    """The same from the two amounts; a plan may be for a machine with more memory than this one."""
    if host_memory is None and not folders:
        return None
    return Room(0 if host_memory is None else parse_bytes(host_memory), files=bool(folders))


def refuse_room(options: Options, device: torch.device) -> None:
    """More than this machine has, or a folder that cannot be used, is an error before anything is captured."""
    if device.type == "cpu" and room_of(options) is not None:
        name = "host_memory" if options.host_memory is not None else "offload_path"
        warnings.warn(f"{name}= moves nothing on a CPU, whose memory is the host's", WholestepWarning, stacklevel=4)
    if options.host_memory is not None:
        refuse_amount("host_memory", options.host_memory, parse_bytes(options.host_memory))
    for folder in options.folders:
        os.close(open_direct(folder)[1])


def refuse_amount(name: str, written: str | int, wanted: int) -> None:
    """More host memory than may be pinned is an error."""
    has = psutil.virtual_memory().total
    if wanted > MOST_PINNED * has:
        hint = (
            f"give at most {show_bytes(int(MOST_PINNED * has))}: the rest is for the system and for what is not pinned"
        )
        raise BadOption(f"{name}={written!r}: this machine has {show_bytes(has)}", hint=hint)
