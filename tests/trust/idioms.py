"""What Python's own tools read for the loss: getters, patterns, signatures, names, generators, sorted tables, matched kinds."""

from __future__ import annotations

import bisect
import contextlib
import copy
import dataclasses
import enum
import fnmatch
import functools
import heapq
import inspect
import itertools
import operator
import re
import statistics
import string
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, at, cases_of, mse, pairs, train
from tests.trust.objects import by
from torch import nn

case, more = cases_of("idioms")


@more
def getters_by_path() -> Made:
    config = types.SimpleNamespace(loss=types.SimpleNamespace(weight=1.0), table={"a": 1.0})
    read = operator.attrgetter("loss.weight")
    pick = operator.itemgetter("a")

    def change(i: int) -> None:
        if i == 2:
            config.loss.weight = 0.1
        if i == 4:
            config.table["a"] = 3.0

    return train(lambda m, b: mse(m, b) * read(config) * pick(config.table), change)


@more
def method_called_by_name() -> Made:
    class Scheduler:
        def __init__(self) -> None:
            self.now = 1.0

        def weight(self, factor: float) -> float:
            return self.now * factor

    scheduler = Scheduler()
    call = operator.methodcaller("weight", 0.5)
    return by(lambda: call(scheduler), lambda: setattr(scheduler, "now", 0.1))


@more
def decay_by_patterns_of_names() -> Made:
    """Which weights are decayed, by regular expressions as recipes have them."""
    patterns = [r"bias$"]

    def loss(m: Any, b: Any) -> torch.Tensor:
        decayed = [p for name, p in m.named_parameters() if not any(re.search(x, name) for x in patterns)]
        return mse(m, b) + 0.1 * sum(p.square().sum() for p in decayed)

    return train(loss, at(3, patterns.append, r"^a\."))


@more
def compiled_pattern_replaced() -> Made:
    held = {"pattern": re.compile("bias")}

    def loss(m: Any, b: Any) -> torch.Tensor:
        decayed = [p for name, p in m.named_parameters() if held["pattern"].search(name)]
        return mse(m, b) + 0.1 * sum(p.square().sum() for p in decayed)

    return train(loss, lambda i: held.update(pattern=re.compile("weight" if i >= 3 else "bias")))


@more
def names_matched_as_files() -> Made:
    held = {"globs": ["a.*"]}

    def loss(m: Any, b: Any) -> torch.Tensor:
        chosen = [p for n, p in m.named_parameters() if any(fnmatch.fnmatch(n, g) for g in held["globs"])]
        return mse(m, b) + 0.1 * sum(p.abs().sum() for p in chosen)

    return train(loss, at(3, lambda: held.update(globs=["*.bias"])))


@more
def arguments_filtered_by_signature() -> Made:
    """Only what a criterion takes is handed to it, as frameworks do."""
    options = {"reduction": "mean", "beta": 1.0, "delta": 0.5}
    criteria = {"now": F.smooth_l1_loss}

    def loss(m: Any, b: Any) -> torch.Tensor:
        known = inspect.signature(criteria["now"]).parameters
        return criteria["now"](m(b[0]), b[1], **{k: v for k, v in options.items() if k in known})

    return train(loss, at(3, lambda: criteria.update(now=F.huber_loss)))


