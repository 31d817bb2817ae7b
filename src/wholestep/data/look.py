"""The user's data looked at before anything large is loaded: is it there, can it be read, is it what it should be?

In: a path. Out: an error, the same that reading it would give. Of large data only the beginning is looked at: the rest is when it
is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

from wholestep.data import rows, token_files
from wholestep.data.image_files import list_images, read_image
from wholestep.data.sources import find_source, list_files
from wholestep.data.texts import OTHER_DATA, unknown_data
from wholestep.errors import BadOption, WholestepWarning

LOOK_BYTES = 2**24
"""Takes a tenth of a second as text, half of one as rows."""
IMAGE_BYTES = 2**21
"""The same for images, which are small and slow to decode."""


def at_texts(path: Path, glob: str | None, field: str | None, *, least: int = 0, seq: int = 0) -> None:
    """Texts, rows or tokens. `least`: so many bytes of text are needed, for --seq `seq`."""
    if not path.exists():
        raise unknown_data(str(path), tuple(OTHER_DATA))
    if token_files.is_token_file(str(path)):
        token_files.look_at(path, field, most=LOOK_BYTES)
        return
    if path.is_dir() and rows.is_dataset(path):  # the package datasets takes as long to load as torch does
        return
    files = list(list_files(path, glob).values()) if path.is_dir() else [path]
    if _size(files) > LOOK_BYTES:
        for file in files:
            rows.look_at(file, in_folder=path.is_dir())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)  # what is passed over is told when it is read
        source = find_source(str(path), glob=glob, field=field)
        size = sum(size for _, size in source.survey.values())
    if size + len(rows.BETWEEN) * (source.count - 1) < least:
        what = f"data {str(path)!r} has {size:,} bytes of text, fewer than one window of tokens (--seq {seq})"
        raise BadOption(what, hint="use a longer text, or a shorter --seq")


def at_images(path: Path, glob: str | None) -> None:
    """Images by class."""
    if not path.exists():
        raise unknown_data(str(path), tuple(OTHER_DATA))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WholestepWarning)  # told when it is read
        paths, _, _ = list_images(path, glob)
    rows.needs("PIL", "a folder of images", install="pillow")
    left = IMAGE_BYTES
    for file in paths.values():
        left -= _size([file])
        if left < 0:
            break
        read_image(file, 8, 3)


def _size(files: Iterable[Path]) -> int:
    """Of all of them; what cannot be looked up is told by whoever reads it."""
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except OSError:
            continue
    return total
