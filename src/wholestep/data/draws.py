"""Random numbers as a pure function of (seed, number, purpose): the reason why one integer is the position in the data.

No generator lives from batch to batch, so batch 1000 can be made without the 999 before it, and a resumed run draws what an
uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib

import torch


def generator_for(seed: int, number: int, purpose: str) -> torch.Generator:
    """A CPU generator that depends on its arguments alone; other arguments give unrelated numbers."""
    digest = hashlib.blake2b(f"{seed}/{number}/{purpose}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
