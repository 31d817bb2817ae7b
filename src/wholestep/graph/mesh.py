"""Mesh: how many ranks run one step, by what they divide among themselves. Plain data: no device and no process is behind it.

`dp` ranks take other rows of the batch, `tp` ranks other parts of cut parameters, `pp` ranks other layers. A graph names an axis
and never a process group, so that it can be cached, printed, planned and run side by side anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from wholestep.errors import BadOption

AXES = ("dp", "tp", "pp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """`Mesh(tp=4)`: four ranks that divide parameters."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise BadOption(f"Mesh({axis}={size!r})", hint="the size of an axis is a whole number of at least 1")

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        if axis not in AXES:
            raise BadOption(f"a mesh has no axis {axis!r}", hint=f"axes are {', '.join(AXES)}")
        return int(getattr(self, axis))

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis; ranks that differ in `tp` alone are neighbours."""
        return {"dp": rank // (self.tp * self.pp), "pp": rank // self.tp % self.pp, "tp": rank % self.tp}

    def groups(self, axis: str) -> Iterator[list[int]]:
        """The ranks that differ in this axis alone, each group in the order of its coordinates."""
        others = [name for name in AXES if name != axis]
        for fixed in itertools.product(*(range(self.size(name)) for name in others)):
            wanted = dict(zip(others, fixed))
            ranks = [r for r in range(self.num_ranks) if wanted.items() <= self.coordinates(r).items()]
            yield sorted(ranks, key=lambda rank: self.coordinates(rank)[axis])

    def __str__(self) -> str:
        given = [f"{axis}={self.size(axis)}" for axis in AXES if self.size(axis) > 1]
        return f"Mesh({', '.join(given)})"
