"""Single values that the loss or a forward reads: numbers, strings, attributes, options of layers and optimizers, tensors."""

from __future__ import annotations

import enum
import fractions
import math
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, at, cases_of, cross_entropy, labelled, momentum, mse, train, weighted_by
from torch import nn

case, more = cases_of("burned in")

RATE = 1.0
TABLE = {"weight": 1.0}
STACK = [1.0]


class Mode(enum.Enum):
    PLAIN = 1
    SMALL = 2


class Parts(enum.Flag):
    ERROR = enum.auto()
    DECAY = enum.auto()


class Configured(Net):
    """Reads `self.weight`, whatever stands there."""

    weight: Any = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight


# ---- numbers, strings and other values ----


@case
def float_every_step() -> Made:
    return weighted_by(lambda i: 1.0 / (i + 1))


@case
def integer_every_step() -> Made:
    return weighted_by(lambda i: i + 1)


@case
def none_becomes_a_number() -> Made:
    model = Net()
    model.margin = None
    loss = lambda m, b: mse(m, b) if m.margin is None else F.relu(mse(m, b) - m.margin) + m.margin**2  # noqa: E731
    return train(loss, at(3, setattr, model, "margin", 0.2), model=model)


@more
def boolean_alternates() -> Made:
    model = Net()
    model.absolute = False
    loss = lambda m, b: (m(b[0]) - b[1]).abs().mean() if m.absolute else mse(m, b)  # noqa: E731
    return train(loss, lambda i: setattr(model, "absolute", i % 2 == 1), model=model)


@case
def string_option() -> Made:
    class Model(Net):
        activation = "tanh"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(getattr(torch, self.activation)(self.a(x)))

    model = Model()
    return train(model=model, change=at(3, setattr, model, "activation", "relu"))


@case
def enum_switched() -> Made:
    model = Net()
    model.mode = Mode.PLAIN
    loss = lambda m, b: mse(m, b) * (0.1 if m.mode is Mode.SMALL else 1.0)  # noqa: E731
    return train(loss, at(3, setattr, model, "mode", Mode.SMALL), model=model)


@more
def enum_as_a_key() -> Made:
    weights, mode = {Mode.PLAIN: 1.0, Mode.SMALL: 0.1}, [Mode.PLAIN]
    return train(lambda m, b: mse(m, b) * weights[mode[0]], at(3, mode.__setitem__, 0, Mode.SMALL))


@more
def enum_flags() -> Made:
    model = Net()
    model.parts = Parts.ERROR

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) + (m.a.weight.square().mean() if Parts.DECAY in m.parts else 0.0)

    return train(loss, at(3, setattr, model, "parts", Parts.ERROR | Parts.DECAY), model=model)


@case
def numpy_number_on_the_model() -> Made:
    model = Configured()
    model.weight = np.float64(1.0)
    return train(model=model, change=at(3, setattr, model, "weight", np.float64(0.1)))


@more
def numpy_number_in_the_closure() -> Made:
    weights = {"error": np.float32(1.0)}
    return train(lambda m, b: mse(m, b) * float(weights["error"]), at(3, weights.update, error=np.float32(0.1)))


@case
def numpy_array_entry() -> Made:
    model = Net()
    model.table = np.array([1.0, 0.5])
    return train(lambda m, b: mse(m, b) * float(m.table[0]), at(3, model.table.__setitem__, 0, 0.1), model=model)


@case
def numpy_array_as_a_tensor() -> Made:
    model = Net()
    model.scales = np.ones(3, dtype=np.float32)

    def loss(m: Any, b: Any) -> torch.Tensor:
        return F.mse_loss(m(b[0]) * torch.from_numpy(m.scales), b[1])

    return train(loss, at(3, model.scales.__setitem__, 1, 0.1), model=model)


@more
def fraction() -> Made:
    model = Net()
    model.share = fractions.Fraction(1, 1)
    change = at(3, setattr, model, "share", fractions.Fraction(1, 10))
    return train(lambda m, b: mse(m, b) * float(m.share), change, model=model)


@more
def dtype_attribute() -> Made:
    class Model(Net):
        inner = torch.float32

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)).to(self.inner).float())

    model = Model()
    return train(model=model, change=at(3, setattr, model, "inner", torch.bfloat16))


@case
def function_attribute() -> Made:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * scaled.weight

    scaled.weight = 1.0
    return train(lambda m, b: scaled(mse(m, b)), at(3, setattr, scaled, "weight", 0.1))


@case
def closure_variable() -> Made:
    weight = 1.0

    def change(i: int) -> None:
        nonlocal weight
        weight = 1.0 if i < 3 else 0.1

    return train(lambda m, b: mse(m, b) * weight, change)


