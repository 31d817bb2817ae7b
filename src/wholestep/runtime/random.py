"""One seed for a step's random numbers: the keys of its sites, and torch's CUDA generator for kernels that draw from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from wholestep.ops.random_bits import base_key, site_keys


def keys_for(seed: int, step: int, micro: int, count: int) -> torch.Tensor:
    """int64 [count]: the key of every site, on the CPU."""
    return site_keys(seed, step, micro, count)


@contextlib.contextmanager
def seeded_generator(device: torch.device, seed: int, step: int, micro: int) -> Iterator[None]:
    """CUDA attention draws its dropout from torch's generator: seed it by (seed, step, micro), then put it back."""
    if device.type != "cuda":
        yield
        return
    generator = torch.cuda.default_generators[device.index or 0]
    kept_seed, kept_offset = generator.initial_seed(), generator.get_offset()
    generator.manual_seed(base_key(seed, step, micro) & (2**63 - 1))
    try:
        yield
    finally:
        generator.manual_seed(kept_seed)
        generator.set_offset(kept_offset)


def chosen_seed(seed: int | None) -> int:
    """The one that was asked for, or torch's."""
    return torch.initial_seed() & (2**63 - 1) if seed is None else seed
