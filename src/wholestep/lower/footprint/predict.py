"""The memory of a step before it runs: a TrainingGraph in, a predicted MemoryProfile out.

What is predicted is what the lowered step does, statement by statement (`lower/driver.py`): each call makes the storages
of its results, a name is deleted after its last use, a storage dies with the last name that looks at it, an optimizer
update writes where the state lies. Liveness alone says nothing about the memory an operator takes for itself while it
runs; `scratch` adds that where it is known: measured once per distinct operator (`scratch.py`), or read from the code
that Inductor generated for a region (`regions.py`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import fx

from wholestep.graph.liveness import storages, tensor_bytes
from wholestep.graph.training_graph import Role, TrainingGraph, module_of, phase_of, tensors_in
from wholestep.graph.views import is_cheap_view_or_entry
from wholestep.lower.footprint.blocks import (
    OTHER,
    PHASES,
    TEMPORARIES,
    WORKSPACE,
    Block,
    MemoryProfile,
    Phase,
    assemble,
)
from wholestep.lower.footprint.facts import Facts, facts_of, flat, short_name
from wholestep.lower.footprint.scratch import Scratch
from wholestep.lower.in_place import ImperativeGraph, write_state_in_place
from wholestep.ops.offload import lies_on_host

CUDA_ROUNDING = 512
"""Bytes to which CUDA's caching allocator rounds every block."""
FEED_SLOT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class CallFootprint:
    """One statement of the driver: what it reads and defines, and what it takes for itself beyond its results."""

    reads: tuple[fx.Node, ...]
    defines: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...]
    """Every node that is computed in it; the first is asked for phase and module."""
    boxed: bool = False
    """Its arguments may die while it runs."""
    scratch: Scratch | None = None


def predict_profile(
    graph: TrainingGraph,
    *,
    scratch: Mapping[str, Scratch] | None = None,
    rounding: int | None = None,
) -> MemoryProfile:
    """The profile of backend `interpret`: one call per node.

    On CUDA a block may be up to 1 MiB larger than what was asked for, when the allocator reuses one and finds the rest too
    small to split off: compare with `requested_bytes` of `torch.cuda.memory_stats` and `rounding=1` for an exact figure.

    Args:
        scratch: name of a node -> what its operator takes beyond what the graph shows.
        rounding: of the allocator, in bytes; None is 1 on a CPU and 512 on a GPU.
    """
    imperative = write_state_in_place(graph)
    known = scratch or {}
    calls = [
        CallFootprint(tuple(node.all_input_nodes), (node,), (node,), scratch=known.get(node.name))
        for node in imperative.graph.nodes if node.op == "call_function"
    ]  # fmt: skip
    if scratch is None:
        notes = ["without what operators take for themselves while they run"]
    else:
        notes = unmeasured([call for call in calls if not is_cheap_view_or_entry(call.made[0])])
    return profile_of_calls(graph, imperative, calls, rounding=rounding, notes=notes)


def unmeasured(calls: Sequence[CallFootprint]) -> list[str]:
    """A note about calls whose own memory could not be measured."""
    missing = sum(call.scratch is None for call in calls)
    text = f"{missing} of {len(calls)} calls could not be made on stand-ins: what they take for themselves is left out"
    return [text] if missing else []


def profile_of_calls(
    graph: TrainingGraph,
    imperative: ImperativeGraph,
    calls: Sequence[CallFootprint],
    *,
    rounding: int | None = None,
    notes: Sequence[str] = (),
) -> MemoryProfile:
    """The profile of a driver that makes these calls in order."""
    device = _device(graph)
    unit = rounding or (CUDA_ROUNDING if device.startswith("cuda") else 1)
    walk = _Walk(imperative, facts_of(graph), unit)
    walk.inputs(graph, imperative)
    last = last_uses(calls, imperative)
    phases: list[tuple[str, int]] = []
    for index, call in enumerate(calls):
        phases.append((phase_of(call.made[0]), walk.instant))
        walk.call(call, dying=[node for node in call.reads if last.get(node) == index], used=last)
    blocks = walk.finish()
    return assemble(
        blocks, walk.instant + 1, _stretches(phases, walk.instant + 1), system="predicted", device=device, notes=notes
    )


