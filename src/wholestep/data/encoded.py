"""Documents as token ids on disk: encoded once, kept in the cache folder, read through a memory map.

In: a Source and its Tokens. Out: an Encoded with two rows of ids, to train on and held out. The folder of an entry is named after
all it depends on (bytes of the files, tokenizer, rules), written under another name and renamed, so it is whole or not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wholestep.data.rows import BETWEEN
from wholestep.data.sources import Source, key_of
from wholestep.data.tokens import Tokens
from wholestep.disk import cache_folder, hash_of, read_json
from wholestep.errors import BadOption

VERSION = 1
"""Raised when the same documents would be cut in another way."""
PIECE = 8_000_000
"""A longer document is cut at a line before it is encoded: the tokenizer takes a hundred times the memory of its text."""
MOST_HASHED = 1 << 30
"""Bytes of a file that are compared with their hash when it is opened, which takes about a second; of larger ones the size is."""
_SECONDS_OF_A_DAY = 86_400


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text; the arrays lie in mapped files."""

    train: Any
    held: Any
    text_bytes: int
    count: int
    """Documents."""
    keeps: Any = None
    """A folder that goes when this does, where the cache folder could not be written."""


def encode(source: Source, tokens: Tokens) -> Encoded:
    """The ids of `source`, from the cache or encoded now."""
    kind = np.uint16 if tokens.size <= 2**16 else np.uint32
    key = key_of("encoded", VERSION, source.key, tokens.key)[:32]
    path = cache_folder("data") / key
    found = _opened(path, kind)
    if found is not None:
        return found
    try:
        with building(path) as made:
            _write(made, source, tokens, kind)
        found = _opened(path, kind)
    except OSError:
        found = None
    if found is not None:
        return found
    try:  # a disk that refuses the cache is no reason not to train
        keeps = tempfile.TemporaryDirectory(prefix="wholestep-data-")
        _write(Path(keeps.name), source, tokens, kind)
        found = _opened(Path(keeps.name), kind)
    except OSError as error:
        hint = "set WHOLESTEP_CACHE_DIR to a folder with room"
        raise BadOption(
            f"the tokens of {source.name} could not be written: {error.strerror or error}", hint=hint
        ) from None
    assert found is not None
    return dataclasses.replace(found, keeps=keeps)


@contextlib.contextmanager
def building(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when all went well; what killed processes left there is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _SECONDS_OF_A_DAY:
                shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=path.parent))
    try:
        yield temporary
        if path.exists():  # damaged, or another process was quicker: its content is the same
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(FileExistsError):
            os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, source: Source, tokens: Tokens, kind: type) -> None:
    between = np.array([tokens.end_id], kind) if tokens.end_id is not None else _ids(tokens, BETWEEN, kind)
    text_bytes, count = 0, 0
    with (folder / "train.bin").open("wb") as train, (folder / "held.bin").open("wb") as held:
        for document in source.documents():
            file = held if document.held else train
            if file.tell():
                file.write(between.tobytes())
            for piece in pieces(document.text):
                file.write(_ids(tokens, piece, kind).tobytes())
            text_bytes, count = text_bytes + len(document.text), count + 1
        for file in (train, held):
            file.flush()
            os.fsync(file.fileno())
    source.refuse_if_changed()  # the entry is named after what the files held before
    sizes = {name: (folder / f"{name}.bin").stat().st_size for name in ("train", "held")}
    hashes = {name: hash_of(folder / f"{name}.bin") for name, size in sizes.items() if size <= MOST_HASHED}
    facts = {"sizes": sizes, "sha256": hashes, "text_bytes": text_bytes, "count": count}
    (folder / "facts.json").write_text(json.dumps(facts))


def _ids(tokens: Tokens, text: bytes, kind: type) -> Any:
    return tokens.encode(text).numpy().astype(kind)


def pieces(text: bytes, most: int = PIECE) -> Iterator[bytes]:
    """`text` in parts of at most `most` bytes, cut after a line where there is one, and never inside of a letter."""
    at = 0
    while len(text) - at > most:
        end = text.rfind(b"\n", at, at + most) + 1
        if end <= at:
            end = at + most
            while end > at + 1 and text[end] & 0xC0 == 0x80:
                end -= 1
        yield text[at:end]
        at = end
    yield text[at:]


def _opened(folder: Path, kind: type) -> Encoded | None:
    """What lies there; None when it is not there or not whole."""
    try:
        facts = read_json(folder / "facts.json")
        rows = {}
        for name, size in facts["sizes"].items():
            path = folder / f"{name}.bin"
            if path.stat().st_size != size or (size <= MOST_HASHED and hash_of(path) != facts["sha256"][name]):
                return None
            rows[name] = np.memmap(path, kind, "r") if size else np.zeros(0, kind)
        return Encoded(rows["train"], rows["held"], int(facts["text_bytes"]), int(facts["count"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
