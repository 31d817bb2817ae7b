"""Numbers, strings and objects that the loss or a forward reads, and that change between two steps."""

from __future__ import annotations

import collections
import dataclasses
import enum
import fractions
import functools
import math
import types
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, adamw, at, cases_of, cross_entropy, labelled, momentum, mse, train, weighted_by
from torch import nn

case = cases_of("burned in")

RATE = 1.0
TABLE = {"weight": 1.0}
STACK = [1.0]


class Options:
    """A config class, read as Options.weight."""

    weight = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    weight: float = 1.0
    power: int = 1


class Pair(NamedTuple):
    weight: float
    offset: float


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


# ---- helper objects ----


@case
def annealing_method() -> Made:
    class Annealing:
        steps = 0

        def weight(self) -> float:
            return min(1.0, 0.1 + self.steps / 4)

    kl = Annealing()
    return train(lambda m, b: mse(m, b) * kl.weight(), lambda i: setattr(kl, "steps", i))


@case
def annealing_property() -> Made:
    class Annealing:
        def __init__(self) -> None:
            self.epoch = 0

        @property
        def weight(self) -> float:
            return 1.0 if self.epoch < 2 else 0.1

    kl = Annealing()
    return train(lambda m, b: mse(m, b) * kl.weight, lambda i: setattr(kl, "epoch", i))


@case
def annealing_counts_its_own_calls() -> Made:
    class Annealing:
        calls = 0

        def __call__(self) -> float:
            self.calls += 1
            return 1.0 if self.calls < 4 else 0.1

    kl = Annealing()
    return train(lambda m, b: mse(m, b) * kl(), state=lambda: kl.calls)


@case
def cached_property_dropped() -> Made:
    class Helper:
        base = 1.0

        @functools.cached_property
        def weight(self) -> float:
            return self.base * 2

    helper = Helper()

    def change(i: int) -> None:
        if i == 3:
            helper.base = 0.1
            vars(helper).pop("weight", None)

    return train(lambda m, b: mse(m, b) * helper.weight, change)


