"""What modules hold besides weights, changed in place: guards of modules are skipped where nothing seems to have changed."""

from __future__ import annotations

import collections
import enum
import functools
import types
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, train
from torch import nn

case, more = cases_of("held by modules")


def held(value: Any, read: Any, change: Any, **keywords: Any) -> Made:
    """The loss times `read(value)`, which layer `a` of the model holds; `change(value)` is called before step 3."""
    model = Net()
    model.a.held = value
    return train(lambda m, b: mse(m, b) * read(m.a.held), at(3, lambda: change(value)), model=model, **keywords)


class Attributed(dict):
    """Attributes are keys."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.__dict__ = self


class Tagged(dict):
    pass


class Number(float):
    pass


class Whole(int):
    pass


class Text(str):
    pass


class Several(tuple):
    pass


class Many(list):
    pass


class Unique(set):
    pass


class Pair(NamedTuple):
    one: Any
    two: Any


class Phase(enum.IntEnum):
    WARM = 1
    LATE = 2


class Named(str, enum.Enum):
    WARM = "warm"


def with_scale(value: Any) -> Any:
    value.scale = 1.0
    return value


def by_scale(value: Any) -> Any:
    return value.scale


def smaller(value: Any) -> None:
    value.scale = 0.1


@case
def nested_dictionary_of_attributes() -> Made:
    return held(Attributed(inner=Attributed(scale=1.0)), lambda v: v.inner.scale, lambda v: v.inner.update(scale=0.1))


@more
def nested_dictionary_of_attributes_three_deep() -> Made:
    value = Attributed(x=Attributed(y=Attributed(scale=1.0)))
    return held(value, lambda v: v.x.y.scale, lambda v: setattr(v.x.y, "scale", 0.1))


@case
def attribute_of_a_held_dictionary() -> Made:
    return held(with_scale(Tagged(a=1)), by_scale, smaller)


@case
def attribute_of_an_empty_dictionary() -> Made:
    return held(with_scale(Tagged()), by_scale, smaller)


@more
def object_in_an_attribute_of_an_empty_dictionary() -> Made:
    value = Tagged()
    value.inner = types.SimpleNamespace(scale=1.0)
    return held(value, lambda v: v.inner.scale, lambda v: setattr(v.inner, "scale", 0.1))


@more
def object_in_a_held_dictionary() -> Made:
    value = Tagged(inner=types.SimpleNamespace(scale=1.0))
    return held(value, lambda v: v["inner"].scale, lambda v: setattr(v["inner"], "scale", 0.1))


@more
def object_in_a_plain_dictionary() -> Made:
    value = {"inner": types.SimpleNamespace(scale=1.0)}
    return held(value, lambda v: v["inner"].scale, lambda v: setattr(v["inner"], "scale", 0.1))


@case
def attribute_of_a_held_number() -> Made:
    return held(with_scale(Number(2.0)), by_scale, smaller)


@more
def attribute_of_a_held_whole_number() -> Made:
    return held(with_scale(Whole(2)), by_scale, smaller)


@more
def attribute_of_a_held_text() -> Made:
    return held(with_scale(Text("a")), by_scale, smaller)


@case
def attribute_of_a_held_tuple() -> Made:
    return held(with_scale(Several((1, 2))), by_scale, smaller)


@more
def attribute_of_an_empty_tuple() -> Made:
    return held(with_scale(Several()), by_scale, smaller)


@more
def attribute_of_a_held_list() -> Made:
    return held(with_scale(Many([1])), by_scale, smaller)


@more
def attribute_of_a_held_set() -> Made:
    return held(with_scale(Unique({1})), by_scale, smaller)


@case
def attribute_of_a_member_of_an_enum() -> Made:
    cleanup = lambda: vars(Phase.WARM).pop("scale", None)  # noqa: E731
    return held(with_scale(Phase.WARM), by_scale, smaller, cleanup=cleanup)


@more
def attribute_of_a_member_of_an_enum_of_texts() -> Made:
    cleanup = lambda: vars(Named.WARM).pop("scale", None)  # noqa: E731
    return held(with_scale(Named.WARM), by_scale, smaller, cleanup=cleanup)


@more
def list_in_a_named_tuple() -> Made:
    return held(Pair([1.0], {"x": 1.0}), lambda v: v.one[0] * v.two["x"], lambda v: v.one.__setitem__(0, 0.1))


@more
def dictionary_in_a_named_tuple() -> Made:
    return held(Pair([1.0], {"x": 1.0}), lambda v: v.one[0] * v.two["x"], lambda v: v.two.update(x=0.1))


@more
def object_in_a_tuple() -> Made:
    value = (types.SimpleNamespace(scale=1.0), 2)
    return held(value, lambda v: v[0].scale, lambda v: setattr(v[0], "scale", 0.1))


@more
def object_in_a_tuple_in_a_dictionary() -> Made:
    value = {"x": (types.SimpleNamespace(scale=1.0), 2)}
    return held(value, lambda v: v["x"][0].scale, lambda v: setattr(v["x"][0], "scale", 0.1))


@more
def list_in_a_dictionary_in_a_tuple() -> Made:
    return held(({"x": [1.0]},), lambda v: v[0]["x"][0], lambda v: v[0]["x"].__setitem__(0, 0.1))


@more
def object_with_slots() -> Made:
    class Slotted:
        __slots__ = ("scale",)

    return held(with_scale(Slotted()), by_scale, smaller)


@more
def function_with_an_attribute() -> Made:
    def weigh() -> float:
        return weigh.scale

    return held(with_scale(weigh), lambda v: v(), smaller)


@more
def function_with_defaults() -> Made:
    def weigh(scale: float = 1.0) -> float:
        return scale

    return held(weigh, lambda v: v(), lambda v: setattr(v, "__defaults__", (0.1,)))


@more
def function_with_a_closure() -> Made:
    def make() -> Any:
        scale = 1.0

        def weigh() -> float:
            return scale

        def put(value: float) -> None:
            nonlocal scale
            scale = value

        weigh.put = put
        return weigh

    return held(make(), lambda v: v(), lambda v: v.put(0.1))


@more
def partial_with_keywords() -> Made:
    value = functools.partial(lambda scale: scale, scale=1.0)
    return held(value, lambda v: v(), lambda v: v.keywords.update(scale=0.1))


@more
def method_of_an_object() -> Made:
    class Weigher:
        scale = 1.0

        def weigh(self) -> float:
            return self.scale

    weigher = Weigher()
    return held(weigher.weigh, lambda v: v(), lambda v: setattr(weigher, "scale", 0.1))


@more
def class_with_a_number() -> Made:
    class Config:
        scale = 1.0

    return held(Config, by_scale, smaller)


@more
def array_of_numpy_filled() -> Made:
    return held(np.array([1.0, 2.0]), lambda v: float(v[0]), lambda v: v.fill(0.1))


@more
def array_of_numpy_of_another_size() -> Made:
    value = np.ones(2)
    model = Net()
    model.a.held = value
    loss = lambda m, b: mse(m, b) * torch.from_numpy(m.a.held).sum()  # noqa: E731
    return train(loss, at(3, lambda: value.resize(4, refcheck=False)), model=model)


@more
def deque_rotated() -> Made:
    return held(collections.deque([1.0, 0.1]), lambda v: v[0], lambda v: v.rotate(1))


@case
def tensor_reshaped_in_place() -> Made:
    """Of other sizes, without being another object."""
    return held(torch.tensor([[1.0, 2.0, 3.0]]), lambda v: v[0].sum(), lambda v: v.t_())


@more
def tensor_whose_data_is_of_another_size() -> Made:
    return held(torch.ones(3), lambda v: v.sum(), lambda v: setattr(v, "data", torch.ones(5)))


@more
def tensor_whose_data_is_of_another_type() -> Made:
    value = torch.full((), 3.0)
    return held(value, lambda v: v / 2, lambda v: setattr(v, "data", torch.full((), 3.0, dtype=torch.float64)))


@more
def tensor_that_gains_a_dimension() -> Made:
    return held(torch.tensor([3.0, 1.0]), lambda v: v.shape[0] * v.sum(), lambda v: v.unsqueeze_(0))


@more
def tensor_resized_in_place() -> Made:
    return held(torch.ones(4), lambda v: v.sum(), lambda v: v.resize_(2))


@more
def tensor_set_to_another_storage() -> Made:
    return held(torch.ones(4), lambda v: v.sum(), lambda v: v.set_(torch.full((6,), 0.1)))


@more
def tensor_that_requires_gradients_later() -> Made:
    """The loss asks the tensor."""
    return held(torch.ones(()), lambda v: 0.1 if v.requires_grad else 1.0, lambda v: v.requires_grad_(True))


def buffer_case(value: torch.Tensor, read: Any, change: Any) -> Made:
    model = Net()
    model.a.register_buffer("held", value)
    return train(lambda m, b: mse(m, b) * read(m.a.held), at(3, lambda: change(value)), model=model)


@more
def buffer_whose_data_is_of_another_size() -> Made:
    return buffer_case(torch.ones(3), lambda v: v.sum(), lambda v: setattr(v, "data", torch.ones(5)))


@more
def buffer_whose_data_is_of_another_type() -> Made:
    return buffer_case(torch.ones(3), lambda v: v.sum() / 2, lambda v: setattr(v, "data", torch.ones(3).double()))


@more
def buffer_that_gains_a_dimension() -> Made:
    return buffer_case(torch.tensor([3.0, 1.0]), lambda v: v.shape[0] * v.sum(), lambda v: v.unsqueeze_(0))


@more
def parameter_whose_data_is_of_another_size() -> Made:
    """A vocabulary that grows behind the optimizer's back; plain SGD keeps no state."""
    model = nn.Linear(6, 3)
    loss = lambda m, b: F.mse_loss(m(b[0])[:, :3], b[1])  # noqa: E731

    def change(i: int) -> None:
        if i == 3:
            model.weight.data = torch.cat([model.weight.data, torch.ones(2, 6)])
            model.bias.data = torch.cat([model.bias.data, torch.ones(2)])

    return train(loss, change, model=model)


