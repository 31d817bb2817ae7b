"""Where Wholestep keeps things between processes, and how files are written: whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import uuid
from pathlib import Path
from typing import Any

_READ_BYTES = 1 << 18


def cache_folder(kind: str) -> Path:
    """`$WHOLESTEP_CACHE_DIR/<kind>`, by default below ~/.cache/wholestep."""
    root = os.environ.get("WHOLESTEP_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "wholestep")
    return Path(root) / kind


def why_not_new(path: Path) -> str | None:
    """Why no new file or folder can be made at `path`, which is not there: what is in the way; None when nothing seems to be."""
    if os.path.islink(path) and not path.exists():
        return f"{path} is a link that leads nowhere"
    above = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), None)
    if above is None or not above.is_dir():
        return f"{above} is not a folder"
    return None if os.access(above, os.W_OK | os.X_OK) else f"there is no permission to write to {above}"


def write_whole(path: Path, data: bytes) -> None:
    """Write through a temporary file and a rename: where the disk refuses (OSError), `path` is as it was."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> bool:
    """`write_whole`, in a folder that is made where it is missing; False when the disk refuses (a cache is not worth an error)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError:
        return False
    return True


def write_json(path: Path, value: Any) -> bool:
    """`write_atomically` for a value that JSON can hold."""
    return write_atomically(path, (json.dumps(value, indent=1) + "\n").encode())


def read_bytes(path: Path) -> bytes | None:
    """The content, or None when there is no such (readable) file."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_sealed(path: Path, data: bytes) -> bool:
    """`write_atomically` behind a hash of the data, for caches that change what is trained: see `read_sealed`."""
    return write_atomically(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def read_sealed(path: Path) -> bytes | None:
    """What `write_sealed` wrote; None when there is no such file, or any of its bytes is another one."""
    seal, _, data = (read_bytes(path) or b"").partition(b"\n")
    return data if seal == hashlib.sha256(data).hexdigest().encode() else None


def hash_of(path: Path) -> str:
    """sha256: of those in hashlib that notice every change the fastest where the processor has instructions for it."""
    found, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(memoryview(buffer)[:count])
    return found.hexdigest()


def json_ready(value: Any) -> Any:
    """`value` as JSON reads it back: tuples as lists, None for numbers that are not finite, texts for what it has no form for."""
    if isinstance(value, dict):
        return {str(key): json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def read_json(path: Path) -> Any:
    """The value in a JSON file; OSError or ValueError, whatever bytes it holds."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
