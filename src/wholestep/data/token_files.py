"""Tokens that somebody made already: one row of ids in a .npy or .safetensors file, read through a memory map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wholestep.data.rows import NO_TEXT
from wholestep.errors import BadOption, first_line

_PART = 2**22
"""Ids looked at together when the largest is sought."""


def is_token_file(data: str) -> bool:
    return Path(data).suffix.lower() in NO_TEXT


def read_ids(path: Path, field: str | None = None) -> tuple[Any, int]:
    """(ids, how many different ones there can be: the largest and one more). `field` names the tensor of several."""
    ids = _npy(path) if path.suffix.lower() == ".npy" else _safetensors(path, field)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _no_ids(path, ids.shape, ids.dtype)
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
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadOption(f"{path} cannot be read as .npy: {first_line(error)}") from None


def _safetensors(path: Path, field: str | None) -> Any:
    """Mapped by torch: numpy's reader would copy it."""
    from safetensors import safe_open

    name = _chosen(path, field)
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).numpy()


def _chosen(path: Path, field: str | None) -> str:
    """The name of the tensor, found to be one row of whole numbers by the head of the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            name = field or (names[0] if len(names) == 1 else "")
            if name not in names:
                has = ", ".join(names[:8]) or "none"
                what = f"{path} holds {len(names)} tensors" if field is None else f"{path} has no tensor {field!r}"
                raise BadOption(what, hint=f"choose one with --field: {has}")
            head = file.get_slice(name)
            shape, kind = head.get_shape(), head.get_dtype()
    except (SafetensorError, OSError) as error:
        raise BadOption(f"{path} cannot be read as .safetensors: {str(error)[:200]}") from None
    if len(shape) != 1 or kind[0] not in "IU":
        raise _no_ids(path, shape, kind)
    return name


def look_at(path: Path, field: str | None, *, most: int) -> None:
    """An error where `read_ids` would raise one, by the head of the file; and by its ids, where they are at most so many bytes."""
    if path.suffix.lower() != ".npy":
        _chosen(path, field)
    elif path.is_file() and path.stat().st_size <= most:
        read_ids(path)


def _no_ids(path: Path, shape: Sequence[int], kind: Any) -> BadOption:
    shown = "x".join(map(str, shape)) or "no"
    hint = "give one row of whole numbers"
    return BadOption(f"{path} holds {shown} values of type {kind}, no row of token ids", hint=hint)
