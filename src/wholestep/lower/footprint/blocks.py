"""Blocks of memory in, the picture of a step's memory out.

A block is one piece of memory from its birth to its death, with what it is for. Measuring (`cpu.py`, `cuda.py`) and
predicting (`predict.py`) both end in a list of blocks; everything that is shown is computed here from that list, so a
measured and a predicted profile can be laid side by side, and the categories add up to the peak by construction.

Time is counted in instants: instant 0 is before the step, and each allocation or release begins the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

WEIGHTS, BUFFERS, GRADIENTS, STATE, BATCH = "weights", "buffers", "gradients", "optimizer state", "batch"
SAVED, TEMPORARIES, WORKSPACE, OTHER = "saved activations", "temporaries", "workspace", "other"
CATEGORIES = (WEIGHTS, BUFFERS, GRADIENTS, STATE, BATCH, SAVED, TEMPORARIES, WORKSPACE, OTHER)
LASTING = frozenset((WEIGHTS, BUFFERS, STATE))
"""What does not depend on the batch and is there before and after every step."""
PHASES = ("forward", "backward", "update")
POINTS, HELD = 400, 20
"""Instants of a timeline, and blocks that are named at the peak."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Block:
    """One piece of memory. Alive from instant `born` until before instant `died`; None: not released in this step."""

    bytes: int
    born: int = 0
    died: int | None = None
    category: str = TEMPORARIES
    name: str = ""
    """The parameter's name, or the value's in the graph; empty where none is known."""
    module: str = ""
    phase: str = "before"
    """Where it was made: forward, backward, update; `before` the step."""
    operator: str = ""
    """What made it: `addmm`, `gelu`."""
    why: str = ""
    """Why it is alive: who reads it in the backward pass, or who holds it."""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    scales: bool = False
    """Whether it grows with the batch."""
    idle: tuple[int, int] | None = None
    """Instants between its last use in the forward pass and its first in the backward pass."""
    recomputable: bool = False
    """Whether a cheap operator made it from values that are kept anyway."""
    foreign: bool = False
    """Whether it is none of the step's: data, caches, other models of the process."""

    def alive(self, instant: int) -> bool:
        return self.born <= instant and (self.died is None or instant < self.died)


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the step: instants `start` to before `end`."""

    name: str
    start: int
    end: int
    peak_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """One tensor that is alive at the peak."""

    bytes: int
    category: str
    name: str
    module: str
    phase: str
    operator: str
    why: str
    shape: tuple[int, ...] | None
    dtype: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Where the memory of one step goes. The values of `at_peak` add up to `peak_bytes`."""

    system: str
    """`eager`, `compile`, `wholestep`, or `predicted`."""
    device: str
    peak_bytes: int
    """Most bytes allocated at any instant; on CUDA in whole blocks of its allocator, as `max_memory_allocated` counts."""
    peak_instant: int
    num_instants: int
    at_peak: dict[str, int]
    phases: tuple[Phase, ...]
    timeline: tuple[tuple[int, dict[str, int]], ...]
    """(instant, bytes per category), thinned out; the peak is always among them."""
    top: tuple[Held, ...]
    modules: dict[str, dict[str, int]]
    """Module path -> category -> bytes at the peak; a module's own, without its children's."""
    saved_by_operator: dict[str, int]
    """Saved activations at the peak, by the backward operator that reads them."""
    elsewhere_bytes: int = 0
    """What was alive before the step and is none of the step's: other models, caches, leaks (in `other`), and on CUDA the
    workspaces that libraries keep."""
    reserved_bytes: int | None = None
    """What the allocator had taken from the device at the peak; None on a CPU."""
    fragmentation_bytes: int | None = None
    """Reserved and not allocated, at the peak."""
    notes: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    """Every block; not part of the JSON."""

    @property
    def step_peak_bytes(self) -> int:
        """The peak without what is none of the step's; what a prediction is compared with."""
        return self.peak_bytes - self.elsewhere_bytes

    def of_step(self) -> MemoryProfile:
        """The same without what is none of the step's: then one figure is the peak, measured, predicted and promised."""
        if not self.elsewhere_bytes:
            return self
        mine = [block for block in self.blocks if not block.foreign]
        made = assemble(mine, self.num_instants, self.phases, system=self.system, device=self.device, notes=self.notes)
        return dataclasses.replace(
            made, reserved_bytes=self.reserved_bytes, fragmentation_bytes=self.fragmentation_bytes
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the blocks."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "blocks"}
        fields["phases"] = [dataclasses.asdict(phase) for phase in self.phases]
        fields["top"] = [dataclasses.asdict(held) for held in self.top]
        fields["timeline"] = [[instant, split] for instant, split in self.timeline]
        return fields | {"notes": list(self.notes), "icicle": icicle(self.modules)}


def assemble(
    blocks: Sequence[Block],
    num_instants: int,
    phases: Iterable[Phase],
    *,
    system: str,
    device: str,
    reserved: Mapping[int, int] | None = None,
    elsewhere_bytes: int = 0,
    notes: Iterable[str] = (),
) -> MemoryProfile:
    """The profile of a list of blocks over `num_instants` instants; `reserved`: instant -> bytes, where it changed."""
    split = _bytes_over_time(blocks, num_instants)
    total = split.sum(axis=0)
    peak = int(total.argmax())
    alive = [block for block in blocks if block.alive(peak)]
    held = sorted(alive, key=lambda block: -block.bytes)[:HELD]
    modules: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    saved: dict[str, int] = defaultdict(int)
    for block in alive:
        modules[block.module][block.category] += block.bytes
        if block.category == SAVED:
            saved[block.why.partition(" in ")[0] or block.operator] += block.bytes
    taken = _latest(reserved, peak) if reserved is not None else None
    return MemoryProfile(
        system=system, device=device, peak_bytes=int(total[peak]), peak_instant=peak, num_instants=num_instants,
        at_peak={name: int(split[row, peak]) for row, name in enumerate(CATEGORIES)},
        phases=tuple(
            dataclasses.replace(phase, peak_bytes=int(total[phase.start : phase.end].max()))
            for phase in phases if phase.end > phase.start
        ),
        timeline=_thinned(split, total), top=tuple(_held(block) for block in held),
        modules={path: dict(found) for path, found in sorted(modules.items())},
        saved_by_operator=dict(sorted(saved.items(), key=lambda item: -item[1])), elsewhere_bytes=elsewhere_bytes,
        reserved_bytes=taken, fragmentation_bytes=None if taken is None else taken - int(total[peak]),
        notes=tuple(notes), blocks=tuple(blocks),
    )  # fmt: skip


def peak_if(
    profile: MemoryProfile, size: Callable[[Block], int], *, drop_idle: Callable[[Block], bool] | None = None
) -> int:
    """The peak if blocks had other sizes, or were absent between their forward and backward uses."""
    changes = np.zeros(profile.num_instants + 1, dtype=np.int64)
    for block in profile.blocks:
        count = size(block)
        end = profile.num_instants if block.died is None else block.died
        changes[block.born] += count
        changes[end] -= count
        if block.idle is not None and drop_idle is not None and drop_idle(block):
            changes[block.idle[0]] -= count
            changes[block.idle[1]] += count
    return int(changes[:-1].cumsum().max())


def icicle(modules: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """A tree of module paths: {name, bytes with children, split of its own, children}. Children that are alike - integer
    names, equal bytes throughout - fold into one with `count`."""
    root: dict[str, Any] = {"name": "", "own": {}, "children": {}}
    for path, split in modules.items():
        place = root
        for part in path.split(".") if path else ():
            place = place["children"].setdefault(part, {"name": part, "own": {}, "children": {}})
        place["own"] = dict(split)
    return _closed(root)


def _closed(place: dict[str, Any]) -> dict[str, Any]:
    children = [_closed(child) for child in place["children"].values()]
    total = sum(place["own"].values()) + sum(child["bytes"] for child in children)
    folded: list[dict[str, Any]] = []
    alike: dict[str, dict[str, Any]] = {}
    for child in children:
        key = repr((child["own"], child["children"]))
        if child["name"].isdigit() and key in alike:
            first = alike[key]
            first["names"].append(child["name"])
            first["count"] += 1
            first["bytes"] += child["bytes"]
        else:
            if child["name"].isdigit():
                alike[key] = child
            folded.append(child)
    return {
        "name": place["name"], "names": [place["name"]], "count": 1, "bytes": total, "own": place["own"], "children": folded,
    }  # fmt: skip


def _bytes_over_time(blocks: Sequence[Block], num_instants: int) -> np.ndarray:
    changes = np.zeros((len(CATEGORIES), num_instants + 1), dtype=np.int64)
    rows = {name: row for row, name in enumerate(CATEGORIES)}
    for block in blocks:
        row = rows[block.category]
        changes[row, block.born] += block.bytes
        changes[row, num_instants if block.died is None else block.died] -= block.bytes
    return changes[:, :-1].cumsum(axis=1)


def _thinned(split: np.ndarray, total: np.ndarray) -> tuple[tuple[int, dict[str, int]], ...]:
    """At most POINTS instants: of each stretch the one with the most bytes."""
    count = total.shape[0]
    edges = np.linspace(0, count, min(POINTS, count) + 1).astype(int)
    kept = sorted({int(low + total[low:high].argmax()) for low, high in itertools.pairwise(edges)})
    return tuple(
        (instant, {name: int(split[row, instant]) for row, name in enumerate(CATEGORIES) if split[row, instant]})
        for instant in kept
    )


def _latest(values: Mapping[int, int], instant: int) -> int | None:
    known = [key for key in values if key <= instant]
    return values[max(known)] if known else None


def _held(block: Block) -> Held:
    return Held(**{field.name: getattr(block, field.name) for field in dataclasses.fields(Held)})
