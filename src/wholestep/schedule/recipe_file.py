"""Recipes as files: TOML that a person writes, one line a verb: `{ recompute = "layers.*", ratio = 0.5 },`.

In and out: a Recipe. Reading is strict: an unknown verb or argument is one clear line with the nearest name. `[expects]` says what
the lines were written for; where a model has changed, what no longer matches is named, and a place that is gone is an error.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wholestep.errors import BadOption, WholestepWarning
from wholestep.graph.file_end import checksum
from wholestep.graph.plan_file import toml_value
from wholestep.graph.recipe_table import END, FORMAT, read_table
from wholestep.schedule import verbs  # noqa: F401 - registers them
from wholestep.schedule.modules import Modules
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.verb import AUTO, VERBS, Verb, make

HEAD = """\
# A recipe of Wholestep: how a model runs, one verb a line. Use it with: wholestep train MODEL --recipe FILE
# `layers.*` is every module of a list. What each verb takes: wholestep.schedule(model).help("recompute")
"""


def recipe_text(recipe: Recipe) -> str:
    """The file."""
    lines = [HEAD, f"format = {FORMAT}", "verbs = ["]
    for line in recipe:
        pairs = ", ".join(f"{name} = {toml_value(value)}" for name, value in line.to_table().items())
        why = recipe.reasons.get(str(line))
        lines.append(f"  {{ {pairs} }},{f'  # {_one_line(why)}' if why else ''}")
    written = {str(line) for line in recipe}
    lines += [f"  # {_one_line(f'{at}: {why}')}" for at, why in recipe.reasons.items() if at not in written]
    lines += ["]", "", "[expects]"]
    lines += [f"{toml_value(at)} = {toml_value(found)}" for at, found in recipe.expects.items()]
    lines += ["", f"[{END}.{check}]" if (check := numbers_check(recipe)) else f"[{END}]"]
    if check:
        lines.append(f"# The number is of the lines {', '.join(_checked())}: write [{END}] when you edit them.")
    return "\n".join(lines) + "\n"


def _checked() -> list[str]:
    return [name for name, kind in VERBS.items() if kind.numbers]


def numbers_check(recipe: Recipe) -> str:
    """A checksum of the lines that make another training of it; nothing where all of that is left to measurement."""
    tables = [line.to_table() for line in recipe if line.numbers and AUTO not in line.arguments().values()]
    return checksum(tables) if tables else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def write_recipe(recipe: Recipe, path: Path) -> None:
    text = recipe_text(recipe)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadOption(f"{path}: {error.strerror or error}", hint="name a file that can be written") from error


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file; it is not held against a model yet."""
    table = read_table(path)
    try:
        lines = tuple(line_of(i, row) for i, row in enumerate(table.get("verbs", []), start=1))
    except BadOption as error:
        raise BadOption(f"{path}: {error.what}", hint=error.hint) from None
    recipe = Recipe(lines, table.get("expects", {}), path.name)
    if table[END] and numbers_check(recipe) not in table[END]:
        hint = f"write it again, or end it in a line [{END}] if you changed them"
        raise BadOption(f"{path}: lines {' or '.join(_checked())} are not what the recipe was written with", hint=hint)
    return recipe


def verb_of(row: Mapping[str, Any]) -> str:
    """The verb of a line as a file has it."""
    return next((key for key in row if key in VERBS), next(iter(row)))


def line_of(number: int, row: Mapping[str, Any]) -> Verb:
    """A line as a file has it, as a verb."""
    name = verb_of(row)
    try:
        at = row[name]
        if name in VERBS and not isinstance(at, str):
            raise BadOption(f"{name} = {at!r}", hint='name the place in quotes: "layers.*", or "" for the model')
        return make(name, at, **{key: value for key, value in row.items() if key != name})
    except BadOption as error:
        raise BadOption(f"line {number}: {error.what}", hint=error.hint) from None


# ---- expectations ----


def expectations(recipe: Recipe, root: nn.Module) -> dict[str, str]:
    """What the lines of a recipe find in a model."""
    modules = Modules(root)
    found = {"": type(root).__name__}
    for line in recipe:
        found |= line.expects(modules)
    return found


def check_expected(recipe: Recipe, root: nn.Module) -> list[str]:
    """What is no longer as it was when the recipe was written, a text each; a place that is gone is an error."""
    modules, changed = Modules(root), []
    now = {"": type(root).__name__}
    for line in recipe:
        try:
            now |= line.expects(modules)
        except BadOption as error:
            expected = recipe.expects.get(line.at)
            was = f", where it expects {expected}" if expected else ""
            raise BadOption(f"{recipe.place(line)}: {error.what}{was}", hint=error.hint) from None
    for at, before in recipe.expects.items():
        if at in now and now[at] != before:
            changed.append(f"{at or 'the model'} was {before} and is {now[at]}")
    return changed


def warn_of_changes(recipe: Recipe, root: nn.Module) -> None:
    for text in check_expected(recipe, root):
        warnings.warn(f"{recipe.source} was written for another model: {text}", WholestepWarning, stacklevel=3)


# ---- comparing ----


def compared(before: Recipe, after: Recipe) -> list[str]:
    """Lines that are gone (`- ...`), new (`+ ...`), and what the two expect otherwise (`~ ...`)."""
    first, second = [line.full() for line in before], [line.full() for line in after]
    found = [text for text in difflib.ndiff(first, second) if text[0] in "+-"]
    for at in {**before.expects, **after.expects}:
        one, other = before.expects.get(at), after.expects.get(at)
        if one is not None and other is not None and one != other:
            found.append(f"~ {at or 'the model'}: {one}, then {other}")
    return found
