"""The memory of a step before anything is compiled: a TrainingGraph in, bytes alive at every operation out.

Event by event: every operation that writes memory (`fusion.py`) makes its results, and storages die with their last reader.
New parameters and states take the place of the old ones. A fused operation may write over an operand that dies in it.
Blocks are rounded as CUDA's allocator rounds them. What libraries take for themselves is a table of what was measured.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from wholestep.graph.liveness import donated, flat_numbers, tensor_bytes, with_tensors
from wholestep.graph.training_graph import OutputKind, Role, TrainingGraph, phase_of
from wholestep.ops.call import read_call
from wholestep.ops.offload import lies_on_host
from wholestep.ops.record import record_of
from wholestep.plan.fusion import Work, written_out

ROUNDING = 512
WORKSPACE = 33 << 20
"""cuBLAS holds 32 MiB for itself on recent cards, plus a little."""
INPUTS = {
    Role.PARAMETER: "weights", Role.STATE: "optimizer state", Role.BUFFER: "weights", Role.GRADIENT: "gradients",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes at every operation that writes memory."""

    works: tuple[Work, ...]
    alive: tuple[int, ...]
    """While the operation runs, beyond what lasts from step to step."""
    born: Mapping[int, int]
    """Storage -> index of the operation that makes it."""
    last: Mapping[int, int]
    """Storage -> index of the last operation that reads it."""
    sizes: Mapping[int, int]
    numbers: Mapping[fx.Node, Any]
    lasting: Mapping[str, int]
    """weights, optimizer state, batch, ...: bytes held from step to step."""
    gradients: frozenset[int]
    workspace: int = WORKSPACE

    @property
    def peak_at(self) -> int:
        return max(range(len(self.alive)), key=self.alive.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        return sum(self.lasting.values()) + self.workspace + (self.alive[self.peak_at] if self.alive else 0)

    def breakdown(self) -> dict[str, int]:
        """What fills the memory at the peak; sums to `peak_bytes`."""
        found = dict(self.lasting) | {"workspace": self.workspace}
        at = self.peak_at
        for storage, size in self.sizes.items():
            if self.born[storage] <= at <= self.last[storage]:
                kind = self._kind(storage, at)
                found[kind] = found.get(kind, 0) + size
        rest = self.peak_bytes - sum(found.values())
        found["temporaries"] = found.get("temporaries", 0) + rest  # scratch of libraries, operands written over
        return found

    def _kind(self, storage: int, at: int) -> str:
        if storage in self.gradients:
            return "gradients"
        made, read = (phase_of(self.works[i].node) for i in (self.born[storage], self.last[storage]))
        return (
            "saved activations"
            if made == "forward" and read == "backward" and at != self.born[storage]
            else "temporaries"
        )


def timeline(graph: TrainingGraph, *, workspace: int = WORKSPACE) -> Timeline:
    """The memory of one step, fixed sizes; `workspace` is what libraries hold on the device."""
    works, numbers = written_out(graph)
    kept = donated(graph, numbers)
    sizes, born, last = _lives(graph, works, numbers, kept)
    dying: dict[int, list[int]] = defaultdict(list)
    for storage in sizes:
        dying[last[storage]].append(storage)
    alive: list[int] = []
    now = 0
    for index, work in enumerate(works):
        new = [s for s in work.makes if s in sizes and born[s] == index]
        now += sum(sizes[s] for s in new)
        over = _written_over(work, new, dying[index], sizes, born, works) if work.fusable else 0
        alive.append(now - over + _scratch(work.node))
        now -= sum(sizes[s] for s in dying[index])
    named = set(graph.gradients.values())
    gradients = frozenset(s for node, tree in numbers.items() if node.name in named for s in flat_numbers(tree))
    return Timeline(tuple(works), tuple(alive), born, last, sizes, numbers, _lasting(graph), gradients, workspace)


def _lives(
    graph: TrainingGraph, works: list[Work], numbers: dict[fx.Node, Any], kept: set[int]
) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """(bytes, first operation, last operation) of every storage that comes and goes within the step."""
    sizes: dict[int, int] = {}
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, work in enumerate(works):
        for storage, tensor in with_tensors(numbers[work.node], work.node.meta.get("val")):
            if storage in work.makes and storage not in kept and storage not in sizes:
                sizes[storage] = -(-tensor_bytes(tensor) // ROUNDING) * ROUNDING
                born[storage] = last[storage] = index
        for storage in work.reads:
            if storage in sizes:
                last[storage] = index
    for value, entry in zip(graph.output_values, graph.outputs, strict=True):
        if isinstance(value, fx.Node) and entry.kind is not OutputKind.UPDATE:
            last.update({s: len(works) - 1 for s in flat_numbers(numbers[value]) if s in sizes})
    return sizes, born, last


def _written_over(
    work: Work, new: list[int], dying: list[int], sizes: dict[int, int], born: dict[int, int], works: list[Work]
) -> int:
    """Bytes of results that take the place of operands of the same size, made in the same region and dead now."""
    free = [sizes[s] for s in dying if s not in new and works[born[s]].region == work.region]
    saved = 0
    for storage in new:
        if sizes[storage] in free:
            free.remove(sizes[storage])
            saved += sizes[storage]
    return saved


def _scratch(node: fx.Node) -> int:
    """What a library call takes for itself while it runs."""
    scratch = record_of(node).scratch
    return 0 if scratch is None else scratch(read_call(node))


def _lasting(graph: TrainingGraph) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for entry, node in zip(graph.inputs, graph.placeholders, strict=True):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not lies_on_host(node):
            found[INPUTS.get(entry.role, "batch and numbers")] += -(-tensor_bytes(value) // ROUNDING) * ROUNDING
    return dict(found)