@more
def attribute_of_a_held_parameter() -> Made:
    model = Net()
    model.a.weight.scale = 1.0
    loss = lambda m, b: mse(m, b) * m.a.weight.scale  # noqa: E731
    return train(loss, at(3, lambda: setattr(model.a.weight, "scale", 0.1)), model=model)


@more
def module_in_a_plain_list() -> Made:
    """Not registered, so that it is not trained; one of its numbers changes."""
    other = nn.LeakyReLU(0.1)
    return held([other], lambda v: v[0](torch.tensor(-1.0)), lambda v: setattr(v[0], "negative_slope", 3.0))


@more
def module_in_an_object() -> Made:
    value = types.SimpleNamespace(layer=nn.LeakyReLU(0.1))
    return held(value, lambda v: v.layer(torch.tensor(-1.0)), lambda v: setattr(v.layer, "negative_slope", 3.0))


@more
def module_in_a_dictionary_of_a_module() -> Made:
    other = nn.LeakyReLU(0.1)
    return held({"x": other}, lambda v: v["x"](torch.tensor(-1.0)), lambda v: v.update(x=nn.LeakyReLU(3.0)))


@more
def object_with_a_dictionary_of_its_own() -> Made:
    """`__dict__` itself is replaced."""
    value = types.SimpleNamespace(scale=1.0)

    class Config:
        scale = 0.5

    value = Config()
    value.scale = 1.0
    return held(value, by_scale, lambda v: setattr(v, "__dict__", {"scale": 0.1}))


@more
def object_whose_class_attribute_shows_again() -> Made:
    class Config:
        scale = 0.1

    return held(with_scale(Config()), by_scale, lambda v: delattr(v, "scale"))


@more
def attribute_of_a_child_class_of_a_layer() -> Made:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Net()
    model.a = Scaled(6, 16)
    return train(model=model, change=at(3, setattr, Scaled, "scale", 0.1))


@more
def property_of_a_layer_that_reads_a_global_table() -> Made:
    table = {"scale": 1.0}

    class Scaled(nn.Linear):
        @property
        def scale(self) -> float:
            return table["scale"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Net()
    model.a = Scaled(6, 16)
    return train(model=model, change=at(3, lambda: table.update(scale=0.1)))
