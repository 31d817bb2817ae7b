"""Random sites: every dropout and every random number of a step is drawn from a key that the step owns.

A site is the n-th random call of the forward. Its key is a function of (seed, step, micro-batch, site), an input of the
graph; so a value can be recomputed, replayed or checked against eager and always gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from wholestep import compat


class TooFewKeys(Exception):
    """A run draws more random numbers than it was given keys for."""


class Sites:
    """Hands out the keys of one run of the forward, in call order."""

    def __init__(self, keys: Sequence[torch.Tensor] = ()) -> None:
        self.keys = keys
        self.used = 0
        self.assumed: list[tuple[torch.Tensor, str | None]] = []
        """What eager would look at before it draws, as 0-d bools, and at which line; on tensors without data."""

    def assume(self, valid: torch.Tensor, otherwise: str) -> None:
        """What is drawn from has to be valid: asked at once where there is data, else by the captured step."""
        if compat.is_fake(valid):
            self.assumed.append((valid, compat.noted_source()))
        elif not bool(valid):
            raise RuntimeError(otherwise)

    def next_key(self, device: torch.device | None = None) -> torch.Tensor:
        index = self.used
        self.used += 1
        if index >= len(self.keys):
            raise TooFewKeys(f"random site {index} is beyond the {len(self.keys)} keys there are")
        key = self.keys[index]
        return key if device is None or key.device == device else key.to(device)