@case
def property_writes_through_a_setter() -> Made:
    class Model(Net):
        _scale = 1.0
        scale = property(lambda self: self._scale, lambda self, value: setattr(self, "_scale", value * 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    model = Model()
    return train(model=model, change=at(3, setattr, model, "scale", 0.2))


@case
def slots_object() -> Made:
    class Slots:
        __slots__ = ("weight",)

    slots = Slots()
    slots.weight = 1.0
    return train(lambda m, b: mse(m, b) * slots.weight, at(3, setattr, slots, "weight", 0.1))


@case
def descriptor_object() -> Made:
    class Schedule:
        value = 1.0

        def __get__(self, owner: Any, kind: Any = None) -> float:
            return self.value

    schedule = Schedule()
    trainer = type("Trainer", (), {"weight": schedule})()
    return train(lambda m, b: mse(m, b) * trainer.weight, at(3, setattr, schedule, "value", 0.1))


@case
def attribute_dictionary() -> Made:
    class Easy(dict):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    options = Easy(weight=1.0)
    return train(lambda m, b: mse(m, b) * options.weight, at(3, options.update, weight=0.1))


@case
def config_with_getattr() -> Made:
    class Lazy:
        def __init__(self) -> None:
            self.values = {"weight": 1.0}

        def __getattr__(self, name: str) -> Any:
            if name not in self.values:
                raise AttributeError(name)
            return self.values[name]

    config = Lazy()
    return train(lambda m, b: mse(m, b) * config.weight, at(3, config.values.update, weight=0.1))


@case
def config_with_getitem() -> Made:
    class Tree:
        def __init__(self, **values: Any) -> None:
            self.values = values

        def __getitem__(self, path: str) -> Any:
            found: Any = self
            for name in path.split("."):
                found = found.values[name]
            return found

    inner = Tree(weight=1.0)
    tree = Tree(loss=inner)
    return train(lambda m, b: mse(m, b) * tree["loss.weight"], at(3, inner.values.update, weight=0.1))


@case
def partial_keywords() -> Made:
    scaled = functools.partial(lambda x, weight: x * weight, weight=1.0)
    return train(lambda m, b: scaled(mse(m, b)), at(3, scaled.keywords.update, weight=0.1))


@case
def loss_is_a_partial() -> Made:
    loss = functools.partial(lambda m, b, weight: mse(m, b) * weight, weight=1.0)
    return train(loss, at(3, loss.keywords.update, weight=0.1))


@case
def loss_is_a_bound_method() -> Made:
    class Trainer:
        global_step, warmup = 0, 3

        def training_loss(self, model: Any, batch: Any) -> torch.Tensor:
            return mse(model, batch) * min(1.0, (self.global_step + 1) / self.warmup)

    trainer = Trainer()
    return train(trainer.training_loss, lambda i: setattr(trainer, "global_step", i))


@case
def loss_is_an_object() -> Made:
    class Criterion:
        power = 2

        def __call__(self, model: Any, batch: Any) -> torch.Tensor:
            return (model(batch[0]) - batch[1]).abs().pow(self.power).mean()

    criterion = Criterion()
    return train(criterion, at(3, setattr, criterion, "power", 1))


@case
def weak_reference() -> Made:
    class Target:
        weight = 1.0

    target = Target()
    holder = weakref.ref(target)
    return train(lambda m, b: mse(m, b) * holder().weight, at(3, setattr, target, "weight", 0.1))


@case
def weak_reference_dies() -> Made:
    class Target:
        weight = 0.1

    kept = [Target()]
    holder = weakref.ref(kept[0])
    return train(lambda m, b: mse(m, b) * (1.0 if holder() is None else holder().weight), at(3, kept.clear))


# ---- configs ----


@case
def config_class() -> Made:
    change, cleanup = at(3, setattr, Options, "weight", 0.1), lambda: setattr(Options, "weight", 1.0)
    return train(lambda m, b: mse(m, b) * Options.weight, change, cleanup=cleanup)


@case
def config_module() -> Made:
    config = types.ModuleType("config")
    config.weight = 1.0
    return train(lambda m, b: mse(m, b) * config.weight, at(3, setattr, config, "weight", 0.1))


@case
def config_namespace() -> Made:
    config = types.SimpleNamespace(weight=1.0, unread=0)

    def change(i: int) -> None:
        config.unread = i
        config.weight = 1.0 if i < 3 else 0.1

    return train(lambda m, b: mse(m, b) * config.weight, change)


@case
def nested_config() -> Made:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
    return train(lambda m, b: mse(m, b) * config.loss.weight, at(3, setattr, config.loss, "weight", 0.1))


@case
def nested_config_replaced() -> Made:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
    return train(lambda m, b: mse(m, b) * config.loss.weight, at(3, setattr, config, "loss", Settings(0.1)))


@case
def dataclass_replaced_in_the_closure() -> Made:
    settings = Settings()

    def change(i: int) -> None:
        nonlocal settings
        settings = dataclasses.replace(settings, power=1 + (i > 2))

    return train(lambda m, b: mse(m, b) ** settings.power, change)


@case
def dataclass_on_the_model() -> Made:
    model = Net()
    model.settings = Settings()
    return train(lambda m, b: mse(m, b) * m.settings.weight, at(3, setattr, model, "settings", Settings(0.1)), model=model)


@case
def namedtuple_on_the_model() -> Made:
    model = Net()
    model.pair = Pair(1.0, 0.0)
    change = at(3, setattr, model, "pair", Pair(0.1, 0.3))
    return train(lambda m, b: mse(m, b) * m.pair.weight + m.pair.offset, change, model=model)


@case
def config_chosen_by_name() -> Made:
    configs = {"warm": {"weight": 1.0}, "cold": {"weight": 0.1}}
    phase = ["warm"]
    return train(lambda m, b: mse(m, b) * configs[phase[0]]["weight"], lambda i: phase.__setitem__(0, ("warm", "cold")[i % 2]))


# ---- containers ----


@case
def list_entry_on_the_model() -> Made:
    model = Configured()
    model.weights = [1.0, 0.5]
    return train(lambda m, b: mse(m, b) * m.weights[0], at(3, model.weights.__setitem__, 0, 0.1), model=model)


@case
def list_reversed() -> Made:
    weights = [1.0, 0.1]
    return train(lambda m, b: mse(m, b) * weights[0], at(3, weights.reverse))


@case
def list_that_grows() -> Made:
    history: list[int] = []
    return train(lambda m, b: mse(m, b) / (1 + len(history)), lambda i: history.append(i))


@case
def list_of_terms() -> Made:
    terms = [mse]
    return train(lambda m, b: sum(term(m, b) for term in terms), at(3, terms.append, lambda m, b: m.a.weight.square().mean()))


@case
def dictionary_on_the_model() -> Made:
    model = Net()
    model.weights = {"error": 1.0, "decay": 0.0}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return m.weights["error"] * mse(m, b) + m.weights["decay"] * m.a.weight.square().sum()

    return train(loss, at(3, model.weights.update, decay=0.1), model=model)


@case
def dictionary_key_added() -> Made:
    options: dict[str, float] = {}
    return train(lambda m, b: mse(m, b) + options.get("decay", 0.0) * m.a.weight.square().sum(), at(3, options.update, decay=0.1))


@case
def dictionary_key_removed() -> Made:
    losses = {"square": lambda e: e.square().mean(), "absolute": lambda e: e.abs().mean()}

    def loss(m: Any, b: Any) -> torch.Tensor:
        return sum(f(m(b[0]) - b[1]) for f in losses.values())

    return train(loss, at(3, losses.pop, "absolute"))


@case
def dictionary_order() -> Made:
    order = collections.OrderedDict(big=1.0, small=0.1)
    return train(lambda m, b: mse(m, b) * next(iter(order.values())), at(3, order.move_to_end, "big"))


@case
def deque_of_recent_values() -> Made:
    recent: collections.deque[float] = collections.deque([1.0], maxlen=3)
    return train(lambda m, b: mse(m, b) * (sum(recent) / len(recent)), lambda i: recent.append(1.0 / (i + 1)))


@case
def set_membership() -> Made:
    model = Net()
    model.flags = {"error"}
    loss = lambda m, b: mse(m, b) * (0.1 if "small" in m.flags else 1.0)  # noqa: E731
    return train(loss, at(3, model.flags.add, "small"), model=model)


@case
def frozenset_replaced() -> Made:
    model = Net()
    model.flags = frozenset({"error"})
    loss = lambda m, b: mse(m, b) * (1.0 if "error" in m.flags else 0.1)  # noqa: E731
    return train(loss, at(3, setattr, model, "flags", frozenset()), model=model)


@case
def counter_object() -> Made:
    seen: collections.Counter[str] = collections.Counter()

    def loss(m: Any, b: Any) -> torch.Tensor:
        seen["steps"] += 1
        return mse(m, b) * (1.0 if seen["steps"] < 4 else 0.1)

    return train(loss, state=lambda: dict(seen))


@case
def default_dictionary() -> Made:
    weights: collections.defaultdict[str, float] = collections.defaultdict(lambda: 1.0)
    return train(lambda m, b: mse(m, b) * weights["error"], at(3, weights.update, error=0.1), state=lambda: dict(weights))


@case
def chain_map() -> Made:
    overrides: dict[str, float] = {}
    chain = collections.ChainMap(overrides, {"weight": 1.0})
    return train(lambda m, b: mse(m, b) * chain["weight"], at(3, overrides.update, weight=0.1))


@case
def mapping_proxy() -> Made:
    values = {"weight": 1.0}
    proxy = types.MappingProxyType(values)
    return train(lambda m, b: mse(m, b) * proxy["weight"], at(3, values.update, weight=0.1))


@case
def list_inside_a_tuple() -> Made:
    model = Net()
    model.plan = ("weights", [1.0])
    return train(lambda m, b: mse(m, b) * m.plan[1][0], at(3, model.plan[1].__setitem__, 0, 0.1), model=model)


@case
def deeply_nested_containers() -> Made:
    model = Net()
    model.plan = [{"weight": (1.0, [1.0, {"last": 1.0}])}]
    change = at(3, model.plan[0]["weight"][1][1].update, last=0.1)
    return train(lambda m, b: mse(m, b) * m.plan[0]["weight"][1][1]["last"], change, model=model)


@case
def range_replaced() -> Made:
    model = Net()
    model.repeats = range(1)
    loss = lambda m, b: sum(mse(m, b) for _ in m.repeats)  # noqa: E731
    return train(loss, at(3, setattr, model, "repeats", range(3)), model=model)


@case
def slice_replaced() -> Made:
    model = Net()
    model.rows = slice(0, 4)
    loss = lambda m, b: F.mse_loss(m(b[0][m.rows]), b[1][m.rows])  # noqa: E731
    return train(loss, at(3, setattr, model, "rows", slice(2, 8)), model=model)


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


@case
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


@case
def enum_as_a_key() -> Made:
    weights, mode = {Mode.PLAIN: 1.0, Mode.SMALL: 0.1}, [Mode.PLAIN]
    return train(lambda m, b: mse(m, b) * weights[mode[0]], at(3, mode.__setitem__, 0, Mode.SMALL))


@case
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


@case
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


@case
def fraction() -> Made:
    model = Net()
    model.share = fractions.Fraction(1, 1)
    change = at(3, setattr, model, "share", fractions.Fraction(1, 10))
    return train(lambda m, b: mse(m, b) * float(m.share), change, model=model)


@case
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


@case
def closure_of_a_closure() -> Made:
    values = {"weight": 1.0}

    def scaler() -> Any:
        read = lambda: values["weight"]  # noqa: E731
        return lambda x: x * read()

    scaled = scaler()
    return train(lambda m, b: scaled(mse(m, b)), at(3, values.update, weight=0.1))


@case
def cosine_of_a_step_count() -> Made:
    trainer = types.SimpleNamespace(step=0)
    loss = lambda m, b: mse(m, b) * (0.5 + 0.5 * math.cos(math.pi * trainer.step / 6))  # noqa: E731
    return train(loss, lambda i: setattr(trainer, "step", i))


@case
def module_level_number() -> Made:
    cleanup = lambda: globals().update(RATE=1.0)  # noqa: E731
    return train(lambda m, b: mse(m, b) * RATE, at(3, globals().update, RATE=0.1), cleanup=cleanup)


@case
def module_level_dictionary() -> Made:
    cleanup = lambda: TABLE.update(weight=1.0)  # noqa: E731
    return train(lambda m, b: mse(m, b) * TABLE["weight"], at(3, TABLE.update, weight=0.1), cleanup=cleanup)


@case
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


@case
def instance_attribute_shadows() -> Made:
    model = Configured()
    return train(model=model, change=at(3, setattr, model, "weight", 0.1))


@case
def attribute_added_later() -> Made:
    model = Net()
    loss = lambda m, b: mse(m, b) * (m.extra if hasattr(m, "extra") else 1.0)  # noqa: E731
    return train(loss, at(3, setattr, model, "extra", 0.1), model=model)


@case
def attribute_with_a_default() -> Made:
    helper = types.SimpleNamespace()
    return train(lambda m, b: mse(m, b) * getattr(helper, "weight", 1.0), at(3, setattr, helper, "weight", 0.1))


@case
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


@case
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


@case
def leaky_slope() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.01), nn.Linear(8, 3))
    return train(model=model, change=at(3, setattr, model[1], "negative_slope", 0.7))


