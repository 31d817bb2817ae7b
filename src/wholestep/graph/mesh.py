"""Mesh: how many ranks run one step, by what they divide among themselves. Plain data: no device and no process is behind it.

`dp` ranks take other rows of the batch, `tp` ranks other parts of cut parameters, `pp` ranks other layers. A graph names an axis
and never a process group, so that it can be cached, printed, planned and run side by side anywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wholestep.errors import BadOption

if TYPE_CHECKING:
    import torch

AXES = ("dp", "tp", "pp")
LAYOUT = "layout"
"""In the facts of a node of the forward, where its value is not the same on every rank: `Cut.fact()` of one that is cut,
[PARTIAL, axis] of one that is a sum of which each rank has a part."""
PARTIAL = "partial"
RANKS = "ranks"
"""In the facts of a graph of a loss: the Ranks for which it was rewritten."""
FORKED = "forked"
"""In the facts of a node: the axis along which its random numbers have nothing to do with each other."""


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

    @classmethod
    def read(cls, text: str) -> Mesh:
        """From `tp=4` or `dp=2,tp=4`, as on the command line."""
        found: dict[str, int] = {}
        for part in text.split(","):
            axis, equals, size = part.strip().partition("=")
            if not equals or axis not in AXES or axis in found or not size.isdecimal():
                raise BadOption(f"mesh {text!r}", hint=f"write it as tp=4; axes are {', '.join(AXES)}")
            found[axis] = int(size)
        return cls(**found)

    def to_table(self) -> dict[str, int]:
        """The axes of several ranks."""
        return {axis: self.size(axis) for axis in AXES if self.size(axis) > 1}

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
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.to_table().items())})"


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """A tensor divided along one dimension among the ranks of an axis, block by block: each has an equal part of every block."""

    dim: int
    axis: str
    sizes: tuple[int, ...] = ()
    """Of the blocks, before they are divided: (16, 16, 16) for q, k and v side by side. Empty: the dimension is one block."""
    times: int = 1
    """How often the blocks are repeated along the dimension."""
    line: str = ""
    """Of the recipe that asked for it, for people."""

    def views(self, whole: torch.Tensor, rank: int, parts: int) -> list[torch.Tensor]:
        """A rank's part of every block, in the memory of the whole."""
        found, start = [], 0
        for size in (self.sizes or (whole.shape[self.dim],)) * self.times:
            own = size // parts
            found.append(whole.narrow(self.dim, start + rank * own, own))
            start += size
        return found

    def own(self, whole: torch.Tensor, rank: int, parts: int) -> torch.Tensor:
        """What one rank has, in memory of its own."""
        views = self.views(whole, rank, parts)
        if len(views) == 1:
            return views[0].clone()
        import torch  # plans and the command line read meshes without it

        return torch.cat(views, self.dim)

    def put(self, whole: torch.Tensor, rank: int, parts: int, own: torch.Tensor) -> None:
        """Write what one rank has into the whole."""
        views = self.views(whole, rank, parts)
        for view, piece in zip(views, own.split([view.shape[self.dim] for view in views], self.dim), strict=True):
            view.copy_(piece)

    def whole(self, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor that ranks have parts of."""
        shape = list(own[0].shape)
        shape[self.dim] *= len(own)
        found = own[0].new_empty(shape)
        for rank, part in enumerate(own):
            self.put(found, rank, len(own), part)
        return found

    def words(self) -> str:
        """`0 tp`, or `0 tp, blocks of 16 16 16`: as a plan has it."""
        blocks = f", blocks of {' '.join(map(str, self.sizes * self.times))}" if self.sizes else ""
        return f"{self.dim} {self.axis}{blocks}"

    def fact(self) -> list[Any]:
        return [self.dim, self.axis, list(self.sizes), self.times]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """Who runs a graph: the mesh, and which parameters are cut. The graph is the program of one rank, the same for all."""

    mesh: Mesh = Mesh()
    cuts: Mapping[str, Cut] = dataclasses.field(default_factory=dict)
    """Parameter -> how it is cut; its gradient and its optimizer state are cut like it. All others are the same on every rank."""

    @property
    def several(self) -> bool:
        return self.mesh.num_ranks > 1

    def local_shape(self, name: str, shape: Sequence[int]) -> list[int]:
        """What one rank has of a parameter."""
        found, cut = list(shape), self.cuts.get(name)
        if cut is not None:
            found[cut.dim] //= self.mesh.size(cut.axis)
        return found

    def to_json(self) -> list[Any]:
        cuts = [[name, *cut.fact(), cut.line] for name, cut in self.cuts.items()]
        return [dataclasses.asdict(self.mesh), cuts]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Ranks:
        mesh, cuts = data
        return cls(Mesh(**mesh), {name: Cut(dim, axis, tuple(sizes), *rest) for name, dim, axis, sizes, *rest in cuts})


ALONE = Ranks()
"""One rank, which has all."""


def fitting_parts(sizes: Iterable[int], parts: int) -> str:
    """A hint: the most ranks, below so many, among which all of these can be divided."""
    shared = math.gcd(*sizes)
    fitting = next(n for n in range(parts, 0, -1) if shared % n == 0)
    return f"{fitting} ranks would do" if fitting > 1 else "leave that parameter whole"
