"""What is searched: a recipe in which values are lists or ranges in, its points out, each a recipe and settings of its own.

    [search]
    model = "gpt-1m"
    batch = { from = 8, to = 64, times = 2 }        # 8, 16, 32, 64; `step = 8` adds instead
    precision = ["fp32", "bf16"]

A list in a line of `verbs` means the same: `{ recompute = "blocks.*", ratio = [0, 0.5, 1] }`. Every combination is a point. An
argument that is itself a list is written as a list in a list. Reading is strict, as it is for every recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, WholestepError
from wholestep.graph.bytes import parse_bytes
from wholestep.graph.recipe_table import read_table
from wholestep.options import CHOICES
from wholestep.schedule import verbs  # noqa: F401 - registers them
from wholestep.schedule.modules import nearest
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.recipe_file import line_of, verb_of

SETTINGS = ("batch", "seq", "precision", "memory", "backend", "data", "set")
"""Of `[search]`, beside the model; each but `set`, a table of such values, may be a list or a range."""
MOST_POINTS = 512
"""Every point is captured or at least planned: a second or more each."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A value that varies."""

    name: str
    values: tuple[Any, ...]

    @property
    def ranks(self) -> list[int] | None:
        """Every value's place by size; None where values have no size."""
        try:
            sizes = [parse_bytes(value) if self.name == "memory" else _number(value) for value in self.values]
        except WholestepError:  # "auto", or a word
            return None
        return [sorted(sizes).index(size) for size in sizes]


@dataclasses.dataclass(frozen=True)
class Point:
    """One way to run the model."""

    model: str
    places: tuple[int, ...]
    """Number of its value on every axis."""
    values: Mapping[str, Any]
    """Axis -> value."""
    settings: Mapping[str, Any]
    """Those of SETTINGS that are given, `set` as a table."""
    lines: tuple[Mapping[str, Any], ...]
    """Of its recipe, as a file has them."""
    expects: Mapping[str, str]
    source: str

    @functools.cached_property
    def key(self) -> str:
        """What it is remembered by: equal points of two recipes have one key."""
        told = json.dumps([self.model, self.settings, self.lines], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @functools.cached_property
    def recipe(self) -> Recipe:
        """As it stands, without lists."""
        return recipe_of_lines(self.lines, self.expects, self.source)

    @property
    def sets(self) -> tuple[str, ...]:
        """As `--set` takes them."""
        return tuple(f"{name}={_text(value)}" for name, value in self.settings.get("set", {}).items())

    @property
    def name(self) -> str:
        return ", ".join(f"{axis} {_text(value)}" for axis, value in self.values.items()) or "the recipe"


@dataclasses.dataclass(frozen=True)
class Space:
    """All points."""

    model: str
    axes: tuple[Axis, ...]
    points: tuple[Point, ...]


def recipe_of_lines(lines: Sequence[Mapping[str, Any]], expects: Mapping[str, str], source: str) -> Recipe:
    """A recipe from the tables of a file."""
    return Recipe(tuple(line_of(number, line) for number, line in enumerate(lines, start=1)), expects, source)


def read_space(path: Path) -> Space:
    """The points of a file; models are not looked at yet."""
    table = read_table(path, search=True)
    try:
        return _space(table, path.name)
    except BadOption as error:
        raise BadOption(f"{path}: {error.what}", hint=error.hint) from None


def _space(table: Mapping[str, Any], source: str) -> Space:
    search, lines, expects = table.get("search"), table.get("verbs", []), table.get("expects", {})
    if not isinstance(search, dict) or not isinstance(search.get("model"), str):
        raise BadOption("it does not say what to search for", hint='give it a table [search] with model = "gpt-1m"')
    _refuse_unknown(search, ("model", *SETTINGS), "setting")
    chosen = dict(_choices(search, lines))
    axes = tuple(Axis(name, values) for name, values in _names(chosen, lines).items() if len(values) > 1)
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_POINTS:
        raise BadOption(f"{count} points are more than {MOST_POINTS}", hint="shorten a list, or search in two parts")
    points = tuple(_points(search["model"], chosen, axes, lines, expects, source))
    for point in points:
        point.recipe  # noqa: B018 - a line that is none is told now, before a model is built
    return Space(search["model"], axes, points)


Place = tuple[Any, ...]
"""("batch",), ("set", "lr"), or (number of a line, argument)."""


def _choices(search: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Place, tuple[Any, ...]]]:
    """The values of every place, of those with one value too."""
    for name in SETTINGS:
        if name == "set":
            given = search.get(name, {})
            if not isinstance(given, dict):
                raise BadOption("set is no table", hint="write set = { layers = 2, lr = [1e-3, 1e-4] }")
            for key, value in given.items():
                yield ("set", key), _values(value, f"set {key}")
        elif name in search:
            yield (name,), tuple(_checked(name, value) for value in _values(search[name], name))
    for number, line in enumerate(lines):
        for argument, value in line.items():
            yield (number, argument), _values(value, f"line {number + 1}: {argument}")


