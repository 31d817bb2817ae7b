"""Races between streams, found without a GPU: the statements of a driver in, what is wrong with their order out.

On a GPU a statement is only handed to its stream. It runs after what its stream was given before, and after the events it waits
for; nothing else is promised, whatever the order of the text. Memory of the card is taken and given back where the text says so,
on the main stream. So three things have to hold, by vector clocks over streams and events:

- whoever reads memory is ordered after whoever wrote it, and finds the value it means, not one that came to the same slot later;
- whoever writes memory (a slot of the host, a buffer that is filled) is ordered after all who used it before;
- where the text lets go of memory of the card, the main stream is ordered after all who used it: it may be used anew at once.

`lower_interpret` and `lower_inductor` check every step that has copies. `virtual.py` finds the same by running steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from wholestep.graph.views import shares_memory
from wholestep.lower.driver import Statement, nodes_in
from wholestep.lower.transfers import WRITTEN, Send, passes_on
from wholestep.ops.offload import lies_on_host
from wholestep.ops.updates import BY_IN_PLACE

Clock = dict[str, int]
Block = Any
"""Memory: the value that was made in it first, or a slot of the host."""


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One statement's use of memory."""

    index: int
    stream: str
    time: int
    writes: bool


def find_races(statements: Sequence[Statement], kept: Sequence[Any] = ()) -> list[str]:
    """Every race, in words; `kept` are values that the step returns, which nobody lets go of."""
    return _Checker(statements, kept).run()


def blocks_of(statements: Sequence[Statement]) -> dict[fx.Node, Block]:
    """Value -> its memory. What only passes a value on, or looks at it, has the same."""
    found: dict[fx.Node, Block] = {}
    for statement in statements:
        reads = nodes_in((statement.args, statement.kwargs))
        for node in reads:
            found.setdefault(node, node)
        for node in statement.results:
            source = passes_on(statement)
            if isinstance(statement.function, Send):
                found[node] = ("slot", id(statement.function.arena), statement.function.slot)
            elif source is not None:
                found[node] = found[source]
            elif not statement.boxed and reads and shares_memory(node.target):
                found[node] = found[reads[0]]
            else:
                found[node] = node
    return found


def written_by(statement: Statement) -> list[fx.Node]:
    """Arguments that a statement writes to."""
    if statement.function in WRITTEN:
        return [statement.args[WRITTEN[statement.function]]]
    if statement.function in BY_IN_PLACE:
        lists = [entry for entry in statement.args if isinstance(entry, list | tuple)]
        names = [argument for number, argument in enumerate(lists) if number != 1]  # the second are gradients
        return [node for entry in names for node in nodes_in(entry)]
    return []


class _Checker:
    def __init__(self, statements: Sequence[Statement], kept: Sequence[Any]) -> None:
        self.statements = statements
        self.blocks = blocks_of(statements)
        self.kept = {self.blocks.get(node) for node in kept if isinstance(node, fx.Node)}
        self.now: dict[str, Clock] = {"": {"": 0}}
        self.events: dict[str, Clock] = {}
        self.uses: dict[Block, list[Use]] = {}
        self.sent: dict[fx.Node, fx.Node] = {}
        """Value in a slot -> the copy that put it there."""
        self.holds: dict[Block, fx.Node] = {}
        """Slot -> the copy that wrote to it last."""
        self.found: list[str] = []
        self.last: dict[Block, int] = {}
        for index, statement in enumerate(statements):
            for node in (*nodes_in((statement.args, statement.kwargs)), *statement.results):
                self.last[self.blocks[node]] = index

    def run(self) -> list[str]:
        ends: dict[int, list[Block]] = {}
        for block, index in self.last.items():
            ends.setdefault(index, []).append(block)
        for index, statement in enumerate(self.statements):
            clock = self._started(statement)
            self._use(index, statement, clock)
            if statement.leaves:
                self.events[statement.leaves] = dict(clock)
            for block in ends.get(index, ()):
                self._released(index, block)
        return self.found

    def _started(self, statement: Statement) -> Clock:
        clock = self.now.setdefault(statement.stream, {})
        for event in statement.after:
            if event not in self.events:
                self.found.append(f"stream {statement.stream or 'main'} waits for {event}, which nothing leaves before")
            for stream, time in self.events.get(event, {}).items():
                clock[stream] = max(time, clock.get(stream, 0))
        clock[statement.stream] = clock.get(statement.stream, 0) + 1
        return clock

    def _use(self, index: int, statement: Statement, clock: Clock) -> None:
        new = [node for node in statement.results if self.blocks[node] is node or isinstance(statement.function, Send)]
        written = {self.blocks[node] for node in (*written_by(statement), *new)}
        read = {self.blocks[node] for node in nodes_in((statement.args, statement.kwargs))}
        for block in read | written:
            before = self.uses.setdefault(block, [])
            for use in before:
                if (use.writes or block in written) and clock.get(use.stream, 0) < use.time:
                    word = "writes" if block in written else "reads"
                    other = "writes" if use.writes else "reads"
                    self._tell(index, f"{word} {_name(block)} beside {self._where(use.index)}, which {other} it")
            before.append(Use(index, statement.stream, clock[statement.stream], block in written))
        self._slots(index, statement)

    def _slots(self, index: int, statement: Statement) -> None:
        """What a slot is read for is what it holds."""
        for node in nodes_in((statement.args, statement.kwargs)):
            if node in self.sent and self.holds[self.blocks[node]] is not self.sent[node]:
                self._tell(index, f"reads {node.name}, which {self.holds[self.blocks[node]].name} has written over")
        source = passes_on(statement)
        for node in statement.results:
            if isinstance(statement.function, Send):
                self.sent[node] = self.holds[self.blocks[node]] = node
            elif source in self.sent:
                self.sent[node] = self.sent[source]

    def _released(self, index: int, block: Block) -> None:
        """The text lets go of it here."""
        if block in self.kept or isinstance(block, tuple) or block.op != "call_function" or lies_on_host(block):
            return
        main = self.now[""]
        for use in self.uses.get(block, ()):
            if main.get(use.stream, 0) < use.time:
                self._tell(index, f"lets go of {_name(block)} while {self._where(use.index)} may still use it")

    def _tell(self, index: int, text: str) -> None:
        self.found.append(f"{self._where(index)} {text}")

    def _where(self, index: int) -> str:
        statement = self.statements[index]
        made = ", ".join(node.name for node in statement.results) or getattr(statement.function, "__name__", "a call")
        return f"statement {index} ({made}, stream {statement.stream or 'main'})"


def _name(block: Block) -> str:
    return block.name if isinstance(block, fx.Node) else f"slot {block[2]} of the host"


def refuse_races(statements: Sequence[Statement], results: Sequence[Any]) -> None:
    """An error of ours, found before it could be one in silence."""
    found = find_races(statements, results)
    if found:
        raise AssertionError(f"{len(found)} races between streams, the first: {found[0]}")
