"""Data of the user's own as documents: a text file, a folder of files, JSON lines, parquet, a `datasets` folder.

In: a name or a path, which files of a folder (`glob`), which field of a row (`field`). Out: a Source: the hash of every file, and
the documents in an order that depends on the names alone. Which documents are held out is a rule of this module, so that a text
is trained on or not on any day and any machine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wholestep.data import rows
from wholestep.data.texts import TEXTS, Text, read_text, unknown_data
from wholestep.disk import hash_of
from wholestep.errors import BadOption

HELD_OUT_PART = 0.05
HELD_OUT_EVERY = 20
"""Of so many documents or more every 20th is held out; of fewer the last 5 % of all their tokens."""
SPLITS = {
    "train": "train", "training": "train", "validation": "held", "valid": "held", "val": "held", "dev": "held", "eval": "held",
    "test": "test",
}  # fmt: skip
"""What the names of files and folders say. `test` is held out where there is no validation part, and left alone where there is."""
_SPLIT = re.compile(rf"({'|'.join(SPLITS)})([-._].*)?")
LEARN_BYTES = 64 * 2**20
"""A tokenizer learns from the first so many: more changes its pairs little, and takes minutes."""
DIGITS = 12


class Document(NamedTuple):
    """One text, as UTF-8."""

    text: bytes
    held: bool


@dataclasses.dataclass(frozen=True)  # without slots, for what is computed once
class Source:
    """Where documents come from."""

    name: str
    files: dict[str, str]
    """Name -> digest of its bytes; empty for what travels with the package."""
    key: str
    """Stands for all that decides what the documents are."""
    read: Callable[[], Iterator[tuple[str | None, bytes]]]
    """(the part it is of, where its name says one; its text) for every document."""
    paths: dict[str, Path] = dataclasses.field(default_factory=dict)
    """Of `files`."""

    @property
    def digest(self) -> str:
        return self.key[:DIGITS]

    @functools.cached_property
    def survey(self) -> dict[str | None, tuple[int, int]]:
        """Part -> its documents and bytes. Reads everything, so every row is found good before any is used."""
        found: dict[str | None, tuple[int, int]] = {}
        for part, text in self.read():
            count, size = found.get(part, (0, 0))
            found[part] = (count + 1, size + len(text))
        return found

    @property
    def count(self) -> int:
        return sum(count for count, _ in self.survey.values())

    @property
    def held_part(self) -> str | None:
        """The part that is held out because its name says so."""
        if None in self.survey or "train" not in self.survey:
            return None
        return next((part for part in ("held", "test") if part in self.survey), None)

    def documents(self) -> Iterator[Document]:
        """All of them, each held out or not; of fewer than HELD_OUT_EVERY none is, since a part of the tokens will be."""
        out, many = self.held_part, self.count >= HELD_OUT_EVERY
        for number, (part, text) in enumerate(self.read(), 1):
            if out is None:
                yield Document(text, many and number % HELD_OUT_EVERY == 0)
            elif part in ("train", out):
                yield Document(text, part == out)

    def refuse_if_changed(self) -> None:
        """An error when a file is another one than when the source was found."""
        which = changed_files(self.files, hash_files(self.paths))
        if which is not None:
            raise BadOption(f"data {self.name!r}: {which} while it was read", hint="try again once nobody writes to it")

    def to_learn_from(self) -> Iterator[bytes]:
        """What a tokenizer may see: nothing that is held out, and no more than LEARN_BYTES."""
        size = sum(size for _, size in self.survey.values())
        whole = self.held_part is not None or self.count >= HELD_OUT_EVERY
        left = min(size - (0 if whole else int(size * HELD_OUT_PART)), LEARN_BYTES)
        for document in self.documents():
            if not document.held and left > 0:
                yield document.text[:left]
                left -= len(document.text)


def find_source(
    data: str, *, glob: str | None = None, field: str | None = None, others: tuple[str, ...] = ()
) -> Source:
    """The text called `data`, or what lies at that path. `others`: names of data that is no text, for did-you-mean."""
    if data in TEXTS:
        refuse_given(data, glob=glob, field=field)
        return _of_text(read_text(data))
    path = Path(data).expanduser()
    if not path.exists():
        raise unknown_data(data, others)
    if path.is_dir() and rows.is_dataset(path):
        _refuse(data, "is a folder of the package datasets", glob=glob)
        paths = list_files(path, None)
        files = hash_files(paths)
        reader: Callable[[], Iterator[tuple[str | None, bytes]]] = lambda: (  # noqa: E731
            (_part(name), text) for name, text in rows.of_dataset(path, field or rows.FIELD)
        )
        return Source(str(path.resolve()), files, key_of(files, field), reader, paths)
    if path.is_dir():
        return _of_files(path, list_files(path, glob), field)
    _refuse(data, "is one file", glob=glob)
    return _of_files(path.parent, {path.name: path}, field, name=path)


def refuse_given(data: str, *, glob: str | None, field: str | None) -> None:
    """An error for options that choose among files or fields where `data` has none: a name of ours, or a function."""
    _refuse(data, "is one text" if data in TEXTS else "has no files to choose from", glob=glob, field=field)


def _refuse(data: str, what: str, **given: str | None) -> None:
    for option, value in given.items():
        if value is not None:
            raise BadOption(f"--{option} {value}: data {data!r} {what}", hint="leave it out")


def _of_text(text: Text) -> Source:
    return Source(text.name, {}, hashlib.sha256(text.content).hexdigest(), lambda: iter([(None, text.content)]))


def _of_files(
    root: Path,
    paths: Mapping[str, Path],
    field: str | None,
    *,
    name: Path | None = None,
) -> Source:
    if field is not None and not any(rows.has_fields(path) for path in paths.values()):
        raise BadOption(f"--field {field}: {name or root} is plain text, without fields", hint="leave it out")
    files = hash_files(paths)

    def read() -> Iterator[tuple[str | None, bytes]]:
        for shown, path in paths.items():
            part = None if name is not None else _part(shown)
            for text in rows.of_file(path, field or rows.FIELD, in_folder=name is None):
                yield part, text

    if name is not None and not rows.has_fields(name):
        key = next(iter(files.values()))  # of one text its content is all, wherever it lies
    else:
        key = key_of(files, field)
    return Source(str((name or root).resolve()), files, key, read, dict(paths))


def list_files(root: Path, glob: str | None) -> dict[str, Path]:
    """The files of a folder by their names in it, in the order of those; without hidden ones."""
    try:
        found = list(root.rglob("*") if glob is None else root.glob(glob) if "/" in glob else root.rglob(glob))
    except (ValueError, NotImplementedError, IndexError):
        raise BadOption(f"--glob {glob!r} is no pattern for files", hint="for example --glob '*.txt'") from None
    except OSError as error:
        raise BadOption(f"data {str(root)!r} cannot be read: {error.strerror}") from None
    named = {path.relative_to(root).as_posix(): path for path in found if path.is_file()}
    files = {name: named[name] for name in sorted(named) if not any(part.startswith(".") for part in name.split("/"))}
    if not files:
        everything = collections.Counter(path.suffix for path in root.rglob("*") if path.is_file())
        listed = ", ".join(f"*{suffix} ({count})" for suffix, count in everything.most_common(5))
        what = f"data {str(root)!r} holds no file" + (f" that matches --glob {glob!r}" if glob else "")
        raise BadOption(what, hint=f"it holds {listed}" if glob and listed else "put files into it")
    return files


def hash_files(paths: Mapping[str, Path]) -> dict[str, str]:
    """Name -> SHA-256 of what the file holds."""
    found = {}
    for name, path in paths.items():
        with rows.readable(path):
            found[name] = hash_of(path)
    return found


def key_of(*facts: Any) -> str:
    """One digest of all that."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _part(name: str) -> str | None:
    """`train`, `held` or `test`, where the first part of a name says so; None where it says nothing."""
    match = _SPLIT.fullmatch(name.split("/")[0])
    return SPLITS[match[1]] if match else None


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Which file is another one, gone or new, in words; None when the hashes tell nothing."""
    changed = [name for name in before if name in now and now[name] != before[name]]
    gone = [name for name in before if name not in now]
    new = [name for name in now if name not in before]
    count = len(changed) + len(gone) + len(new)
    for names, verb in ((changed, "has changed"), (gone, "is gone"), (new, "is new")):
        if names:
            return f"{names[0]} {verb}" + (f" (and {count - 1} more)" if count > 1 else "")
    return None


def refuse_changed(
    data: str, expected: str | None, found: str, before: Mapping[str, str] | None, now: Mapping[str, str]
) -> None:
    """An error when the data is no longer what a run was started with, naming the file where that is known."""
    if expected is None or expected == found:
        return
    which = changed_files(before, now) if before else None
    what = f"data {data!r} is no longer what it was: {which or f'{found} where the run had {expected}'}"
    raise BadOption(what, hint="put the old data back, or start a new run from these weights with --init RUN")