@more
def signature_of_a_function_that_changes() -> Made:
    def first(x: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        return x * scale

    def second(x: torch.Tensor) -> torch.Tensor:
        return x

    held = {"now": first}

    def loss(m: Any, b: Any) -> torch.Tensor:
        keywords = {"scale": 0.1} if "scale" in inspect.signature(held["now"]).parameters else {}
        return held["now"](mse(m, b), **keywords)

    return train(loss, at(3, lambda: held.update(now=second)))


@dataclasses.dataclass
class Weights:
    reconstruction: float = 1.0
    sparsity: float = 0.0


@more
def fields_of_a_dataclass() -> Made:
    weights = Weights()

    def loss(m: Any, b: Any) -> torch.Tensor:
        terms = {"reconstruction": mse(m, b), "sparsity": m.a.weight.abs().mean()}
        return sum(getattr(weights, field.name) * terms[field.name] for field in dataclasses.fields(weights))

    return train(loss, at(3, setattr, weights, "sparsity", 2.0))


@more
def dataclass_as_a_dictionary() -> Made:
    weights = Weights()

    def loss(m: Any, b: Any) -> torch.Tensor:
        terms = {"reconstruction": mse(m, b), "sparsity": m.a.weight.abs().mean()}
        return sum(w * terms[name] for name, w in dataclasses.asdict(weights).items())

    return train(loss, at(3, setattr, weights, "sparsity", 2.0))


@more
def attributes_walked_over() -> Made:
    weights = types.SimpleNamespace(one=1.0)

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        for name, value in vars(weights).items():
            out = out * value if not name.startswith("_") else out
        return out

    def change(i: int) -> None:
        if i == 2:
            weights.two = 0.1
        if i == 4:
            del weights.one

    return train(loss, change)


@more
def names_of_an_object_listed() -> Made:
    class Terms:
        def term_mean(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean()

    terms = Terms()

    def loss(m: Any, b: Any) -> torch.Tensor:
        error = (m(b[0]) - b[1]).square()
        return sum(getattr(terms, name)(error) for name in dir(terms) if name.startswith("term_"))

    return train(loss, at(3, lambda: setattr(Terms, "term_max", lambda self, x: x.max())))


@more
def class_renamed() -> Made:
    class Phase:
        pass

    phase = Phase()
    return by(lambda: 0.1 if type(phase).__name__ == "Late" else 1.0, lambda: setattr(Phase, "__name__", "Late"))


@more
def function_renamed_and_documented() -> Made:
    def criterion(x: torch.Tensor) -> torch.Tensor:
        """mean"""
        return x.mean()

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = criterion((m(b[0]) - b[1]).square())
        return out * (0.1 if criterion.__name__ == "late" else 1.0) * (0.5 if criterion.__doc__ == "sum" else 1.0)

    def change(i: int) -> None:
        if i == 2:
            criterion.__name__ = "late"
        if i == 4:
            criterion.__doc__ = "sum"

    return train(loss, change, cleanup=lambda: None)


@more
def description_of_a_module_read() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 3))
    loss = lambda m, b: mse(m, b) * (0.1 if "0.3" in repr(m[1]) else 1.0)  # noqa: E731
    return train(loss, at(3, setattr, model[1], "negative_slope", 0.3), model=model)


@more
def annotations_of_a_class_read() -> Made:
    class Config:
        weight: float = 1.0

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) * sum(getattr(Config, name) for name in Config.__annotations__)

    def change(i: int) -> None:
        if i == 3:
            Config.extra = 2.0
            Config.__annotations__["extra"] = float

    return train(loss, change)


@more
def hints_of_a_class_resolved() -> Made:
    class Config:
        weight: float = 1.0

    held = {"config": Config()}

    def loss(m: Any, b: Any) -> torch.Tensor:
        hints = typing.get_type_hints(type(held["config"]))
        return mse(m, b) * sum(getattr(held["config"], name) for name, kind in hints.items() if kind is float)

    return train(loss, at(3, lambda: setattr(held["config"], "weight", 0.1)))


@more
def milestones_bisected() -> Made:
    clock = types.SimpleNamespace(epoch=0, milestones=[2, 4])
    loss = lambda m, b: mse(m, b) * 0.5 ** bisect.bisect_right(clock.milestones, clock.epoch)  # noqa: E731
    return train(loss, lambda i: setattr(clock, "epoch", i))


@more
def heap_of_losses() -> Made:
    """The worst losses so far, as a heap."""
    heap = [5.0, 7.0]

    def loss(m: Any, b: Any) -> torch.Tensor:
        return mse(m, b) * heapq.nsmallest(1, heap)[0]

    return train(loss, at(3, lambda: heapq.heappush(heap, 0.5)))


@more
def median_of_recent_numbers() -> Made:
    recent = [1.0, 2.0, 3.0]
    return by(lambda: statistics.median(recent), lambda: recent.__setitem__(1, 9.0))


@more
def tools_of_iteration() -> Made:
    lists = {"a": [1.0, 2.0], "b": [0.5]}

    def read() -> float:
        total = sum(itertools.chain.from_iterable(lists.values()))
        total += sum(x * y for x, y in itertools.zip_longest(lists["a"], lists["b"], fillvalue=0.1))
        total += list(itertools.accumulate(lists["a"]))[-1]
        return total + sum(x for x, _ in itertools.product(lists["a"], lists["b"]))

    return by(read, lambda: lists["b"].append(2.0))


@more
def groups_of_a_sorted_table() -> Made:
    rows = [("a", 1.0), ("b", 2.0), ("a", 0.5)]

    def read() -> float:
        ordered = sorted(rows, key=operator.itemgetter(0))
        return sum(max(v for _, v in g) for _, g in itertools.groupby(ordered, key=lambda row: row[0]))

    return by(read, lambda: rows.append(("c", 3.0)))


@more
def reduced_with_a_function_that_changes() -> Made:
    held = {"f": operator.add}
    numbers = [0.5, 2.0, 1.5]
    return by(lambda: functools.reduce(held["f"], numbers), lambda: held.update(f=operator.mul))