@case
def dropout_from_none_to_all() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3))
    return train(model=model, change=at(3, setattr, model[1], "p", 1.0))


@case
def convolution_stride() -> Made:
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.AdaptiveAvgPool1d(3), nn.Conv1d(4, 1, 1))
    model.append(nn.Flatten())
    return train(model=model, change=at(3, setattr, model[1], "stride", (2,)))


@case
def label_smoothing_of_a_criterion() -> Made:
    criterion = nn.CrossEntropyLoss()
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "label_smoothing", 0.3), batches=labelled())


@case
def class_weights_of_a_criterion() -> Made:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    loss = lambda m, b: criterion(m(b[0]), b[1])  # noqa: E731
    return train(loss, at(3, setattr, criterion, "weight", torch.tensor([1.0, 5.0, 0.1])), batches=labelled())


@case
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


@case
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


@case
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


@case
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


@case
def tensor_in_a_list_replaced() -> Made:
    anchors = [torch.zeros(3), torch.ones(3)]
    loss = lambda m, b: sum(F.mse_loss(m(b[0]), anchor.expand(8, 3)) for anchor in anchors)  # noqa: E731
    return train(loss, at(3, anchors.__setitem__, 1, torch.full((3,), -1.0)))


@case
def tensor_in_a_list_appended() -> Made:
    anchors = [torch.zeros(3)]
    loss = lambda m, b: sum(F.mse_loss(m(b[0]), anchor.expand(8, 3)) for anchor in anchors)  # noqa: E731
    return train(loss, at(3, anchors.append, torch.ones(3)))


@case
def class_weight_tensor_in_a_dictionary() -> Made:
    weights = {"classes": torch.ones(3)}
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], weight=weights["classes"])  # noqa: E731
    return train(loss, at(3, weights.update, classes=torch.tensor([3.0, 1.0, 0.1])), batches=labelled())


@case
def loss_chosen_by_a_dictionary() -> Made:
    phase = {"now": "first"}
    losses = {"first": cross_entropy, "then": lambda m, b: F.multi_margin_loss(m(b[0]), b[1])}
    return train(lambda m, b: losses[phase["now"]](m, b), at(3, phase.update, now="then"), batches=labelled())
