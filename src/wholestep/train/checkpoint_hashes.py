"""The hashes of a checkpoint's files: written last, compared before anything in them is believed.

In: a folder. Out: `checkpoint.sha256` in it, as sha256sum writes it, so that `sha256sum -c checkpoint.sha256` checks a checkpoint
as well. Every file has a line, checkpoint.json too; the last line, a comment, is the hash of the lines above it. A file of
another checkpoint has another hash, so files that were swapped are noticed like bytes that were.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from wholestep.disk import hash_of

HASHES = "checkpoint.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def write_hashes(folder: Path, names: Iterable[str]) -> Path:
    """Hash these files of `folder` as they are now."""
    lines = "".join(f"{hash_of(folder / name)}  {name}\n" for name in names)
    path = folder / HASHES
    path.write_bytes(f"{lines}# {hashlib.sha256(lines.encode()).hexdigest()}\n".encode())
    return path


def read_hashes(folder: Path) -> dict[str, str] | None:
    """File -> hash; None when there are none (written by an older Wholestep). ValueError when they are not as written."""
    try:
        data = (folder / HASHES).read_bytes()
    except FileNotFoundError:
        return None
    lines, mark, last = data.rpartition(b"# ")
    if not mark or last != hashlib.sha256(lines).hexdigest().encode() + b"\n":
        raise ValueError("its last line is not the hash of the lines above")
    found = [_LINE.fullmatch(line) for line in lines.decode().splitlines()]
    return {match[2]: match[1] for match in found if match}


def difference(folder: Path, name: str, hashes: dict[str, str]) -> str | None:
    """Why a file is not the one that was saved, or None."""
    if name not in hashes:
        return f"{name} has no line in {HASHES}"
    found = hash_of(folder / name)
    if found == hashes[name]:
        return None
    return f"{name} is not what was saved: its sha256 begins with {found[:12]}, not {hashes[name][:12]}"