def _values(value: Any, what: str) -> tuple[Any, ...]:
    """Of a list or a range, each once; anything else is one value."""
    if isinstance(value, dict) and "from" in value:
        return _range(value, what)
    if not isinstance(value, list):
        return (value,)
    if not value:
        raise BadOption(f"{what} = []", hint="name at least one value")
    return tuple(value[i] for i in range(len(value)) if not any(_same(value[i], other) for other in value[:i]))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _range(table: Mapping[str, Any], what: str) -> tuple[Any, ...]:
    """`{ from, to, step }` or `{ from, to, times }`, both ends included."""
    _refuse_unknown(table, ("from", "to", "step", "times"), f"part of the range of {what}")
    if "to" not in table or ("step" in table) == ("times" in table):
        raise BadOption(
            f"{what}: a range of {', '.join(table)}", hint="write { from = 8, to = 64, times = 2 } or step = 8"
        )
    numbers = [value for value in table.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(table) or not all(map(math.isfinite, numbers)):
        raise BadOption(f"{what}: a range of other things than numbers", hint="write the values as a list")
    first, last, step, times = table["from"], table["to"], table.get("step", 0), table.get("times", 1)
    if last < first or (step <= 0 and times <= 1) or ("times" in table and first <= 0):
        raise BadOption(f"{what}: the range does not rise", hint="give step above 0, or times above 1 and from above 0")
    found: list[Any] = []
    for number in range(MOST_POINTS + 1):
        value = first * times**number if "times" in table else round(first + number * step, 12)
        if value > last * (1 + 1e-12):
            break
        found.append(value)
    return tuple(found)


def _checked(name: str, value: Any) -> Any:
    """A value of `[search]`, found to be one that there is."""
    if name in ("batch", "seq"):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadOption(f"{name} = {value!r}", hint="use whole numbers, 1 or more")
    elif not isinstance(value, str):
        raise BadOption(f"{name} = {value!r}", hint="write it in quotes")
    elif name in CHOICES and value not in CHOICES[name]:
        raise BadOption(
            f"{name} = {value!r}", hint=nearest(value, list(CHOICES[name]), f"use {', '.join(CHOICES[name])}")
        )
    elif name == "memory" and value != "auto":
        parse_bytes(value)
    return value


def _names(chosen: Mapping[Place, tuple[Any, ...]], lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Name for people -> values, in the order of `chosen`; of places with one name all but a setting say where they stand."""
    named = [verb_of(line) for line in lines]

    def short(place: Place) -> str:
        if not isinstance(place[0], int):
            return str(place[-1])
        verb = named[place[0]]
        return verb if place[1] == verb else f"{verb} {place[1]}"

    def name(place: Place) -> str:
        told = short(place)
        if len(place) == 1 or sum(short(other) == told for other in chosen) == 1 == _times(named, place):
            return told
        return f"set {told}" if place[0] == "set" else f"{told} (line {place[0] + 1})"

    return {name(place): values for place, values in chosen.items()}


def _times(named: Sequence[str], place: Place) -> int:
    """How many lines have the verb of a place; one for a place that is in none."""
    return named.count(named[place[0]]) if isinstance(place[0], int) else 1


def _points(
    model: str, chosen: Mapping[Place, tuple[Any, ...]], axes: Sequence[Axis], lines: Sequence[Mapping[str, Any]],
    expects: Mapping[str, str], source: str,
) -> Iterator[Point]:  # fmt: skip
    places = list(chosen)
    for numbers in itertools.product(*(range(len(values)) for values in chosen.values())):
        taken = {place: chosen[place][number] for place, number in zip(places, numbers, strict=True)}
        varies = [number for place, number in zip(places, numbers, strict=True) if len(chosen[place]) > 1]
        settings: dict[str, Any] = {place[0]: value for place, value in taken.items() if len(place) == 1}
        sets = {place[1]: value for place, value in taken.items() if place[0] == "set"}
        made = tuple({argument: taken[number, argument] for argument in line} for number, line in enumerate(lines))
        yield Point(
            model, tuple(varies), {axis.name: axis.values[n] for axis, n in zip(axes, varies, strict=True)},
            settings | ({"set": sets} if sets else {}), made, expects, source,
        )  # fmt: skip


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadOption(f"{value!r} is no number")
    return value


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name in table:
        if name not in known:
            raise BadOption(
                f"unknown {what} {name!r}", hint=nearest(name, list(known), f"there are {', '.join(known)}")
            )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
