"""A step on streams that are as late, or as early, as they may be: statements and inputs in, what the step returns out.

The host hands every statement to its stream at once, as with a GPU. Then streams run what they were given, in an order that a
scheduler picks among all that the events allow. Memory that the text lets go of is overwritten as soon as the main stream gets
there, as whatever uses it next would. If the order of a step is complete, every schedule gives the same bits; where it is not,
one of them reads what is not there yet (`Race`), or garbage.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from wholestep.graph.training_graph import tensors_in
from wholestep.lower.driver import Statement, nodes_in
from wholestep.lower.races import blocks_of
from wholestep.ops.offload import lies_on_host

Pick = Callable[[list[str]], str]
"""Names of streams that could go on -> the one that does."""
POISON = 0xA5


class Race(AssertionError):
    """A statement ran before what it reads was there."""


def late(able: list[str]) -> str:
    """The main stream first: copies as late as may be."""
    return "" if "" in able else able[0]


def early(able: list[str]) -> str:
    """Copies first."""
    return next((name for name in able if name), "")


def shuffled(seed: int) -> Pick:
    source = random.Random(seed)
    return lambda able: source.choice(able)


@dataclasses.dataclass(slots=True)
class _Task:
    run: Callable[[], None]
    after: tuple[str, ...] = ()
    leaves: str = ""


def run_virtually(
    placeholders: Sequence[fx.Node], statements: Sequence[Statement], results: Sequence[Any], inputs: Sequence[Any],
    constants: dict[fx.Node, Any], pick: Pick,
) -> list[Any]:  # fmt: skip
    """One step under a scheduler."""
    values: dict[fx.Node, Any] = {**constants, **dict(zip(placeholders, inputs, strict=True))}
    queues: dict[str, deque[_Task]] = {"": deque()}
    for task, stream in _tasks(statements, results, values, set(constants)):
        queues.setdefault(stream, deque()).append(task)
    left: set[str] = set()
    with torch.no_grad():
        while any(queues.values()):
            able = [name for name, queue in queues.items() if queue and all(event in left for event in queue[0].after)]
            if not able:
                raise Race("streams wait for each other, or for an event that nothing leaves")
            task = queues[pick(able)].popleft()
            task.run()
            left.add(task.leaves)
    return [values[value] if isinstance(value, fx.Node) else value for value in results]


def _tasks(
    statements: Sequence[Statement], results: Sequence[Any], values: dict[fx.Node, Any], constants: set[fx.Node]
) -> list[tuple[_Task, str]]:
    """What the host hands over, with the end of every memory behind its last statement."""
    blocks = blocks_of(statements)
    last: dict[Any, int] = {}
    for index, statement in enumerate(statements):
        for node in (*nodes_in((statement.args, statement.kwargs)), *statement.results):
            last[blocks[node]] = index
    kept = {blocks[value] for value in results if isinstance(value, fx.Node) and value in blocks}
    ends: dict[int, list[Any]] = {}
    for block, index in last.items():
        if isinstance(block, fx.Node) and block.op == "call_function" and block not in kept and not lies_on_host(block):
            ends.setdefault(index, []).append(block)
    found: list[tuple[_Task, str]] = []
    for index, statement in enumerate(statements):
        task = _Task(lambda statement=statement: _call(statement, values), statement.after, statement.leaves)  # type: ignore[misc]
        found.append((task, statement.stream))
        for block in ends.get(index, ()):
            alive = (
                {b for b, end in last.items() if end > index} | kept | {n for n in blocks if n.op != "call_function"}
            )
            found.append((_Task(lambda block=block, alive=alive: _poison(block, alive, blocks, values)), ""))  # type: ignore[misc]
    return found


def _call(statement: Statement, values: dict[fx.Node, Any]) -> None:
    for node in nodes_in((statement.args, statement.kwargs)):
        if node not in values:
            raise Race(
                f"{getattr(statement.function, '__name__', statement.function)} reads {node.name} before it is there"
            )
    args, kwargs = fx.map_arg((statement.args, statement.kwargs), values.__getitem__)
    made = statement.function(list(args)) if statement.boxed else statement.function(*args, **kwargs)
    if statement.unpack:
        values.update(zip(statement.results, made, strict=True))
    elif statement.results:
        values[statement.results[0]] = made


def _poison(block: fx.Node, alive: set[Any], blocks: dict[fx.Node, Any], values: dict[fx.Node, Any]) -> None:
    """Overwrite it, unless a value that still lives looks at the same memory."""
    mine = [t for node, b in blocks.items() if b is block and node in values for t in tensors_in(values[node])]
    held = {
        t.untyped_storage().data_ptr()
        for node, b in blocks.items()
        if b is not block and b in alive and node in values
        for t in tensors_in(values[node])
    }
    for tensor in mine:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            torch.tensor([], dtype=torch.uint8).set_(storage).fill_(POISON)
