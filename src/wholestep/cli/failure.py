"""An exception nobody expected, as one line: the user's own code by file and line, the rest with its traceback in a file."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

OURS = str(Path(__file__).resolve().parent.parent)
"""The package."""


def one_line(error: BaseException) -> str:
    """What to print after `wholestep: `."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if len(said) > 400:
        said = said[:400] + " ..."
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory. Use a smaller --batch or --seq, or --precision bf16 ({said[:160]})"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    place = _users_place(error)
    if place is not None:
        return f"{said} (at {place})"
    return f"an error of Wholestep's own: {said}. The traceback is in {_written(error)}; please report it with `wholestep doctor`"


def _users_place(error: BaseException) -> str | None:
    """`file.py:12`, the innermost line that is neither ours nor of an installed package; None when there is none."""
    installed = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.realpath(frame.filename)
        foreign = not os.path.isfile(path) or "site-packages" in path or any(path.startswith(p + os.sep) for p in installed)
        if not foreign and not path.startswith(OURS + os.sep) and not path.startswith(sys.prefix + os.sep):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return None


def _written(error: BaseException) -> str:
    handle, path = tempfile.mkstemp(prefix="wholestep-error-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write("".join(traceback.format_exception(error)))
    return path
