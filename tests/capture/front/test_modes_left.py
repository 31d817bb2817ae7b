"""A graph that fails between two of its lines leaves no mode switched on."""

from __future__ import annotations

import contextlib

import torch
from torch._C import _functorch as levels

from wholestep.capture.front.modes_left import modes_put_back


def test_modes_are_put_back() -> None:
    with contextlib.suppress(ValueError), modes_put_back():
        torch.set_grad_enabled(False)
        levels._vmap_increment_nesting(2, "error")
        raise ValueError
    assert torch.is_grad_enabled()
    assert levels.get_dynamic_layer_stack_depth() == 0
