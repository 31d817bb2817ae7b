"""Functions, methods and classes that the loss calls, replaced or rewritten between two steps."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, train
from torch import nn

case, more = cases_of("code changed")

Function = Callable[..., Any]


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def smaller(x: torch.Tensor, factor: float = 0.1) -> torch.Tensor:
    return x * factor


HELPER: Function = as_it_is


class Half(Net):
    """As Net, with half the output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


@case
def function_in_a_dictionary() -> Made:
    table = {"scale": as_it_is}
    return train(lambda m, b: table["scale"](mse(m, b)), at(3, table.update, scale=smaller))


@case
def function_in_the_closure() -> Made:
    scale: Function = as_it_is

    def change(i: int) -> None:
        nonlocal scale
        scale = as_it_is if i < 3 else smaller

    return train(lambda m, b: scale(mse(m, b)), change)


@more
def lambda_made_anew_every_step() -> Made:
    table = [as_it_is]
    return train(lambda m, b: table[0](mse(m, b)), lambda i: table.__setitem__(0, lambda x, k=1.0 / (i + 1): x * k))


@more
def function_of_a_module_replaced() -> Made:
    library = types.ModuleType("library")
    library.scale = as_it_is
    return train(lambda m, b: library.scale(mse(m, b)), at(3, setattr, library, "scale", smaller))


@case
def module_level_function_swapped() -> Made:
    cleanup = lambda: globals().update(HELPER=as_it_is)  # noqa: E731
    return train(lambda m, b: HELPER(mse(m, b)), at(3, globals().update, HELPER=smaller), cleanup=cleanup)


@case
def code_rebound() -> Made:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x

    def other(x: torch.Tensor) -> torch.Tensor:
        return 0.1 * x

    return train(lambda m, b: scale(mse(m, b)), at(3, setattr, scale, "__code__", other.__code__))


@more
def code_of_the_loss_rebound() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.mse_loss(m(b[0]), b[1])

    def other(m: Any, b: Any) -> torch.Tensor:
        return F.l1_loss(m(b[0]), b[1])

    return train(loss, at(3, setattr, loss, "__code__", other.__code__))


