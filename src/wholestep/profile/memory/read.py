"""A recorded step -> blocks: the events of `events.py` in, every block with its category and its reasons out.

Two sources of meaning. For a lowered step the driver's calls are marked and their results have names, so the graph says
everything (`facts.py`). For plain PyTorch and torch.compile the events themselves tell: what is made in the forward pass, is
alive when the backward pass begins, and is read or released by it, is a saved activation; what lies where `.grad` points
is a gradient; what no pass reads or releases is held by someone's Python.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from wholestep.lower.footprint.blocks import (
    GRADIENTS,
    LASTING,
    OTHER,
    SAVED,
    TEMPORARIES,
    WORKSPACE,
    Block,
    Phase,
)
from wholestep.lower.footprint.events import Context, Event
from wholestep.lower.footprint.facts import Facts, grows_with_batch, is_expensive, short_name
from wholestep.profile.memory.marked import Made

_WORKSPACE_OWNERS = ("mm", "conv", "attention", "rnn", "lstm", "gru", "linear", "matmul", "cudnn", "cublas")


@dataclasses.dataclass(slots=True)
class Meaning:
    """What is known besides the events."""

    gradients: list[dict[int, str]]
    """Address -> parameter, once per mark of `phases_marked`."""
    calls: Sequence[Made] = ()
    facts: Mapping[str, Facts] = dataclasses.field(default_factory=dict)
    rows: int = 1
    fixed: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    """Shapes of parameters and buffers."""


@dataclasses.dataclass(slots=True)
class _Use:
    phase: str
    instant: int
    reader: str


class StepReader:
    """Plays the events of one step over the blocks that were there before."""

    def __init__(self, before: Mapping[int, Block], meaning: Meaning) -> None:
        self.open: dict[int, Block] = dict(before)
        self.before = list(self.open.values())
        self.meaning = meaning
        self.instant = 0
        self.marks: list[tuple[str, int]] = [("forward", 0)]
        self.made: list[tuple[Block, Context, int]] = []
        """Blocks of this step, where they were made, and when on the clock."""
        self.uses: dict[int, list[_Use]] = defaultdict(list)
        self.inputs: dict[tuple[str, int], list[Block]] = defaultdict(list)
        """(operator, its end) -> the blocks it read."""
        self.reserved: dict[int, int] = {}
        self.unknown_releases = 0
        self._settled: set[int] = set()
        """Blocks whose category is known for certain."""
        self._died_at: dict[int, int] = {}
        self._gradients = iter(meaning.gradients)
        self._running: int | None = None

    def play(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind == "memory":
                self._call_ended(event.context.call)
                self._memory(event)
            elif event.kind == "read":
                self._read(event)
            else:
                self._mark(event)
        self._call_ended(None)

    # ---- events ----

    def _memory(self, event: Event) -> None:
        self.instant += 1
        self.reserved[self.instant] = event.reserved
        if event.bytes < 0:
            block = self.open.pop(event.address, None)
            if block is None:
                self.unknown_releases += 1
            else:
                block.died = self.instant
                self._died_at[id(block)] = event.time
            return
        context = event.context
        block = Block(
            bytes=event.bytes, born=self.instant, module=context.module or "", phase=self.marks[-1][0],
            operator=short_name(context.operator),
        )  # fmt: skip
        self.open[event.address] = block
        self.made.append((block, context, event.time))

    def _read(self, event: Event) -> None:
        block = self.open.get(event.address)
        if block is None:
            return
        if block.shape is None:
            block.shape, block.dtype = event.shape, event.dtype
        context = event.context
        self.inputs[context.operator, context.operator_end].append(block)
        reader = context.node or short_name(context.operator)
        where = f" of {context.module}" if context.module else ""
        self.uses[id(block)].append(_Use(self.marks[-1][0], self.instant, f"{reader} in {self.marks[-1][0]}{where}"))

    def _mark(self, event: Event) -> None:
        if event.text == "backward":
            self._phase("backward")
        elif event.text == "update":
            self._phase("update")
            self._note_gradients()
        elif event.text in ("backward ends", "update ends"):
            self._phase("update" if event.text == "backward ends" else "forward")
            self._note_gradients()
        elif event.text.startswith("call|"):
            self._call_ended(None)
            self._running = event.context.call
            self._call_begins(self.meaning.calls[int(event.text.partition("|")[2])])

    def _call_begins(self, made: Made) -> None:
        known = [self.meaning.facts[name].phase for name, *_ in made.results if name in self.meaning.facts]
        if made.update or known:
            self._phase("update" if made.update else max(known, key=known.count))
        for address in made.reads:
            block = self.open.get(address)
            if block is not None:
                self.uses[id(block)].append(_Use(self.marks[-1][0], self.instant, ""))

    def _call_ended(self, now: int | None) -> None:
        """Name what the call before returned, once nothing of it happens any more."""
        if self._running is None or self._running == now:
            return
        made, self._running = self.meaning.calls[self._running], None
        for name, address, shape, dtype in made.results:
            block, facts = self.open.get(address), self.meaning.facts.get(name)
            if block is None or facts is None or not block.born or facts.phase == "before":
                continue  # a view of what was there before
            if id(block) not in self._settled:
                facts.describe(block)
                block.shape, block.dtype = shape, dtype
                self._settled.add(id(block))

    def _phase(self, name: str) -> None:
        if self.marks[-1][0] != name:
            self.marks.append((name, self.instant + 1))

    def _note_gradients(self) -> None:
        for address, name in next(self._gradients, {}).items():
            block = self.open.get(address)
            if block is not None and block.born:
                block.category, block.name, block.module = GRADIENTS, name, name.rpartition(".")[0]
                block.why = f"gradient of {name}"
                self._settled.add(id(block))

    # ---- what it means ----

    def finish(self, after: Mapping[int, Block]) -> tuple[list[Block], list[Phase]]:
        """`after`: address -> Block of what modules and optimizer own once the step has returned."""
        if self.marks[-1][1] > self.instant:
            self.instant += 1  # a fused update on a GPU allocates nothing, and is a phase all the same
        phases = self._phases()
        for address, block in self.open.items():
            owner = after.get(address)
            if owner is not None and block.born and id(block) not in self._settled:
                block.category, block.name, block.module, block.why = (
                    owner.category,
                    owner.name,
                    owner.module,
                    owner.why,
                )
                self._settled.add(id(block))
        for block, context, _ in self.made:
            if id(block) not in self._settled:
                self._judge(block, context, phases)
            if block.category == GRADIENTS or block.category in LASTING:
                continue
            if block.shape is not None and not block.scales:
                fixed = self.meaning.fixed if block.phase != "forward" else set()
                block.scales = grows_with_batch(block.shape, self.meaning.rows, fixed)
            self._idle(block)
        self._mark_recomputable()
        return [*self.before, *(block for block, _, _ in self.made)], phases

    def _phases(self) -> list[Phase]:
        """Between two backward passes without an update comes the next micro-batch's forward pass."""
        end = self.instant + 1
        found: list[Phase] = []
        for (name, start), (following, stop) in zip(self.marks, [*self.marks[1:], ("", end)], strict=True):
            if name == "update" and following == "backward":
                name = "forward"
            elif name == "forward" and following == "":
                name = "update" if found else name
            if found and found[-1].name == name:
                found[-1] = dataclasses.replace(found[-1], end=stop)
            elif stop > start:
                found.append(Phase(name, start, stop))
        return found

    def _judge(self, block: Block, context: Context, phases: Sequence[Phase]) -> None:
        block.phase = _phase_at(phases, block.born)
        used = [use for use in self.uses[id(block)] if use.phase == "backward"]
        begins = next((p.start for p in phases if p.name == "backward" and p.start > block.born), None)
        lives_on = begins is not None and (block.died is None or block.died > begins)
        released = _phase_at(phases, block.died) if block.died is not None else None
        if context.call is not None:  # no value of the graph: the call's own
            if self.meaning.calls[context.call].region:
                block.category, block.why = TEMPORARIES, "inside a compiled region"
            else:
                block.category, block.why = WORKSPACE, f"inside {block.operator}"
            return
        inside = self._died_at.get(id(block), 1 << 62) <= context.operator_end
        if inside and any(part in block.operator for part in _WORKSPACE_OWNERS):
            block.category, block.why = WORKSPACE, f"inside {block.operator}"
        elif block.phase == "forward" and lives_on and (used or released == "backward"):
            block.category = SAVED
            block.why = next((use.reader for use in used if use.reader), "") or "released in backward"
        elif block.died is None:
            block.category, block.why = OTHER, "still held after the step"
        elif block.phase == "forward" and lives_on:
            block.category, block.why = OTHER, "held through the backward pass, which does not read it"
        else:
            uses = [use for use in self.uses[id(block)] if use.reader]
            block.category = TEMPORARIES
            block.why = f"until {uses[-1].reader}" if uses else ""

    def _idle(self, block: Block) -> None:
        uses = self.uses[id(block)]
        backward = [use.instant for use in uses if use.phase == "backward"]
        if block.category == SAVED and backward:
            forward = [use.instant for use in uses if use.phase == "forward"]
            start = max([block.born, *forward]) + 1
            block.idle = (start, max(start, backward[0]))

    def _mark_recomputable(self) -> None:
        again: set[int] = set()
        for block, context, _ in self.made:
            if block.name:  # the graph has decided
                continue
            sources = self.inputs.get((context.operator, context.operator_end), [])
            kept = all(not s.born or s.category in (SAVED, *LASTING) or id(s) in again for s in sources)
            if sources and kept and not is_expensive(block.operator):
                again.add(id(block))
                block.recomputable = block.category == SAVED


def _phase_at(phases: Sequence[Phase], instant: int) -> str:
    return next((phase.name for phase in phases if phase.start <= instant < phase.end), "update")
