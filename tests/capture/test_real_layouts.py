"""Results of operators without data lie in memory as those of the kernels do, and what autograd makes of that trains right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import wholestep
import wholestep.capture.front  # which installs the rules
from wholestep.capture.real_layouts import ORDERS

aten = torch.ops.aten
LAYOUTS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda *shape: torch.rand(*shape),
    "last two swapped": lambda *shape: torch.rand(*shape[:-2], shape[-1], shape[-2]).mT,
    "first is last": lambda *shape: torch.rand(*shape[1:], shape[0]).movedim(-1, 0),
    "channels last": lambda *shape: torch.rand(shape[0], *shape[2:], shape[1]).movedim(-1, 1),
}


def calls(x: Tensor, grad: Tensor) -> dict[Any, tuple[Any, ...]]:
    """Arguments for every operator that has a rule."""
    zeros, ones, target = torch.zeros(x.size(1)), torch.ones(x.size(1)), torch.rand(x.shape)
    norm, kept = (x, None, None, zeros, ones, True, 0.1, 1e-5), torch.rand(*x.shape[:-1], 1)
    return {
        aten.mse_loss_backward.default: (grad, x, target, 1),
        aten.smooth_l1_loss_backward.default: (grad, x, target, 1, 1.0),
        aten.huber_loss_backward.default: (grad, x, target, 1, 1.0),
        aten.binary_cross_entropy_backward.default: (grad, x, target, None, 1),
        aten._log_softmax_backward_data.default: (grad, x, 1, torch.float32),
        aten.native_layer_norm_backward.default: (grad, x, [x.size(-1)], kept, kept, None, None, [True, False, False]),
        aten.native_batch_norm.default: norm,
        aten._native_batch_norm_legit.default: norm,
        aten._native_batch_norm_legit.no_stats: (x, None, None, True, 0.1, 1e-5),
        aten._native_batch_norm_legit_functional.default: norm,
        aten._native_batch_norm_legit_no_training.default: (*norm[:5], 0.1, 1e-5),
        aten.native_batch_norm_backward.default: (
            grad, x, None, zeros, ones, zeros, ones, True, 1e-5, [True, True, True],
        ),
        aten.log_sigmoid_forward.default: (x,),
        aten.elu_backward.default: (grad, 1.0, 1.0, 1.0, False, x),
        aten.hardtanh_backward.default: (grad, x, -1, 1),
        aten.native_dropout_backward.default: (grad, x > 0.5, 2.0),
        aten.xlogy.Tensor: (grad, x),
        aten.pow.Scalar: (2, x),
        aten.softplus_backward.default: (grad, x, 1, 20),
        aten.logit_backward.default: (grad, x, 1e-6),
        aten.hardswish_backward.default: (grad, x),
        aten.hardsigmoid_backward.default: (grad, x),
    }  # fmt: skip


def strides(value: Tensor) -> list[int]:
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


@pytest.mark.parametrize("operator", ORDERS, ids=str)
def test_a_result_without_data_lies_as_the_kernels_does(operator: Any) -> None:
    for shape in ((3, 4), (3, 4, 5), (2, 4, 3, 5)):
        for x in LAYOUTS.values():
            for grad in LAYOUTS.values():
                arguments = calls(x(*shape), grad(*shape))[operator]
                with FakeTensorMode() as mode:
                    without = operator(
                        *tree_map(lambda v: mode.from_tensor(v) if isinstance(v, Tensor) else v, arguments)
                    )
                real, fake = (
                    [v for v in tree_leaves(r) if isinstance(v, Tensor)] for r in (operator(*arguments), without)
                )
                assert [strides(v) for v in real] == [strides(v) for v in fake], shape
                assert [(v.shape, v.dtype) for v in real] == [(v.shape, v.dtype) for v in fake]


def test_every_rule_is_tried() -> None:
    assert set(calls(torch.rand(2, 3), torch.rand(2, 3))) == set(ORDERS)


def complex_pairs(y: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(y.contiguous().reshape(*y.shape[:-1], -1, 2)) * 2j).flatten(-2)


class Turned(nn.Module):
    """Norms over channels of a sequence of tokens: `first` and `then` on their two sides."""

    def __init__(self, norm: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.norm, self.then = nn.Linear(6, 6), norm, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.norm(self.inner(x).mT).mT)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda y: F.mse_loss(y, torch.ones_like(y)),
    "huber": lambda y: F.huber_loss(y, torch.ones_like(y)),
    "elu": lambda y: (F.elu(y) * torch.arange(float(y.numel())).view(y.shape)).mean(),
    "hardswish": lambda y: (F.hardswish(y) * torch.arange(float(y.numel())).view(y.shape)).mean(),
}
THEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda y: y,
    "complex": complex_pairs,
    "by memory": lambda y: y.contiguous().as_strided((4, 30), (30, 1)),
}


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "norm", [lambda: nn.GroupNorm(2, 6, affine=False), lambda: nn.BatchNorm1d(6)], ids=["group", "batch"]
)
def test_gradients_through_turned_norms_are_those_of_eager(norm: Callable[[], nn.Module], loss: str, then: str) -> None:
    """Kernels of group norms, views and as_strided take the order of a gradient on trust, and autograd's copy may be left out."""
    torch.manual_seed(0)
    model, batch = Turned(norm(), THEN[then]), torch.randn(4, 5, 6)
    found = []
    for step in (None, wholestep):
        for parameter in model.parameters():
            parameter.grad = None
        if step is None:
            LOSSES[loss](model(batch)).backward()
        else:
            made = step.compile(
                model, lambda m, b: LOSSES[loss](m(b)), None, batch, backend="interpret", check="off", cache=False
            )
            made(batch)
            assert made.rung == "whole step"
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    size = math.sqrt(sum(float(g.square().sum()) for g in found[0]))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5 * size)