class _Walk:
    """Plays the driver: which names are bound, which storages they keep alive, since when."""

    def __init__(self, imperative: ImperativeGraph, facts: Mapping[str, Facts], unit: int) -> None:
        # only the nodes are looked at, and an imperative graph has them in the same place
        self.numbers = storages(cast(TrainingGraph, imperative))
        self.facts, self.unit, self.instant = facts, unit, 0
        self.holders: dict[int, set[fx.Node]] = defaultdict(set)
        self.blocks: dict[int, Block] = {}
        self.unnamed: list[fx.Node] = []
        """What the driver's `_` holds: results nobody reads, until the next one."""
        self.scratch: list[Block] = []
        self.used_at: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def inputs(self, graph: TrainingGraph, imperative: ImperativeGraph) -> None:
        for node in imperative.graph.nodes:
            if node.op in ("placeholder", "get_attr") and not lies_on_host(node):
                self._bind(node, born=0, lasting=True)
        # keys and numbers lie in one buffer of the runtime's, a slot of 16 bytes each (runtime/feed.py)
        for entry, node in zip(graph.inputs, imperative.placeholders, strict=True):
            if entry.role in (Role.KEY, Role.HYPER):
                block = self.blocks[self.numbers[node]]
                block.bytes = _rounded(block.bytes, FEED_SLOT)

    def call(self, call: CallFootprint, *, dying: Sequence[fx.Node], used: Mapping[fx.Node, int]) -> None:
        self.instant += 1
        phase = phase_of(call.made[0])
        for node in call.reads:
            for number in flat(self.numbers.get(node)):
                self.used_at[number].append((phase, self.instant))
        measured = zip(call.scratch.results, call.scratch.late, strict=True) if call.scratch is not None else None
        for node in call.defines:
            if not _writes(node) and not lies_on_host(node):
                self._bind(node, born=self.instant, lasting=False, measured=measured)
        if call.boxed:  # what it reads last dies while it runs; its scratch was measured so
            self._release(dying)
        if call.scratch and call.scratch.running:
            first = call.made[0]
            category, why = (
                (TEMPORARIES, "inside a compiled region") if call.boxed else (WORKSPACE, "while the operator runs")
            )
            self.scratch.append(
                Block(
                    bytes=_rounded(call.scratch.running, self.unit), born=self.instant, died=self.instant + 1, category=category,
                    module=module_of(first) or "", phase=phase, operator=short_name(first.target), why=why,
                )
            )  # fmt: skip
        self.instant += 1
        unread = [node for node in call.defines if node not in used]
        if unread:
            self._release(self.unnamed)
            self.unnamed = unread
        if not call.boxed:
            self._release(dying)

    def finish(self) -> list[Block]:
        for number, block in self.blocks.items():
            forward = [instant for phase, instant in self.used_at[number] if phase == "forward"]
            backward = [instant for phase, instant in self.used_at[number] if phase == "backward"]
            if block.born and backward:
                # inclusive of the instant of release: absent from after its last forward use to its first backward use
                start = max([block.born, *forward]) + 1
                block.idle = (start, max(start, backward[0]))
        return [*self.blocks.values(), *self.scratch]

    def _bind(
        self, node: fx.Node, *, born: int, lasting: bool, measured: Iterator[tuple[int, bool]] | None = None
    ) -> None:
        """Name the storages of a value; `measured`: their bytes, as a storage may be larger than its tensor, and whether they
        are made after the call's peak, which is the next instant."""
        numbers = self.numbers.get(node)
        for index, (number, tensor) in enumerate(zip(flat(numbers), tensors_in(node.meta.get("val")), strict=False)):
            count, late = (0, False) if measured is None else next(measured, (0, False))
            if number not in self.blocks:
                name = f"{node.name}[{index}]" if isinstance(numbers, list) else node.name
                block = self.blocks[number] = self._new(node, name, tensor, born + late)
                block.bytes = max(block.bytes, _rounded(count, self.unit))
            if not lasting and self.blocks[number].born:
                self.holders[number].add(node)

    def _new(self, node: fx.Node, name: str, tensor: torch.Tensor, born: int) -> Block:
        count = _rounded(tensor_bytes(tensor), self.unit)
        block = Block(bytes=count, born=born, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        if name in self.facts:
            return self.facts[name].describe(block)
        block.name, block.module, block.phase = name, module_of(node) or "", phase_of(node)
        block.operator = short_name(node.target) if node.op == "call_function" else ""
        if node.op != "call_function":
            block.category, block.phase = OTHER, "before"
        return block

    def _release(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            for number in set(flat(self.numbers.get(node))):
                self.holders[number].discard(node)
                block = self.blocks.get(number)
                if block is not None and block.born and not self.holders[number]:
                    block.died = self.instant


def last_uses(calls: Sequence[CallFootprint], imperative: ImperativeGraph) -> dict[fx.Node, int]:
    """Value -> number of the last call that reads it; results and inputs of the step are never deleted."""
    last = {node: index for index, call in enumerate(calls) for node in call.reads}
    kept = [value for value in imperative.results if isinstance(value, fx.Node)]
    kept += [node for node in imperative.graph.nodes if node.op in ("placeholder", "get_attr")]
    return last | dict.fromkeys(kept, len(calls))


def _stretches(marks: Sequence[tuple[str, int]], end: int) -> list[Phase]:
    """(phase, instant) marks -> stretches of one phase."""
    found: list[Phase] = []
    for name, start in marks:
        if found and found[-1].name == name:
            continue
        if found:
            found[-1] = dataclasses.replace(found[-1], end=start)
        found.append(Phase(name, start if found else 0, end))
    assert all(phase.name in PHASES for phase in found)
    return found


def _writes(node: fx.Node) -> bool:
    """Whether the call only writes into its arguments: `copy_`, an in-place update."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _rounded(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def _device(graph: TrainingGraph) -> str:
    for node in graph.placeholders:
        for tensor in tensors_in(node.meta.get("val")):
            return str(tensor.device)
    return "cpu"
