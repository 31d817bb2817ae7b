"""`wholestep compare`: what moved between two results files of `wholestep bench`, or what two recipes say otherwise."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from wholestep.cli import options
from wholestep.errors import one_of
from wholestep.train.request import look_at_recipe

FAIL_ON = ("slower",)

EXAMPLES = """\b
Examples:
  wholestep compare before.json after.json
  wholestep compare before.json after.json --fail-on slower
  wholestep compare a.toml b.toml
"""


def command(
    before: Annotated[str, typer.Argument(metavar="A", help="The earlier results, or a recipe.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The later ones, or another recipe.")],
    fail_on: Annotated[
        str | None, typer.Option(metavar="slower", help="Exit code 1 when a row got slower, fails now or departs now.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Say what moved beyond noise between two results files, what is new and what is gone.

    A time has moved when the 95 % intervals of both medians do not overlap and the medians differ by more than 2 %.
    Rows are matched by workload and system. Rows of different sizes are not compared; a different GPU or version is noted.

    Two recipes (.toml) are compared line by line: what is gone (-), what is new (+), and expectations that changed (~).
    """
    one_of("--fail-on", fail_on, FAIL_ON)
    if Path(before).suffix == ".toml" or Path(after).suffix == ".toml":
        _compare_recipes(Path(before), Path(after), json)
        return
    from wholestep.bench.results import load

    rows = load(Path(before)), load(Path(after))
    from wholestep.bench.compare import compare, comparison_text

    found = compare(*rows)
    typer.echo(json_text.dumps(found.to_json(), indent=1) if json else comparison_text(found))
    raise typer.Exit(1 if fail_on == "slower" and found.slower else 0)


def _compare_recipes(before: Path, after: Path, json: bool) -> None:
    for path in (before, after):
        look_at_recipe(path)
    from wholestep.schedule.recipe_file import compared, read_recipe

    found = compared(read_recipe(before), read_recipe(after))
    if json:
        kinds = {"-": "gone", "+": "new", "~": "expected"}
        typer.echo(json_text.dumps([{"what": kinds[text[0]], "line": text[2:]} for text in found], indent=1))
    else:
        typer.echo("\n".join(found) or "no difference")
