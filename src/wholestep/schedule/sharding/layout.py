"""Layouts: how one value of the model lies on the ranks of a mesh axis, and what shapes make of a cut.

`WHOLE`: the same on every rank. `Cut`: every rank has its part of one dimension. `PARTIAL`: the value is the sum of what the ranks
have. The gradient of a value lies as the value does: that of a whole one is the same on every rank (and so is that of a partial
one, by the rule of sums), that of a cut one is cut. Every rule of `rules/` keeps it so; where ranks use a whole value differently,
it goes through `ws::enter`, which sums the gradients up.

A dimension is cut block by block: sizes (16, 16, 16) over two ranks are three blocks (q, k, v side by side) of which every rank has
half of each. A flattened dimension has many equal blocks, so a pattern of sizes is kept with a number of repetitions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from wholestep.graph import mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Whole:
    """The same on every rank."""

    def __str__(self) -> str:
        return "whole"


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """The sum over ranks is still due."""

    def __str__(self) -> str:
        return "a partial sum"


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """One dimension is divided: `sizes`, repeated `times`, are its blocks, and every rank has an equal part of every block."""

    dim: int
    sizes: tuple[int, ...]
    times: int = 1

    @property
    def size(self) -> int:
        return sum(self.sizes) * self.times

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.sizes * self.times

    @property
    def plain(self) -> bool:
        return self.times == 1 and len(self.sizes) == 1

    def at(self, dim: int) -> Cut:
        """The same of another dimension."""
        return dataclasses.replace(self, dim=dim)

    def like(self, other: Cut) -> bool:
        """Whether the two dimensions are cut in the same way."""
        return (self.sizes, self.times) == (other.sizes, other.times)

    def divides(self, parts: int) -> bool:
        return all(size % parts == 0 for size in self.sizes)

    def fact(self, axis: str) -> list[Any]:
        """As `graph/mesh.py` keeps it in the facts of a node."""
        return mesh.Cut(self.dim, axis, self.sizes, self.times).fact()

    def __str__(self) -> str:
        inner = "" if self.plain else f" in {len(self.sizes) * self.times} blocks"
        return f"cut along dimension {self.dim}{inner}"


Layout: TypeAlias = Whole | Partial | Cut
WHOLE, PARTIAL = Whole(), Partial()


def parameter_cut(how: mesh.Cut, shape: Sequence[int]) -> Cut:
    """The layout of a parameter."""
    dim = how.dim % len(shape)
    return cut_of(dim, how.sizes or (shape[dim],), how.times)


def cut_of(dim: int, blocks: Iterable[int], times: int = 1) -> Cut:
    """The shortest pattern of sizes for these blocks."""
    sizes = tuple(blocks)
    for length in range(1, len(sizes)):
        if len(sizes) % length == 0 and sizes[:length] * (len(sizes) // length) == sizes:
            return Cut(dim, sizes[:length], times * (len(sizes) // length))
    return Cut(dim, sizes, times)


def reshaped(cut: Cut, before: Sequence[int], after: Sequence[int], parts: int) -> Cut | None:
    """Where the cut is when a value of one shape takes another; None where the ranks' parts do not stay together."""
    for dims, news in _groups(before, after):
        if cut.dim not in dims:
            continue
        outer = math.prod(before[d] for d in dims if d < cut.dim)
        inner = math.prod(before[d] for d in dims if d > cut.dim)
        flat = Cut(0, tuple(size * inner for size in cut.sizes), cut.times * outer)
        for new in news:
            ahead = math.prod(after[d] for d in news if d < new)
            behind = math.prod(after[d] for d in news if d > new)
            if flat.times % ahead == 0 and all(size % (behind * parts) == 0 for size in flat.sizes):
                return Cut(new, tuple(size // behind for size in flat.sizes), flat.times // ahead)
    return None


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of two shapes that hold the same elements, as short as possible."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        dims, news, left, right = [i], [j], before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                if i == len(before):
                    return found
                left, i = left * before[i], i + 1
                dims.append(i - 1)
            else:
                if j == len(after):
                    return found
                right, j = right * after[j], j + 1
                news.append(j - 1)
        found.append((dims, news))
    return found


def wanted_blocks(cut: Cut, before: Sequence[int], after: Sequence[int], parts: int) -> tuple[int, list[int]] | None:
    """In how many blocks a dimension would have to be cut to be followed into another shape, `(3 * d) -> (3, heads, width)`: 3; and
    the dimensions of that shape that lie behind the blocks."""
    for dims, news in _groups(before, after):
        if dims != [cut.dim]:
            continue
        for new in news:
            ahead = math.prod(after[d] for d in news if d < new)
            if after[new] % parts == 0 and ahead > 1:
                return ahead, [d for d in news if d >= new]
    return None


def picked(cut: Cut, start: int, stop: int) -> Cut | None:
    """The cut of a slice of the dimension that is cut; None where a block is not taken as a whole."""
    edges = _edges(cut.blocks)
    if start not in edges or stop not in edges or start >= stop:
        return None
    return cut_of(cut.dim, cut.blocks[edges.index(start) : edges.index(stop)])


def refined(cut: Cut, edges: Iterable[int]) -> tuple[int, ...]:
    """Blocks that have these edges too."""
    every = sorted({*_edges(cut.blocks), *edges})
    return tuple(b - a for a, b in itertools.pairwise(every))


def _edges(blocks: Sequence[int]) -> list[int]:
    edges = [0]
    for size in blocks:
        edges.append(edges[-1] + size)
    return edges


def joined(dim: int, cuts: Sequence[Cut]) -> Cut:
    """Side by side along the dimension that is cut."""
    return cut_of(dim, [size for cut in cuts for size in cut.blocks])
