"""Statements -> one flat Python function, as source that is executed and kept for printing.

In goes a list of calls (an operator, a compiled region, an in-place update) over named values; out comes a function
`step(inputs) -> tuple` in which every value is a local that is deleted at its last use. A region takes its arguments
as a list that it may empty (`boxed`), so an activation can die while the region that reads it last is still running.
Between two calls there is no Python but the naming of values: no wrappers, no dictionaries, no interpreter.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.lower.streams import InOrder, Streams

_serial = itertools.count()

CUTS = (16, 4)
"""A recording of the function may be cut after a sixteenth and after a quarter of its calls."""
MIN_CALLS = 12
"""Below, there is little to gain."""
cutting: list[Callable[[], None]] = []
"""What is called at the cuts: whoever records the function puts it here for as long as that takes."""


def _cut() -> None:
    if cutting:
        cutting[-1]()


@dataclasses.dataclass(frozen=True, slots=True)
class Statement:
    """One call. `results` names what it returns: one node, or with `unpack` a tuple of nodes."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """May hold nodes, at any depth of lists, tuples, dicts and slices."""
    kwargs: dict[str, Any]
    results: tuple[fx.Node, ...]
    unpack: bool = False
    boxed: bool = False
    comment: str = ""
    stream: str = ""
    """Where it runs; "" is the main stream."""
    after: tuple[str, ...] = ()
    """Events that it waits for."""
    leaves: str = ""
    """The event that says it is done."""

    @property
    def is_ordered(self) -> bool:
        """Whether it says anything about streams."""
        return bool(self.stream or self.after or self.leaves)


@dataclasses.dataclass(frozen=True, slots=True)
class Driver:
    """The generated function and its source."""

    function: Callable[[list[Any]], tuple[Any, ...]]
    source: str


@dataclasses.dataclass(slots=True)
class _Scope:
    """Names for values (locals) and for everything else (globals of the generated function)."""

    names: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    taken: set[str] = dataclasses.field(default_factory=set)
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)
    by_identity: dict[int, str] = dataclasses.field(default_factory=dict)

    def value(self, node: fx.Node) -> str:
        if node not in self.names:
            name = node.name if node.name not in self.taken else f"{node.name}__{len(self.taken)}"
            self.taken.add(name)
            self.names[node] = name
        return self.names[node]

    def constant(self, thing: Any, hint: str) -> str:
        """A global of the generated function; equal objects share one."""
        name = self.by_identity.get(id(thing))
        if name is None:
            name = f"_{hint}{len(self.constants)}"
            self.constants[name] = thing
            self.by_identity[id(thing)] = name
        return name


def build_driver(
    placeholders: Sequence[fx.Node],
    statements: Sequence[Statement],
    results: Sequence[Any],
    constants: dict[fx.Node, Any],
    *,
    consume: bool = False,
    streams: Streams | None = None,
) -> Driver:
    """The function that unpacks `inputs`, makes every call in order and returns the results.

    With `consume` it empties the list it is given, so that its inputs die at their last use too. `streams` carries out what
    statements say about theirs; without one everything runs in the order of the text, and that order is checked.
    """
    scope, streams = _Scope(), InOrder() if streams is None else streams
    for node, thing in constants.items():
        scope.names[node] = scope.constant(thing, "constant")
    last = _last_uses(statements)
    kept = {node for node in results if isinstance(node, fx.Node)} | set(constants)
    used = set(last) | kept
    lines = ["def step(inputs):"]
    if placeholders:
        unpacked = ", ".join(scope.value(node) if node in used else "_" for node in placeholders)
        lines.append(f"    {unpacked}, = inputs")
    if consume:
        lines.append("    inputs.clear()")
    lines.append("    _ = None")
    head = len(lines)
    # an event of one recording cannot be waited for in the next
    may_cut = len(statements) >= MIN_CALLS and not consume and not any(statement.is_ordered for statement in statements)
    cuts = {len(statements) // share for share in CUTS} if may_cut else set()
    for index, statement in enumerate(statements):
        if index in cuts and index:
            lines.append(f"    {scope.constant(_cut, 'cut')}()")
        read = nodes_in((statement.args, statement.kwargs))
        dying = [scope.value(node) for node in read if last[node] == index and node not in kept]
        bound = [node if node in used else None for node in statement.results]
        rendered = _render(statement, bound, dying, scope)
        lines.extend(
            _on_its_stream(statement, rendered, scope.constant(streams, "streams"))
            if statement.is_ordered
            else rendered
        )
    if any(statement.is_ordered for statement in statements):
        name = scope.constant(streams, "streams")
        body = [
            f"    {line}" for line in lines[head:]
        ]  # whoever fails, copies on the way are waited for before memory is let go
        lines[head:] = [
            "    try:",
            *body,
            f"        {name}.join()",
            "    except BaseException:",
            f"        {name}.abandon()",
            "        raise",
        ]
    lines.append(f"    return ({''.join(_literal(value, scope) + ', ' for value in results)})")
    source = "\n".join(lines) + "\n"
    return Driver(_execute(source, scope), source)


def _execute(source: str, scope: _Scope) -> Callable[[list[Any]], tuple[Any, ...]]:
    filename = f"<wholestep step {next(_serial)}>"
    # Registered, so that a traceback shows the failing line and with it the node's name.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(scope.constants)
    exec(compile(source, filename, "exec"), namespace)
    return namespace["step"]


def _last_uses(statements: Sequence[Statement]) -> dict[fx.Node, int]:
    last: dict[fx.Node, int] = {}
    for index, statement in enumerate(statements):
        for node in nodes_in((statement.args, statement.kwargs)):
            last[node] = index
    return last


def _render(statement: Statement, bound: list[fx.Node | None], dying: list[str], scope: _Scope) -> list[str]:
    """The lines of one call."""
    comment = f"  # {statement.comment}" if statement.comment else ""
    hint = "region" if statement.boxed else "op_"
    function = scope.constant(statement.function, hint)
    left = ", ".join("_" if node is None else scope.value(node) for node in bound)
    left = f"{left}, = " if statement.unpack and bound else f"{left} = " if bound else ""
    arguments = [_literal(value, scope) for value in statement.args]
    arguments += [f"{key}={_literal(value, scope)}" for key, value in statement.kwargs.items()]
    delete = [f"    del {', '.join(dying)}"] if dying else []
    if statement.boxed:
        return [f"    args = [{', '.join(arguments)}]", *delete, f"    {left}{function}(args){comment}"]
    return [f"    {left}{function}({', '.join(arguments)}){comment}", *delete]


def _on_its_stream(statement: Statement, lines: list[str], streams: str) -> list[str]:
    """A call on its stream, between what it waits for and what waits for it."""
    where = repr(statement.stream)
    waits = [f"    {streams}.wait({where}, {event!r})" for event in statement.after]
    leaves = [f"    {streams}.leave({where}, {statement.leaves!r})"] if statement.leaves else []
    if statement.stream:
        lines = [f"    with {streams}.on({where}):", *(f"    {line}" for line in lines)]
    return [*waits, *lines, *leaves]


def _literal(value: Any, scope: _Scope) -> str:
    """An expression for an argument: names for nodes, literals for plain values, globals for the rest."""
    if isinstance(value, fx.Node):
        return scope.value(value)
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else scope.constant(value, "number")
    if isinstance(value, slice):
        return f"slice({', '.join(_literal(part, scope) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_literal(entry, scope)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(_literal(entry, scope) for entry in value)}]"
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return f"({''.join(_literal(entry, scope) + ', ' for entry in value)})"
    return scope.constant(value, "constant")


def nodes_in(value: Any) -> list[fx.Node]:
    """The distinct nodes of an argument structure, in order of appearance."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(value, lambda node: found.setdefault(node))
    return list(found)
