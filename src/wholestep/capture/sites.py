"""Random sites: every dropout and every random number of a step is drawn from a key that the step owns.

A site is the n-th random call of the forward. Its key is a function of (seed, step, micro-batch, site), an input of the
graph; so a value can be recomputed, replayed or checked against eager and always gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Sites:
    """Hands out the keys of one run of the forward, in call order.

    With one `stand_in` instead of `keys` it only counts (the rehearsal).
    """

    def __init__(self, keys: Sequence[torch.Tensor] = (), *, stand_in: torch.Tensor | None = None) -> None:
        self.keys, self.stand_in = keys, stand_in
        self.used = 0

    def next_key(self, device: torch.device | None = None) -> torch.Tensor:
        index = self.used
        self.used += 1
        if self.stand_in is None and index >= len(self.keys):
            raise IndexError(f"random site {index} is new: the forward drew {len(self.keys)} times before")
        key = self.keys[index] if self.stand_in is None else self.stand_in
        return key if device is None or key.device == device else key.to(device)
