"""Two graphs of one step, run once on the same random inputs: what they return, and what they leave in those."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.lower import lower_interpret


def assert_trains_alike(plain: Any, rewritten: Any, *, rtol: float, atol: float) -> None:
    given = [_drawn(node.meta["val"]) for node in plain.placeholders]
    results = []
    for graph in (plain, rewritten):
        inputs = [value.clone() for value in given]
        results.append((lower_interpret(graph)(inputs), inputs))
    torch.testing.assert_close(results[0], results[1], rtol=rtol, atol=atol)


def _drawn(value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point():
        return torch.randn(value.shape).to(value.dtype)
    return torch.randint(0, 100, value.shape, dtype=value.dtype)