@case
def defaults_rebound() -> Made:
    def scale(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return x * factor

    return train(lambda m, b: scale(mse(m, b)), at(3, setattr, scale, "__defaults__", (0.1,)))


@more
def keyword_defaults_rebound() -> Made:
    def scale(x: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        return x * factor

    return train(lambda m, b: scale(mse(m, b)), at(3, setattr, scale, "__kwdefaults__", {"factor": 0.1}))


@more
def mutable_default_changes() -> Made:
    def loss(m: Any, b: Any, weights: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
        return mse(m, b) * weights[0]

    return train(loss, at(3, loss.__defaults__[0].__setitem__, 0, 0.1))


@case
def closure_cell_rebound() -> Made:
    factor = 1.0

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return train(lambda m, b: scale(mse(m, b)), at(3, setattr, scale.__closure__[0], "cell_contents", 0.1))


@more
def decorated_function() -> Made:
    options = {"factor": 1.0}

    def scaled(function: Function) -> Function:
        @functools.wraps(function)
        def inner(*args: Any) -> Any:
            return function(*args) * options["factor"]

        return inner

    return train(scaled(mse), at(3, options.update, factor=0.1))


@more
def single_dispatch_registered_later() -> Made:
    @functools.singledispatch
    def scale(by: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    return train(lambda m, b: scale(1, mse(m, b)), at(3, scale.register, int, lambda by, x: x * 0.1))


@more
def context_manager_with_state() -> Made:
    factor = [1.0]

    @contextlib.contextmanager
    def scale() -> Iterator[float]:
        yield factor[0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        with scale() as by:
            return mse(m, b) * by

    return train(loss, at(3, factor.__setitem__, 0, 0.1))


@case
def method_of_a_plain_class() -> Made:
    class Helper:
        def weight(self) -> float:
            return 1.0

    helper = Helper()
    return train(lambda m, b: mse(m, b) * helper.weight(), at(3, setattr, Helper, "weight", lambda self: 0.1))


@more
def method_of_a_parent_class() -> Made:
    class Parent:
        def weight(self) -> float:
            return 1.0

    helper = type("Child", (Parent,), {})()
    return train(lambda m, b: mse(m, b) * helper.weight(), at(3, setattr, Parent, "weight", lambda self: 0.1))


@more
def method_of_an_instance() -> Made:
    class Helper:
        def weight(self) -> float:
            return 1.0

    helper = Helper()
    return train(lambda m, b: mse(m, b) * helper.weight(), at(3, setattr, helper, "weight", lambda: 0.1))


@case
def method_overridden_in_the_child_class() -> Made:
    class Parent:
        def weight(self) -> float:
            return 1.0

    class Child(Parent):
        pass

    helper = Child()
    return train(lambda m, b: mse(m, b) * helper.weight(), at(3, setattr, Child, "weight", lambda self: 0.1))


@case
def static_and_class_methods() -> Made:
    class Helper:
        weight = staticmethod(lambda: 1.0)
        offset = classmethod(lambda cls: 0.0)

    def change(i: int) -> None:
        if i == 2:
            Helper.weight = staticmethod(lambda: 0.1)
        if i == 4:
            Helper.offset = classmethod(lambda cls: 0.9)

    return train(lambda m, b: mse(m, b) * (Helper.weight() + Helper.offset()), change)


@more
def property_of_a_class_replaced() -> Made:
    class Helper:
        weight = property(lambda self: 1.0)

    helper = Helper()
    return train(lambda m, b: mse(m, b) * helper.weight, at(3, setattr, Helper, "weight", property(lambda self: 0.1)))


@more
def call_of_a_class_replaced() -> Made:
    class Helper:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    helper = Helper()
    return train(lambda m, b: helper(mse(m, b)), at(3, setattr, Helper, "__call__", lambda self, x: x * 0.1))


@case
def operator_of_a_class_replaced() -> Made:
    class Helper:
        def __getitem__(self, key: str) -> float:
            return 1.0

    helper = Helper()
    change = at(3, setattr, Helper, "__getitem__", lambda self, key: 0.1)
    return train(lambda m, b: mse(m, b) * helper["weight"], change)


@more
def object_changes_its_class() -> Made:
    class One:
        weight = 1.0

    class Tenth:
        weight = 0.1

    helper = One()
    return train(lambda m, b: mse(m, b) * helper.weight, at(3, setattr, helper, "__class__", Tenth))


@case
def model_changes_its_class() -> Made:
    model = Net()
    return train(model=model, change=at(3, setattr, model, "__class__", Half))


@case
def mixin_added_to_a_class() -> Made:
    class Plain(nn.Module):
        def output(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Smaller(Plain):
        def output(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.1

    class Model(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.output(self.inner(x))

    return train(model=Model(), change=at(3, setattr, Model, "__bases__", (Smaller,)))


@case
def forward_patched_on_the_instance() -> Made:
    model = Net()
    forward = model.forward
    return train(model=model, change=at(3, setattr, model, "forward", lambda x: 0.1 * forward(x)))


@more
def forward_patch_taken_off() -> Made:
    model = Net()
    forward = model.forward
    model.forward = lambda x: 0.1 * forward(x)
    return train(model=model, change=at(3, delattr, model, "forward"))


@case
def forward_patched_on_a_child() -> Made:
    model = Net()
    change = at(3, setattr, model.a, "forward", types.MethodType(lambda self, x: F.linear(x, self.weight), model.a))
    return train(model=model, change=change)


@case
def forward_patched_on_the_class() -> Made:
    class Model(Net):
        forward = Net.forward

    return train(model=Model(), change=at(3, setattr, Model, "forward", lambda self, x: 0.1 * Net.forward(self, x)))


@case
def forward_of_every_linear_patched() -> Made:
    original = nn.Linear.forward
    change = at(3, setattr, nn.Linear, "forward", lambda self, x: 0.5 * original(self, x))
    return train(change=change, cleanup=lambda: setattr(nn.Linear, "forward", original))


@case
def call_of_a_model_class_patched() -> Made:
    class Model(Net):
        pass

    change = at(3, setattr, Model, "__call__", lambda self, x: 0.1 * nn.Module.__call__(self, x))
    return train(model=Model(), change=change)


@case
def functional_patched() -> Made:
    original = F.mse_loss
    change = at(3, setattr, F, "mse_loss", lambda *args, **options: 0.1 * original(*args, **options))
    return train(change=change, cleanup=lambda: setattr(F, "mse_loss", original))


@more
def torch_function_patched() -> Made:
    original = torch.tanh
    change = at(3, setattr, torch, "tanh", lambda x: torch.relu(x))
    return train(change=change, cleanup=lambda: setattr(torch, "tanh", original))


@case
def tensor_method_patched() -> Made:
    original = torch.Tensor.square
    change = at(3, setattr, torch.Tensor, "square", lambda self: self.abs())
    loss = lambda m, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    return train(loss, change, cleanup=lambda: setattr(torch.Tensor, "square", original))


@more
def helper_method_of_a_model_patched() -> Made:
    class Model(Net):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(super().forward(x))

    model = Model()
    return train(model=model, change=at(3, setattr, model, "scaled", smaller))


@case
def helper_method_of_a_model_class_patched() -> Made:
    class Model(Net):
        def scaled(self, x: torch.Tensor) -> torch.Tensor:
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scaled(super().forward(x))

    return train(model=Model(), change=at(3, setattr, Model, "scaled", lambda self, x: 0.1 * x))


@more
def activation_function_on_the_model() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.activation: Function = torch.tanh

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.activation(self.a(x)))

    model = Model()
    return train(model=model, change=at(3, setattr, model, "activation", F.gelu))


@case
def class_in_a_registry() -> Made:
    class Square:
        def __call__(self, e: torch.Tensor) -> torch.Tensor:
            return e.square().mean()

    class Absolute(Square):
        def __call__(self, e: torch.Tensor) -> torch.Tensor:
            return e.abs().mean()

    registry = {"loss": Square}
    return train(lambda m, b: registry["loss"]()(m(b[0]) - b[1]), at(3, registry.update, loss=Absolute))


@case
def custom_autograd_function_with_an_option() -> Made:
    options = {"backward": 1.0}

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * options["backward"]

    return train(lambda m, b: Scaled.apply(mse(m, b)), at(3, options.update, backward=0.1))
