"""A graph that fails between two of its lines leaves no mode switched on."""

from __future__ import annotations

import contextlib

import torch
from torch._C import _functorch as levels

from wholestep.capture.front.modes_left import modes_put_back


def test_modes_are_put_back() -> None:
    entered = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    with contextlib.suppress(ValueError), modes_put_back():
        torch.set_grad_enabled(False)
        torch.autocast("cpu", torch.float16).__enter__()
        levels._vmap_increment_nesting(2, "error")
        raise ValueError
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
    assert levels.get_dynamic_layer_stack_depth() == 0
    assert torch.autocast_increment_nesting() == entered
    torch.autocast_decrement_nesting()
