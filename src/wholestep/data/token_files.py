"""Tokens that somebody made already: one row of ids in a .npy or .safetensors file, read through a memory map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wholestep.data.rows import NO_TEXT
from wholestep.errors import BadOption

_PART = 2**22
"""Ids looked at together when the largest is sought."""


def is_token_file(data: str) -> bool:
    return Path(data).suffix.lower() in NO_TEXT


def read_ids(path: Path, field: str | None = None) -> tuple[Any, int]:
    """(ids, how many different ones there can be: the largest and one more). `field` names the tensor of several."""
    ids = _npy(path) if path.suffix.lower() == ".npy" else _safetensors(path, field)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        shape = "x".join(map(str, ids.shape)) or "no"
        hint = "give one row of whole numbers"
        raise BadOption(f"{path} holds {shape} values of type {ids.dtype}, no row of token ids", hint=hint)
    if not len(ids):
        raise BadOption(f"{path} holds no ids", hint="give one row of whole numbers")
    parts = [ids[start : start + _PART] for start in range(0, len(ids), _PART)]
    least, largest = min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)
    if least < 0:
        raise BadOption(f"{path} holds the id {least}", hint="ids are 0 or more")
    if largest >= 2**31:
        raise BadOption(f"{path} holds the id {largest}", hint="ids are less than 2**31")
    return ids, largest + 1


def _npy(path: Path) -> Any:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadOption(f"{path} cannot be read as .npy: {why[:200]}") from None


def _safetensors(path: Path, field: str | None) -> Any:
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            name = field or (names[0] if len(names) == 1 else "")
            if name not in names:
                has = ", ".join(names[:8]) or "none"
                what = f"{path} holds {len(names)} tensors" if field is None else f"{path} has no tensor {field!r}"
                raise BadOption(what, hint=f"choose one with --field: {has}")
            found = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise BadOption(f"{path} cannot be read as .safetensors: {str(error)[:200]}") from None
    return found.numpy() if found.dtype is not torch.bfloat16 else found.float().numpy()
