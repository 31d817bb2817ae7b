"""Code that Dynamo calls and does not look into: operators of one's own and their derivatives, functions put into the graph."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, train

case, more = cases_of("opaque")

SETTINGS = types.SimpleNamespace(forward=1.0, backward=1.0)
LIBRARY = "wholestep_trust"


def reset() -> None:
    SETTINGS.forward = SETTINGS.backward = 1.0


@torch.library.custom_op(f"{LIBRARY}::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.forward


@scaled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def scaled_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad * SETTINGS.backward


scaled.register_autograd(scaled_backward)


@torch.library.custom_op(f"{LIBRARY}::count_up", mutates_args=("total",))
def count_up(total: torch.Tensor) -> None:
    total += SETTINGS.forward


@torch.library.custom_op(f"{LIBRARY}::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0 * SETTINGS.forward


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def doubled_backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad * 2.0


doubled.register_autograd(doubled_backward)


def through_doubled(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model.b(doubled(torch.tanh(model.a(batch[0])))), batch[1])


def through_scaled(model: Any, batch: Any) -> torch.Tensor:
    return F.mse_loss(model.b(scaled(torch.tanh(model.a(batch[0])))), batch[1])


@case
def operator_that_reads_a_setting() -> Made:
    """It is called at every step; only its derivative is traced, once."""
    return train(through_doubled, at(3, setattr, SETTINGS, "forward", 0.1), cleanup=reset)


@case
def derivative_that_reads_a_setting() -> Made:
    return train(through_scaled, at(3, setattr, SETTINGS, "backward", 0.1), cleanup=reset)


@more
def operator_that_counts_in_a_buffer() -> Made:
    model = Net()
    model.register_buffer("total", torch.zeros(3))

    def loss(m: Any, b: Any) -> torch.Tensor:
        count_up(m.total)
        return F.mse_loss(m(b[0]) + 0.1 * m.total, b[1])

    return train(loss, at(3, setattr, SETTINGS, "forward", 0.1), model=model, cleanup=reset)


@case
def derivative_registered_again() -> Made:
    def other(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.1

    restore = lambda: doubled.register_autograd(doubled_backward)  # noqa: E731
    return train(through_doubled, at(3, lambda: doubled.register_autograd(other)), cleanup=restore)


@case
def cached_derivative_of_an_operator(earlier: bool) -> Made:
    doubled.register_autograd((lambda ctx, grad: grad * 1.0) if earlier else (lambda ctx, grad: grad * 0.1))
    restore = lambda: doubled.register_autograd(doubled_backward)  # noqa: E731
    return train(through_doubled, cleanup=restore)


@torch.compiler.allow_in_graph
def allowed(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.forward


@case
def function_allowed_in_the_graph() -> Made:
    return train(lambda m, b: allowed(mse(m, b)), at(3, setattr, SETTINGS, "forward", 0.1), cleanup=reset)


@case
def cached_function_allowed_in_the_graph(earlier: bool) -> Made:
    """The same bytes of code with another constant."""
    inner = torch.compiler.allow_in_graph((lambda x: x * 1.0) if earlier else (lambda x: x * 0.1))
    return train(lambda m, b: inner(mse(m, b)))


@torch._dynamo.nonstrict_trace
def loosely(x: torch.Tensor) -> torch.Tensor:
    return x * SETTINGS.forward


@case
def function_traced_loosely() -> Made:
    return train(lambda m, b: loosely(mse(m, b)), at(3, setattr, SETTINGS, "forward", 0.1), cleanup=reset)


class Scale(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = Scale.factor
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.factor * Scale.factor


@more
def class_attribute_of_a_function_read_in_its_backward() -> Made:
    loss = lambda m, b: Scale.apply(mse(m, b))  # noqa: E731
    return train(loss, at(3, setattr, Scale, "factor", 0.1), cleanup=lambda: setattr(Scale, "factor", 1.0))


@more
def backward_of_a_function_replaced() -> Made:
    plain = Scale.__dict__["backward"]
    change = at(3, setattr, Scale, "backward", staticmethod(lambda ctx, grad: grad * 0.1))
    return train(lambda m, b: Scale.apply(mse(m, b)), change, cleanup=lambda: setattr(Scale, "backward", plain))


@more
def cached_backward_of_a_function(earlier: bool) -> Made:
    factor = 1.0 if earlier else 0.1

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * factor

    return train(lambda m, b: Inner.apply(mse(m, b)))


@more
def gradients_of_a_function_by_torch_func() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        inner = torch.func.grad(lambda x: (torch.tanh(m.a(x)) * SETTINGS.forward).sum())(b[0])
        return mse(m, b) + inner.square().mean()

    return train(loss, at(3, setattr, SETTINGS, "forward", 0.1), cleanup=reset)


@more
def functional_call_with_other_weights() -> Made:
    held: dict[str, torch.Tensor] = {}

    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = {name: p * 0.5 if name in held else p for name, p in m.named_parameters()}
        return F.mse_loss(torch.func.functional_call(m, weights, (b[0],)), b[1])

    return train(loss, at(3, held.__setitem__, "a.weight", torch.ones(())))


@more
def mapped_over_samples_with_a_setting() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        return torch.vmap(lambda x, y: F.mse_loss(m(x), y) * SETTINGS.forward)(b[0], b[1]).mean()

    return train(loss, at(3, setattr, SETTINGS, "forward", 0.1), cleanup=reset)
