"""Random sites: every dropout and every random number of a step is drawn from a key that the step owns.

A site is the n-th random call of the forward. Its key is a function of (seed, step, micro-batch, site), an input of the
graph; so a value can be recomputed, replayed or checked against eager and always gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wholestep import compat
from wholestep.errors import BadOption
from wholestep.graph.mesh import FORKED, LAYOUT, PARTIAL, Mesh
from wholestep.ops import random_bits


class TooFewKeys(Exception):
    """A run draws more random numbers than it was given keys for."""


class Sites:
    """Hands out the keys of one run of the forward, in call order."""

    def __init__(self, keys: Sequence[torch.Tensor] = (), mesh: Mesh | None = None) -> None:
        """`mesh`: of the ranks for which a step is traced; a value that is cut gets the bits that it has in the whole."""
        self.keys, self.mesh = keys, mesh or Mesh()
        self.used = 0
        self.assumed: list[tuple[torch.Tensor, str | None]] = []
        """What eager would look at before it draws, as 0-d bools, and at which line; on tensors without data."""

    def assume(self, valid: torch.Tensor, otherwise: str) -> None:
        """What is drawn from has to be valid: asked at once where there is data, else by the captured step."""
        if compat.is_fake(valid):
            self.assumed.append((valid, compat.noted_source()))
        elif not bool(valid):
            raise RuntimeError(otherwise)

    def next_key(self, device: torch.device | None = None, shape: Sequence[int] | None = None) -> torch.Tensor:
        """For numbers of this shape; None for draws that are not a function of their place in it."""
        index = self.used
        self.used += 1
        if index >= len(self.keys):
            raise TooFewKeys(f"random site {index} is beyond the {len(self.keys)} keys there are")
        key = self.keys[index]
        return self._of_rank(key if device is None or key.device == device else key.to(device), shape)

    def _of_rank(self, key: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
        """The key of one rank, where ranks do not all draw the same."""
        layout, forked = compat.noted(LAYOUT), compat.noted(FORKED)
        if forked is not None and self.mesh.size(forked) > 1:
            if layout is None or layout[1] != forked:
                hint = "take fork_rng out, or shard what it draws for"
                raise BadOption(
                    f"fork_rng: a value that is the same along {forked!r} would differ", where=_where(), hint=hint
                )
            return random_bits.forked_key(key, self._rank(forked, key.device))
        if layout is None:
            return key
        dim, axis, sizes, times = (*layout, (), 1)[:4]
        if shape is None or dim == PARTIAL or len(sizes) > 1:
            hint = "shard something else, or leave this module whole"
            raise BadOption("random numbers of this kind cannot be drawn in parts", where=_where(), hint=hint)
        parts = self.mesh.size(axis)
        split = [*shape[:dim], times, shape[dim] // times, *shape[dim + 1 :]]
        return random_bits.part_key(key, split, dim + 1, parts, self._rank(axis, key.device))

    def _rank(self, axis: str, device: torch.device) -> torch.Tensor:
        return torch.ops.ws.axis_index(axis, self.mesh.size(axis), device)


def _where() -> str | None:
    return compat.noted("module") or compat.noted_source()