@more
def closure_of_a_closure() -> Made:
    values = {"weight": 1.0}

    def scaler() -> Any:
        read = lambda: values["weight"]  # noqa: E731
        return lambda x: x * read()

    scaled = scaler()
    return train(lambda m, b: scaled(mse(m, b)), at(3, values.update, weight=0.1))


@more
def cosine_of_a_step_count() -> Made:
    trainer = types.SimpleNamespace(step=0)
    loss = lambda m, b: mse(m, b) * (0.5 + 0.5 * math.cos(math.pi * trainer.step / 6))  # noqa: E731
    return train(loss, lambda i: setattr(trainer, "step", i))


@case
def module_level_number() -> Made:
    cleanup = lambda: globals().update(RATE=1.0)  # noqa: E731
    return train(lambda m, b: mse(m, b) * RATE, at(3, globals().update, RATE=0.1), cleanup=cleanup)


@more
def module_level_dictionary() -> Made:
    cleanup = lambda: TABLE.update(weight=1.0)  # noqa: E731
    return train(lambda m, b: mse(m, b) * TABLE["weight"], at(3, TABLE.update, weight=0.1), cleanup=cleanup)


@more
def module_level_list_read_by_a_model() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * STACK[-1]

    return train(model=Model(), change=at(3, STACK.append, 0.1), cleanup=lambda: STACK.__delitem__(slice(1, None)))


# ---- attributes of classes and instances ----


@case
def class_attribute_of_a_model() -> Made:
    class Model(Configured):
        weight = 1.0

    return train(model=Model(), change=at(3, setattr, Model, "weight", 0.1))


@case
def inherited_attribute_changes() -> Made:
    class Parent:
        weight = 1.0

    helper = type("Child", (Parent,), {})()
    return train(lambda m, b: mse(m, b) * helper.weight, at(3, setattr, Parent, "weight", 0.1))


@case
def subclass_attribute_shadows() -> Made:
    class Parent:
        weight = 1.0

    class Child(Parent):
        pass

    helper = Child()
    return train(lambda m, b: mse(m, b) * helper.weight, at(3, setattr, Child, "weight", 0.1))


@case
def subclass_attribute_of_a_model_shadows() -> Made:
    class Model(Configured):
        pass

    return train(model=Model(), change=at(3, setattr, Model, "weight", 0.1))


@more
def instance_attribute_shadows() -> Made:
    model = Configured()
    return train(model=model, change=at(3, setattr, model, "weight", 0.1))


@case
def attribute_added_later() -> Made:
    model = Net()
    loss = lambda m, b: mse(m, b) * (m.extra if hasattr(m, "extra") else 1.0)  # noqa: E731
    return train(loss, at(3, setattr, model, "extra", 0.1), model=model)


@more
def attribute_with_a_default() -> Made:
    helper = types.SimpleNamespace()
    return train(lambda m, b: mse(m, b) * getattr(helper, "weight", 1.0), at(3, setattr, helper, "weight", 0.1))


@more
def attribute_deleted_later() -> Made:
    model = Configured()
    model.weight = 0.1
    return train(model=model, change=at(3, delattr, model, "weight"))


@case
def counter_with_a_threshold() -> Made:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1.0 if self.calls <= 3 else 0.1)

    model = Model()
    return train(model=model, state=lambda: model.calls)


@case
def current_epoch() -> Made:
    class Lightning(Net):
        current_epoch, trainer = 0, None

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = mse(self, batch)
            return loss if self.current_epoch < 2 else loss + 0.1 * self.a.weight.square().sum()

    model = Lightning()
    return train(lambda m, b: m.training_step(b), lambda i: setattr(model, "current_epoch", i // 2), model=model)


@more
def epoch_of_a_trainer_behind_a_property() -> Made:
    class Lightning(Net):
        current_epoch = property(lambda self: self.trainer.epoch)

    model = Lightning()
    model.trainer = types.SimpleNamespace(epoch=0)
    loss = lambda m, b: mse(m, b) * 0.5**m.current_epoch  # noqa: E731
    return train(loss, lambda i: setattr(model.trainer, "epoch", i // 2), model=model)


# ---- options of torch's own modules ----


@case
def batch_norm_momentum_and_eps() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def change(i: int) -> None:
        model[1].momentum = 0.1 if i < 2 else 0.5
        model[1].eps = 1e-5 if i < 4 else 1.0

    return train(model=model, change=change)


@more
def leaky_slope() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.01), nn.Linear(8, 3))
    return train(model=model, change=at(3, setattr, model[1], "negative_slope", 0.7))


@case
def dropout_from_none_to_all() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))
    return train(model=model, change=at(3, setattr, model[1], "p", 1.0))


@more
def convolution_stride() -> Made:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.AdaptiveAvgPool1d(3), nn.Conv1d(4, 1, 1)
    )
    model.append(nn.Flatten())
    return train(model=model, change=at(3, setattr, model[1], "stride", (2,)))


