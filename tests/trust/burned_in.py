"""Helper objects, configs and containers that the loss or a forward reads, and that change between two steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
import weakref
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, mse, train

case, more = cases_of("burned in")


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


@more
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


@more
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


@more
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


@more
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


@more
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


@more
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


@more
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


@more
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


@more
def nested_config() -> Made:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
    return train(lambda m, b: mse(m, b) * config.loss.weight, at(3, setattr, config.loss, "weight", 0.1))


@case
def nested_config_replaced() -> Made:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0))
    return train(lambda m, b: mse(m, b) * config.loss.weight, at(3, setattr, config, "loss", Settings(0.1)))


@more
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
    return train(
        lambda m, b: mse(m, b) * m.settings.weight, at(3, setattr, model, "settings", Settings(0.1)), model=model
    )


@case
def namedtuple_on_the_model() -> Made:
    model = Net()
    model.pair = Pair(1.0, 0.0)
    change = at(3, setattr, model, "pair", Pair(0.1, 0.3))
    return train(lambda m, b: mse(m, b) * m.pair.weight + m.pair.offset, change, model=model)


@more
def config_chosen_by_name() -> Made:
    configs = {"warm": {"weight": 1.0}, "cold": {"weight": 0.1}}
    phase = ["warm"]
    return train(
        lambda m, b: mse(m, b) * configs[phase[0]]["weight"], lambda i: phase.__setitem__(0, ("warm", "cold")[i % 2])
    )


# ---- containers ----


@case
def list_entry_on_the_model() -> Made:
    model = Configured()
    model.weights = [1.0, 0.5]
    return train(lambda m, b: mse(m, b) * m.weights[0], at(3, model.weights.__setitem__, 0, 0.1), model=model)


@more
def list_reversed() -> Made:
    weights = [1.0, 0.1]
    return train(lambda m, b: mse(m, b) * weights[0], at(3, weights.reverse))


@case
def list_that_grows() -> Made:
    history: list[int] = []
    return train(lambda m, b: mse(m, b) / (1 + len(history)), lambda i: history.append(i))


@more
def list_of_terms() -> Made:
    terms = [mse]
    return train(
        lambda m, b: sum(term(m, b) for term in terms), at(3, terms.append, lambda m, b: m.a.weight.square().mean())
    )


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
    return train(
        lambda m, b: mse(m, b) + options.get("decay", 0.0) * m.a.weight.square().sum(), at(3, options.update, decay=0.1)
    )


@more
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


@more
def frozenset_replaced() -> Made:
    model = Net()
    model.flags = frozenset({"error"})
    loss = lambda m, b: mse(m, b) * (1.0 if "error" in m.flags else 0.1)  # noqa: E731
    return train(loss, at(3, setattr, model, "flags", frozenset()), model=model)


@more
def counter_object() -> Made:
    seen: collections.Counter[str] = collections.Counter()

    def loss(m: Any, b: Any) -> torch.Tensor:
        seen["steps"] += 1
        return mse(m, b) * (1.0 if seen["steps"] < 4 else 0.1)

    return train(loss, state=lambda: dict(seen))


@more
def default_dictionary() -> Made:
    weights: collections.defaultdict[str, float] = collections.defaultdict(lambda: 1.0)
    return train(
        lambda m, b: mse(m, b) * weights["error"], at(3, weights.update, error=0.1), state=lambda: dict(weights)
    )


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


@more
def range_replaced() -> Made:
    model = Net()
    model.repeats = range(1)
    loss = lambda m, b: sum(mse(m, b) for _ in m.repeats)  # noqa: E731
    return train(loss, at(3, setattr, model, "repeats", range(3)), model=model)


@more
def slice_replaced() -> Made:
    model = Net()
    model.rows = slice(0, 4)
    loss = lambda m, b: F.mse_loss(m(b[0][m.rows]), b[1][m.rows])  # noqa: E731
    return train(loss, at(3, setattr, model, "rows", slice(2, 8)), model=model)
