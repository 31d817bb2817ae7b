"""A graph that fails between two of its lines leaves no mode switched on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _functorch as levels

import wholestep
from wholestep.capture.front.modes_left import default_dtype_put_back, modes_put_back
from wholestep.errors import CaptureRefused


def test_modes_are_put_back() -> None:
    with contextlib.suppress(ValueError), modes_put_back():
        torch.set_grad_enabled(False)
        levels._vmap_increment_nesting(2, "error")
        raise ValueError
    assert torch.is_grad_enabled()
    assert levels.get_dynamic_layer_stack_depth() == 0


def test_a_default_dtype_that_is_left_behind_is_refused_and_put_back() -> None:
    before = torch.get_default_dtype()
    with pytest.raises(CaptureRefused, match="default dtype"), default_dtype_put_back():
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == before


@pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
def test_so_are_function_modes_after_a_guard_that_cannot_be_asked() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(
        model,
        lambda m, x: m(x).square().mean(),
        optimizer,
        torch.ones(2, 4),
        backend="interpret",
        cache=False,
        verbose=False,
    )
    step(torch.ones(2, 4))
    setattr(model, "1", nn.Linear(4, 1, bias=False))
    step(torch.ones(2, 4))
    assert torch._C._is_torch_function_enabled()


@pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
@pytest.mark.parametrize(
    "curvature",
    [
        lambda f: torch.func.vmap(torch.func.hessian(f)),
        lambda f: lambda x: torch.stack([torch.func.hessian(f)(r) for r in x]),
    ],
    ids=["mapped", "stacked"],
)
def test_so_is_the_dispatcher_after_derivatives_that_cannot_be_traced(curvature: Any) -> None:
    model, batch = nn.Linear(3, 1), torch.randn(2, 3)
    loss_fn = lambda m, b: curvature(lambda x: m(x).square().sum())(b).square().mean()  # noqa: E731
    excluded = torch._C._dispatch_tls_local_exclude_set().raw_repr()
    step = wholestep.compile(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), lr=0.1),
        batch,
        backend="interpret",
        cache=False,
        check="off",
    )
    assert torch._C._dispatch_tls_local_exclude_set().raw_repr() == excluded
    with torch.autograd.graph.save_on_cpu():  # may be entered
        pass
    expected = loss_fn(model, batch)
    assert torch.equal(step(batch), expected.detach())
    assert "torch.func.hessian" in step.explain()
