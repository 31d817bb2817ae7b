"""What a function that nobody traces reads of its surroundings."""

from __future__ import annotations

from typing import Any

import torch

from wholestep.capture.front.unguardable import what_it_reads

t = [1.0]
"""A name that tensors have a method of."""


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * t[0]


def scaled_inside(x: torch.Tensor) -> Any:
    return (lambda y: y * t[0])(x)


def scaled_in_a_list(x: torch.Tensor) -> Any:
    return [row * t[0] for row in x]


def scaled_by_another(x: torch.Tensor) -> Any:
    return [scaled(row) for row in x]


def test_variables_are_found_wherever_they_are_read() -> None:
    assert what_it_reads(turned) is None
    for function in (scaled, scaled_inside, scaled_in_a_list, scaled_by_another):
        assert what_it_reads(function) == "t", function
