"""The documents of one file: a text is one, JSON lines and parquet hold one per row.

In: a path and the field that holds the text. Out: texts as UTF-8, one by one. What is no text is an error that names the file and
the row: trained on, it would be noise that nobody asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepWarning, first_line

FIELD = "text"
BETWEEN = b"\n\n"
"""Between two documents, where the tokenizer has no id for an end."""
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
_BOM = b"\xef\xbb\xbf"
_WIDE = (b"\xff\xfe", b"\xfe\xff")
NO_TEXT = (".npy", ".safetensors")
"""Files of tokens."""
_LOOK = 2**20
_LEAVE_OUT = "leave it out with --glob"
_ROWS = 1000
"""Read at a time."""


def has_fields(path: Path) -> bool:
    return path.suffix.lower() in (*JSON_LINES, *PARQUET)


def of_file(path: Path, field: str, *, in_folder: bool) -> Iterator[bytes]:
    """Its documents. An empty file is passed over in a folder, with a note."""
    if path.suffix.lower() in PARQUET:
        yield from _parquet(path, field)
        return
    if path.suffix.lower() in JSON_LINES:
        yield from _json_lines(path, field)
        return
    with readable(path):
        content = path.read_bytes()
    if content.strip():
        yield checked_text(content, str(path), hint=_LEAVE_OUT if in_folder else "")
    elif in_folder:
        warnings.warn(f"{path} is empty, and passed over", WholestepWarning, stacklevel=2)
    else:
        raise _empty(path)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """A file of data that the system does not let be read is told in one line."""
    try:
        yield
    except OSError as error:
        raise BadOption(f"data {str(path)!r} cannot be read: {error.strerror or error}") from None


def look_at(path: Path, *, in_folder: bool = False) -> None:
    """An error when the beginning of a file shows that it is no text; what has rows or tokens is looked at by its reader."""
    if has_fields(path) or path.suffix.lower() in NO_TEXT:
        return
    with readable(path), path.open("rb") as file:
        start = file.read(_LOOK)
    if not start and in_folder:
        return  # passed over
    if not start:
        raise _empty(path)
    if len(start) == _LOOK:  # it may end inside of a letter, or of a line of four bytes each
        start = start[: start.rfind(b"\n") + 1] or start[:-4]
    checked_text(start, str(path), hint=_LEAVE_OUT if in_folder else "")


def _empty(path: Path) -> BadOption:
    return BadOption(f"data {str(path)!r} is an empty file", hint="give a text of a few thousand characters or more")


def checked_text(content: bytes, shown: str, *, hint: str = "") -> bytes:
    """`content`, found to be UTF-8 without the bytes that no text has."""
    otherwise = hint or "give a text in UTF-8"
    if content.startswith(_WIDE):
        raise BadOption(f"{shown} is text in UTF-16", hint="convert it to UTF-8")
    if b"\0" in content:
        raise BadOption(f"{shown} is no text: byte {content.index(0):,} is 0", hint=otherwise)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{shown} is no text in UTF-8: byte {error.start:,} is {content[error.start]:#04x}"
        raise BadOption(
            what, hint=f"convert it to UTF-8, or {hint}" if hint else "convert it to UTF-8, if it is text"
        ) from None
    return content.removeprefix(_BOM)


def _field(row: Any, field: str, shown: str) -> bytes:
    if not isinstance(row, dict):
        raise BadOption(f"{shown} is no object with a field {field!r}", hint='a row is {"text": "..."}')
    if field not in row:
        names = ", ".join(map(str, row)) or "nothing"
        raise BadOption(f"{shown} has no field {field!r}", hint=f"it has {names}; choose one with --field")
    value = row[field]
    if not isinstance(value, str):
        raise BadOption(f"{shown}: its {field!r} is {json.dumps(value)[:40]}, no text", hint="mend or remove that row")
    try:
        return value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadOption(f"{shown}: its {field!r} is no valid Unicode", hint="mend or remove that row") from None


def _json_lines(path: Path, field: str) -> Iterator[bytes]:
    empty = True
    with readable(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            shown = f"{path} line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                why = error.msg if isinstance(error, json.JSONDecodeError) else "no UTF-8, or nested too deeply"
                raise BadOption(f"{shown} is not JSON: {why}", hint="mend or remove that line") from None
            empty = False
            yield _field(row, field, shown)
    if empty:
        raise BadOption(f"data {str(path)!r} holds no rows", hint='a row is a line such as {"text": "..."}')


def _parquet(path: Path, field: str) -> Iterator[bytes]:
    needs("pyarrow", f"{path}, a parquet file,")
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise BadOption(
                    f"{path} has no column {field!r}", hint=f"it has {', '.join(names)}; choose with --field"
                )
            number = 0
            for batch in file.iter_batches(columns=[field], batch_size=_ROWS):
                for value in batch.column(0).to_pylist():
                    yield _field({field: value}, field, f"{path} row {number}")
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise BadOption(f"{path} cannot be read as parquet: {first_line(error)}") from None
    if not number:
        raise BadOption(f"data {str(path)!r} holds no rows", hint="give a file with rows")


# ---- folders of the package datasets ----


def is_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote it."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    )


def of_dataset(folder: Path, field: str) -> Iterator[tuple[str, bytes]]:
    """(name of the split, text) of every row."""
    needs("datasets", f"{folder}, written by datasets,")
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # whatever a damaged folder leads to
        raise BadOption(f"{folder} cannot be read by the package datasets: {first_line(error)}") from None
    splits = dict(found) if isinstance(found, dict) else {"rows": found}
    for name, table in splits.items():
        if field not in table.column_names:
            listed = ", ".join(table.column_names)
            raise BadOption(f"{folder} has no column {field!r}", hint=f"it has {listed}; choose with --field")
        number = 0
        for part in table.select_columns([field]).iter(batch_size=_ROWS):
            for value in part[field]:
                yield name, _field({field: value}, field, f"{folder} row {number} of {name}")
                number += 1


def needs(package: str, why: str, *, install: str | None = None) -> None:
    """One line when a package is not installed; `install`: its name for pip, where that is another one."""
    if importlib.util.find_spec(package) is None:
        name = install or package
        hint = f"pip install {name}, or 'wholestep[data]'"
        raise BadOption(f"{why} needs the package {name}, which is not installed", hint=hint)
