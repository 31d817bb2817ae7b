"""Texts with a name: nine plays that travel with the package, and the reader's own Python library.

In: a name. Out: the text, as bytes, with the digest that tells a resumed run whether it is still the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

from wholestep.errors import BadOption, did_you_mean

FILES = Path(__file__).parent / "files"
TEXTS = {
    "shakespeare": "nine plays by William Shakespeare, 1.1 MB",
    "stdlib": "the source code of your Python's standard library, the first 8 MB",
}
OTHER_DATA = {"digits": "images", "pygraph": "a graph"}
"""Data with a name that is no text, and what it is."""
STDLIB_BYTES = 8_000_000
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "ensurepip", "lib2to3"}


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A text and where it came from."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of its content."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def read_text(name: str, *, others: tuple[str, ...] = ()) -> Text:
    """The text called `name`. `others`: names of data that is no text, for did-you-mean."""
    if name == "shakespeare":
        return Text(name, (FILES / "shakespeare.txt").read_bytes())
    if name == "stdlib":
        return Text(name, _standard_library())
    raise unknown_data(name, others)


def unknown_data(name: str, others: tuple[str, ...] = ()) -> BadOption:
    """The error for a name that is neither a data set nor a file."""
    known = (*TEXTS, *others)
    hint = did_you_mean(name, known, f"use {', '.join(known)} or the path of a text file or folder")
    return BadOption(f"data {name!r} is neither a known data set nor a file or folder", hint=hint)


def _standard_library() -> bytes:
    """The .py files of this Python's library in the order of their names, up to STDLIB_BYTES; its tests are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if NOT_LIBRARY & set(path.relative_to(root).parts):
            continue
        try:
            parts.append(path.read_bytes())
        except OSError:  # a file this user may not read is not worth a run
            continue
        size += len(parts[-1])
        if size >= STDLIB_BYTES:
            break
    if not parts:
        raise BadOption(
            f"data 'stdlib': there are no .py files in {root}",
            hint="this Python keeps its library elsewhere; use shakespeare",
        )
    return b"".join(parts)[:STDLIB_BYTES]
