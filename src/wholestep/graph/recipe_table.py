"""The file of a recipe as a table, found whole: what schedule/recipe_file.py and search/space.py make recipes of.

In: a TOML file. Out: its table. No torch: a file that is no recipe, or names a verb that there is not, is told before it is loaded.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepError, did_you_mean
from wholestep.graph.file_end import is_end

FORMAT = 1
END = "end"
"""The last table of a file, so that one that was cut off is noticed."""
FIELDS = ("format", "verbs", "expects", END)
HOW_TO_WRITE = "write one with: wholestep.schedule(model).save(FILE)"
HOW_TO_SEARCH = "write one with a table [search], see docs/recipe-search.md"
_VERBS = Path(__file__).parent.parent / "schedule" / "verbs"
"""One file each."""


def read_table(path: Path, *, search: bool = False) -> dict[str, Any]:
    """The table of a file; with `search` it may have one more, [search]."""
    how = HOW_TO_SEARCH if search else HOW_TO_WRITE
    try:
        import tomllib
    except ImportError as error:  # Python 3.10
        raise WholestepError("a recipe needs Python 3.11 or newer, which reads TOML") from error
    if not path.is_file():
        raise BadOption(f"there is no recipe {path}", hint=how)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise BadOption(f"{path} is no recipe: {' '.join(str(error).split())}", hint=how) from error
    try:
        _check(table, (*FIELDS, "search") if search else FIELDS)
    except BadOption as error:
        raise BadOption(f"{path}: {error.what}", hint=error.hint) from None
    return table


def _check(table: dict[str, Any], known: Sequence[str]) -> None:
    for name in table:
        if name not in known:
            hint = (
                "plans are given by --plan"
                if name in ("recompute", "made_for")
                else did_you_mean(name, known, cutoff=0.5)
            )
            raise BadOption(f"a recipe with an unknown field {name!r}", hint=hint or f"fields are {', '.join(known)}")
    if table.get("format") != FORMAT:
        raise BadOption(f"a recipe of format {table.get('format')!r}", hint=f"this version reads format {FORMAT}")
    if not is_end(table.get(END)):
        raise BadOption("the recipe is not whole", hint=f"a recipe ends in a line [{END}]")
    rows, expects = table.get("verbs", []), table.get("expects", {})
    if not isinstance(rows, list) or not all(isinstance(row, dict) and row for row in rows):
        raise BadOption(
            "verbs is no list of tables", hint='write lines such as { recompute = "layers.*", ratio = 0.5 },'
        )
    if not isinstance(expects, dict) or not all(isinstance(value, str) for value in expects.values()):
        raise BadOption("expects is no table of texts", hint="leave it out where the recipe is written by hand")
    for given in (rows, table.get("search", {})):
        odd = _date_in(given)
        if odd is not None:
            raise BadOption(f"{odd} is a date", hint="give a number, or a text in quotes")
    verbs = sorted(path.stem for path in _VERBS.glob("[a-z]*.py"))
    for number, row in enumerate(rows, start=1):
        if verbs and not any(name in verbs for name in row):
            first = next(iter(row))
            hint = did_you_mean(first, verbs, f"verbs are {', '.join(verbs)}", cutoff=0.5)
            raise BadOption(f"line {number}: there is no verb {first!r}", hint=hint)


def _date_in(value: Any) -> str | None:
    """A date or time of TOML, which no argument is and JSON does not have."""
    if isinstance(value, dict | list):
        entries = value.values() if isinstance(value, dict) else value
        return next((found for entry in entries if (found := _date_in(entry)) is not None), None)
    return str(value) if isinstance(value, datetime.date | datetime.time) else None