@more
def label_smoothing_of_a_criterion() -> Made:
    criterion = nn.CrossEntropyLoss()
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "label_smoothing", 0.3), batches=labelled())


@more
def class_weights_of_a_criterion() -> Made:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "weight", torch.tensor([1.0, 5.0, 0.1])), batches=labelled())


@more
def reduction_of_a_criterion() -> Made:
    criterion = nn.MSELoss()
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "reduction", "sum"), optimizer=lambda p: torch.optim.SGD(p, lr=0.01))


# ---- numbers of the optimizer and of schedulers, read by the loss ----


@case
def scheduler_number_read_by_the_loss() -> Made:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loss = lambda m, b: mse(m, b) + scheduler.get_last_lr()[0] * m.a.weight.square().sum()  # noqa: E731
    return train(loss, model=model, optimizer=optimizer, after=lambda i: scheduler.step())


@more
def scheduler_epoch_read_by_the_loss() -> Made:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    loss = lambda m, b: mse(m, b) * (1.0 if scheduler.last_epoch < 3 else 0.1)  # noqa: E731
    return train(loss, model=model, optimizer=optimizer, after=lambda i: scheduler.step())


@case
def learning_rate_read_by_the_loss() -> Made:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = optimizer.param_groups[0]
    loss = lambda m, b: mse(m, b) + optimizer.param_groups[0]["lr"] * m.a.weight.square().sum()  # noqa: E731
    return train(loss, lambda i: group.update(lr=0.1 / (i + 1)), model=model, optimizer=optimizer)


@case
def optimizer_state_read_by_the_loss() -> Made:
    model = Net()
    optimizer = momentum(model.parameters())
    loss = lambda m, b: mse(m, b) * (0.5 if optimizer.state else 1.0)  # noqa: E731
    return train(loss, model=model, optimizer=optimizer)


@more
def step_count_of_adam_read_by_the_loss() -> Made:
    model = Net()
    optimizer = adamw(model.parameters())

    def loss(m: Any, b: Any) -> torch.Tensor:
        state = optimizer.state.get(m.a.weight)
        return mse(m, b) * (1.0 if state is None else 1.0 / (1.0 + state["step"]))

    return train(loss, model=model, optimizer=optimizer)


# ---- tensors that are no parameters ----


@case
def tensor_attribute_replaced() -> Made:
    model = Configured()
    model.weight = torch.tensor(1.0)
    return train(model=model, change=at(3, setattr, model, "weight", torch.tensor(0.1)))


@more
def tensor_attribute_of_another_size() -> Made:
    model = Configured()
    model.weight = torch.tensor(1.0)
    return train(model=model, change=at(3, setattr, model, "weight", torch.tensor([0.1, 1.0, 2.0])))


@case
def closure_tensor_filled_in_place() -> Made:
    weight = torch.ones(3)
    return train(lambda m, b: (weight * (m(b[0]) - b[1]) ** 2).mean(), at(3, weight.mul_, 0.1))


@case
def closure_tensor_replaced() -> Made:
    weight = torch.ones(3)

    def change(i: int) -> None:
        nonlocal weight
        weight = torch.full((3,), 1.0 / (i + 1))

    return train(lambda m, b: (weight * (m(b[0]) - b[1]) ** 2).mean(), change)


@case
def closure_tensor_as_a_python_number() -> Made:
    weight = torch.tensor(1.0)
    return train(lambda m, b: mse(m, b) * float(weight), at(3, weight.fill_, 0.1))


@more
def tensor_in_a_list_replaced() -> Made:
    anchors = [torch.zeros(3), torch.ones(3)]
    loss = lambda m, b: sum(F.mse_loss(m(b[0]), anchor.expand(8, 3)) for anchor in anchors)  # noqa: E731
    return train(loss, at(3, anchors.__setitem__, 1, torch.full((3,), -1.0)))


@case
def tensor_in_a_list_appended() -> Made:
    anchors = [torch.zeros(3)]
    loss = lambda m, b: sum(F.mse_loss(m(b[0]), anchor.expand(8, 3)) for anchor in anchors)  # noqa: E731
    return train(loss, at(3, anchors.append, torch.ones(3)))


@more
def class_weight_tensor_in_a_dictionary() -> Made:
    weights = {"classes": torch.ones(3)}
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weights["classes"])  # noqa: E731
    return train(loss, at(3, weights.update, classes=torch.tensor([3.0, 1.0, 0.1])), batches=labelled())


@more
def loss_chosen_by_a_dictionary() -> Made:
    phase = {"now": "first"}
    losses = {"first": cross_entropy, "then": lambda m, b: F.multi_margin_loss(m(b[0]), b[1])}
    return train(lambda m, b: losses[phase["now"]](m, b), at(3, phase.update, now="then"), batches=labelled())