@more
def filtered_by_a_stateful_function() -> Made:
    class Above:
        limit = 0.0

        def __call__(self, x: float) -> bool:
            return x > self.limit

    above = Above()
    numbers = [0.5, 2.0, 1.5]
    return by(lambda: sum(filter(above, numbers)), lambda: setattr(above, "limit", 1.0))


@more
def sorted_by_another_key() -> Made:
    held = {"key": lambda x: x, "reverse": False}
    numbers = [0.5, 2.0, -1.5]

    def change(i: int) -> None:
        held["reverse"] = i >= 2
        if i == 4:
            held["key"] = abs

    return train(lambda m, b: mse(m, b) * sorted(numbers, key=held["key"], reverse=held["reverse"])[0] ** 2, change)


@more
def generator_made_in_the_forward() -> Made:
    """Layers yielded one by one, with a stop that moves."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.depth = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 3

        def active(self) -> Iterator[nn.Module]:
            for i, layer in enumerate(self.layers):
                if i >= self.depth:
                    return
                yield layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.active():
                x = torch.tanh(layer(x))
            return x[:, :3]

    model = Model()
    return train(model=model, change=lambda i: setattr(model, "depth", 3 - i // 2))


@more
def generator_that_is_sent_values() -> Made:
    def averages(rate: float) -> Any:
        mean = 1.0
        while True:
            mean += rate * ((yield mean) - mean)

    def loss(m: Any, b: Any) -> torch.Tensor:
        running = averages(held["rate"])
        next(running)
        out = mse(m, b)
        return running.send(out) + running.send(out.detach())

    held = {"rate": 0.5}
    return train(loss, at(3, lambda: held.update(rate=0.1)))


@more
def generator_held_across_steps() -> Made:
    """A schedule as a generator that the loop advances; the loss reads what was last drawn."""

    class Schedule:
        def __init__(self) -> None:
            self.source = (1.0 / (k + 1) for k in range(10))
            self.now = next(self.source)

    schedule = Schedule()
    after = lambda i: setattr(schedule, "now", next(schedule.source))  # noqa: E731
    return train(lambda m, b: mse(m, b) * schedule.now, after=after, state=lambda: schedule.now)


@dataclasses.dataclass
class Warm:
    weight: float


@dataclasses.dataclass
class Steady:
    weight: float
    power: int


@case
def phases_told_apart_by_match() -> Made:
    held: dict[str, Any] = {"phase": Warm(0.5)}

    def loss(m: Any, b: Any) -> torch.Tensor:
        match held["phase"]:
            case Warm(weight):
                return mse(m, b) * weight
            case Steady(weight, power) if power > 2:
                return ((m(b[0]) - b[1]).abs() ** power).mean() * weight
            case Steady(weight=weight):
                return F.l1_loss(m(b[0]), b[1]) * weight
            case _:
                return mse(m, b) * 0.0

    phases = {1: Warm(0.3), 2: Steady(1.0, 3), 3: Steady(1.0, 1), 4: None}
    return train(loss, lambda i: held.update(phase=phases.get(i, held["phase"])))


@more
def batches_told_apart_by_match() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        match b:
            case {"x": x, "y": y, "weight": w}:
                return F.mse_loss(m(x), y) * w
            case {"x": x, "y": y}:
                return F.mse_loss(m(x), y)
            case [x, y, *_]:
                return F.l1_loss(m(x), y)

    made = pairs()
    batches: list[Any] = [{"x": x, "y": y} for x, y in made]
    batches[2]["weight"] = 0.1
    batches[4] = [*made[4], "more"]
    return train(loss, batches=batches)


@case
def match_arguments_of_a_class_change() -> Made:
    class Phase:
        __match_args__ = ("one",)
        one, two = 1.0, 0.1

    phase = Phase()

    def loss(m: Any, b: Any) -> torch.Tensor:
        match phase:
            case Phase(weight):
                return mse(m, b) * weight

    return train(loss, at(3, setattr, Phase, "__match_args__", ("two",)))


@more
def contexts_chosen_by_a_flag() -> Made:
    flags = {"half": False}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if flags["half"] else contextlib.nullcontext():
            out = m(b[0])
        return F.mse_loss(out.float(), b[1])

    return train(loss, lambda i: flags.update(half=i in (2, 3)))


@more
def contexts_on_a_stack() -> Made:
    flags = {"frozen": False}

    def loss(m: Any, b: Any) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            if flags["frozen"]:
                stack.enter_context(torch.no_grad())
            hidden = torch.tanh(m.a(b[0]))
        return F.mse_loss(m.b(hidden), b[1])

    return train(loss, lambda i: flags.update(frozen=i % 2 == 1))


@more
def missing_terms_suppressed() -> Made:
    terms: dict[str, float] = {}

    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        with contextlib.suppress(KeyError):
            out = out * terms["factor"]
        return out

    return train(loss, at(3, lambda: terms.update(factor=0.1)))


@more
def settings_copied_in_the_loss() -> Made:
    config = types.SimpleNamespace(weight=1.0, table={"a": 1.0})

    def loss(m: Any, b: Any) -> torch.Tensor:
        local = copy.copy(config)
        local.weight = local.weight * 0.5
        return mse(m, b) * local.weight * local.table["a"]

    def change(i: int) -> None:
        if i == 2:
            config.weight = 4.0
        if i == 4:
            config.table["a"] = 0.1

    return train(loss, change, state=lambda: config.weight)


@more
def settings_deeply_copied_in_the_loss() -> Made:
    config = {"weights": [1.0, 2.0]}

    def loss(m: Any, b: Any) -> torch.Tensor:
        local = copy.deepcopy(config)
        local["weights"][0] *= 0.5
        return mse(m, b) * sum(local["weights"])

    return train(loss, at(3, lambda: config["weights"].append(3.0)), state=lambda: config)


@more
def members_of_an_enum_with_attributes() -> Made:
    class Phase(enum.Enum):
        WARM = "warm"
        LATE = "late"

        def __init__(self, _: str) -> None:
            self.weight = 1.0

    held = {"phase": Phase.WARM}

    def change(i: int) -> None:
        if i == 2:
            Phase.WARM.weight = 0.1
        if i == 4:
            held["phase"] = Phase("late")

    return train(lambda m, b: mse(m, b) * held["phase"].weight, change)


@more
def enum_found_by_its_value() -> Made:
    class Kind(enum.IntEnum):
        SQUARE = 2
        CUBE = 3

    held = {"power": 2}
    loss = lambda m, b: ((m(b[0]) - b[1]).abs() ** Kind(held["power"])).mean()  # noqa: E731
    return train(loss, at(3, lambda: held.update(power=3)))


class Plugin:
    registry: dict[str, type] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        Plugin.registry[cls.__name__] = cls

    def term(self, m: Any) -> torch.Tensor:
        raise NotImplementedError


@more
def plugins_registered_by_their_definition() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = mse(m, b)
        for plugin in Plugin.registry.values():
            out = out + plugin().term(m)
        return out

    def define() -> None:
        class Decay(Plugin):
            def term(self, m: Any) -> torch.Tensor:
                return m.a.weight.square().sum()

    return train(loss, at(3, define), cleanup=Plugin.registry.clear)


@more
def subclasses_of_a_class_counted() -> Made:
    class Base:
        pass

    kept = []

    def define() -> None:
        class Child(Base):
            pass

        kept.append(Child)

    return by(lambda: 1.0 / (1 + len(Base.__subclasses__())), define)


@more
def weak_proxy_of_a_config() -> Made:
    class Config:
        weight = 1.0

    config = Config()
    proxy = weakref.proxy(config)
    return by(lambda: proxy.weight, lambda: setattr(config, "weight", 0.1))


@more
def weak_values_that_die() -> Made:
    class Term:
        weight = 0.5

    held = [Term(), Term()]
    table: Any = weakref.WeakValueDictionary({"a": held[0], "b": held[1]})
    return by(lambda: sum(t.weight for t in table.values()), held.pop, state=lambda: len(table))


@more
def text_formatted_and_compared() -> Made:
    class Stage:
        def __init__(self) -> None:
            self.number = 1

        def __str__(self) -> str:
            return f"stage-{self.number}"

    stage = Stage()
    return by(lambda: 0.1 if str(stage) == "stage-2" else 1.0, lambda: setattr(stage, "number", 2))


@more
def template_filled_in() -> Made:
    held = {"name": "a"}
    template = string.Template("$name.weight")

    def loss(m: Any, b: Any) -> torch.Tensor:
        wanted = template.substitute(held)
        return mse(m, b) + 0.1 * dict(m.named_parameters())[wanted].square().sum()

    return train(loss, at(3, lambda: held.update(name="b")))


@more
def weight_found_by_its_path() -> Made:
    held = {"path": "a.weight"}
    loss = lambda m, b: mse(m, b) + 0.1 * m.get_parameter(held["path"]).square().sum()  # noqa: E731
    return train(loss, at(3, lambda: held.update(path="b.weight")))


@more
def layer_found_by_its_path() -> Made:
    model = nn.ModuleDict({"one": nn.ModuleDict({"x": nn.Linear(6, 3)}), "two": nn.ModuleDict({"x": nn.Linear(6, 3)})})
    held = {"path": "one.x"}
    loss = lambda m, b: F.mse_loss(m.get_submodule(held["path"])(b[0]), b[1])  # noqa: E731

    return train(loss, at(3, lambda: held.update(path="two.x")), model=model)
