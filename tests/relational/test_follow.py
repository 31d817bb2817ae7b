"""What a message function reads may change between two calls: the next call computes with what it is then, or refuses loudly."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.relational.graphs import made
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import wholestep
from wholestep import relational as rel
from wholestep.errors import UnsupportedModel
from wholestep.relational.layer import MOST_PROGRAMS

HERE = sys.modules[__name__]
SCALE = 1.0
Way = tuple[Callable[[Any, Any], Tensor], Callable[[float], None]]
"""(a message function, what changes the value that it reads)"""


def sent(e: Any, p: Any, scale: Any = 1.0) -> Tensor:
    return torch.tanh((e.src.x.unsqueeze(1) @ p.W[e.type]).squeeze(1)) * scale


def doubled(x: Tensor) -> Tensor:
    return x * 2.0


def halved(x: Tensor) -> Tensor:
    return x * 0.5


class Kind(enum.Enum):
    LOW = 0.5
    HIGH = 2.0


class Holder:
    shared = 1.0

    def __init__(self) -> None:
        self.scale, self.training = 1.0, True
        self.inner = types.SimpleNamespace(scale=1.0)

    def by_attribute(self, e: Any, p: Any) -> Tensor:
        return sent(e, p, self.scale)

    def by_training(self, e: Any, p: Any) -> Tensor:
        return sent(e, p) + F.dropout(e.dst.x.sum(-1, keepdim=True), 1.0, self.training)

    def by_nested(self, e: Any, p: Any) -> Tensor:
        return sent(e, p, self.inner.scale)

    def by_class(self, e: Any, p: Any) -> Tensor:
        return sent(e, p, self.shared)

    @property
    def made(self) -> float:
        return self.scale * 2

    def by_property(self, e: Any, p: Any) -> Tensor:
        return sent(e, p, self.made)

    def by_method(self, e: Any, p: Any) -> Tensor:
        return self.times(sent(e, p))

    def times(self, x: Tensor) -> Tensor:
        return x * self.scale


class Called(nn.Module):
    """A module as a message function, with a child that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.scale = nn.Dropout(1.0), 1.0

    def forward(self, e: Any, p: Any) -> Tensor:
        return sent(e, p, self.scale) + self.drop(e.dst.x.sum(-1, keepdim=True))


def setting(holder: Any, name: str) -> Callable[[float], None]:
    return lambda value: setattr(holder, name, value)


def closure() -> Way:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda e, p: sent(e, p, scale), change


def counter() -> Way:
    """An integer, which Dynamo would keep as a symbol."""
    count = 3

    def change(value: float) -> None:
        nonlocal count
        count = int(value * 10)

    return lambda e, p: sent(e, p, 1 / count), change


def branch() -> Way:
    holder = Holder()

    def message(e: Any, p: Any) -> Tensor:
        return sent(e, p) if holder.scale > 1 else -sent(e, p)

    return message, setting(holder, "scale")


def the_global() -> Way:
    return lambda e, p: sent(e, p, SCALE), setting(HERE, "SCALE")


def module_attribute() -> Way:
    module = Called()
    return module, setting(module, "scale")


def child_training() -> Way:
    module = Called()
    return module, lambda value: module.train(value > 1) and None


def child_probability() -> Way:
    module = Called()
    return module, lambda value: setattr(module.drop, "p", float(value > 1))


def self_training() -> Way:
    holder = Holder()
    return holder.by_training, lambda value: setattr(holder, "training", value > 1)


def self_attribute() -> Way:
    holder = Holder()
    return holder.by_attribute, setting(holder, "scale")


def nested_config() -> Way:
    holder = Holder()
    return holder.by_nested, setting(holder.inner, "scale")


def swapped_config() -> Way:
    holder = Holder()
    return holder.by_nested, lambda value: setattr(holder, "inner", types.SimpleNamespace(scale=value))


def class_attribute() -> Way:
    return Holder().by_class, setting(Holder, "shared")


def a_property() -> Way:
    holder = Holder()
    return holder.by_property, setting(holder, "scale")


def other_method() -> Way:
    holder = Holder()
    return holder.by_method, setting(holder, "scale")


def replaced_method() -> Way:
    holder = Holder()
    return holder.by_method, lambda value: setattr(Holder, "times", lambda self, x: x * value)


def list_element() -> Way:
    values = [0.0, 1.0]
    return lambda e, p: sent(e, p, values[1]), lambda value: values.__setitem__(1, value)


def dict_value() -> Way:
    values = {"a": {"scale": 1.0}}
    return lambda e, p: sent(e, p, values["a"]["scale"]), lambda value: values["a"].update(scale=value)


def missing_key() -> Way:
    values: dict[str, float] = {}

    def change(value: float) -> None:
        values.clear()
        if value > 1:
            values["scale"] = value

    return lambda e, p: sent(e, p, values.get("scale", 1.0)), change


def length() -> Way:
    values = [1.0]
    return lambda e, p: sent(e, p, len(values)), lambda value: values.__setitem__(slice(None), [1.0] * int(4 * value))


def enumeration() -> Way:
    holder = types.SimpleNamespace(kind=Kind.LOW)
    return (
        lambda e, p: sent(e, p, holder.kind.value),
        lambda value: setattr(holder, "kind", Kind.HIGH if value > 1 else Kind.LOW),
    )


def default_argument() -> Way:
    def message(e: Any, p: Any, scale: float = 1.0) -> Tensor:
        return sent(e, p, scale)

    return message, lambda value: setattr(message, "__defaults__", (value,))


def a_partial() -> Way:
    values = {"scale": 1.0}

    def message(values: dict, e: Any, p: Any) -> Tensor:
        return sent(e, p, values["scale"])

    return functools.partial(message, values), lambda value: values.update(scale=value)


def keywords_of_a_partial() -> Way:
    message = functools.partial(sent, scale=1.0)
    return message, lambda value: message.keywords.update(scale=value)


def swapped_helper() -> Way:
    helper = doubled

    def change(value: float) -> None:
        nonlocal helper
        helper = doubled if value > 1 else halved

    return lambda e, p: helper(sent(e, p)), change


def swapped_code() -> Way:
    def helper(x: Tensor) -> Tensor:
        return x

    def change(value: float) -> None:
        helper.__code__ = (doubled if value > 1 else halved).__code__

    return lambda e, p: helper(sent(e, p)), change


def numpy_number() -> Way:
    holder = types.SimpleNamespace(scale=np.float64(1.0))
    return lambda e, p: sent(e, p, holder.scale), lambda value: setattr(holder, "scale", np.float64(value))


def environment() -> Way:
    import os

    def message(e: Any, p: Any) -> Tensor:
        return sent(e, p, float(os.environ.get("WHOLESTEP_TEST_SCALE", "1")))

    return message, lambda value: os.environ.__setitem__("WHOLESTEP_TEST_SCALE", str(value))


def cached() -> Way:
    holder = Holder()

    @functools.lru_cache
    def scale() -> float:
        return holder.scale

    def change(value: float) -> None:
        holder.scale = value
        scale.cache_clear()

    return lambda e, p: sent(e, p, scale()), change


def a_tensor() -> Way:
    scale = torch.ones(())
    return lambda e, p: sent(e, p, scale), lambda value: scale.fill_(value) and None


WAYS = [
    closure, counter, branch, the_global, module_attribute, child_training, child_probability, self_training, self_attribute,
    nested_config, swapped_config, class_attribute, a_property, other_method, replaced_method, list_element, dict_value,
    missing_key, length, enumeration, default_argument, a_partial, keywords_of_a_partial, swapped_helper, swapped_code,
    numpy_number, environment, cached, a_tensor,
]  # fmt: skip
REFUSED = {numpy_number: "from outside", a_tensor: "from outside.*give it as a parameter", cached: "lru_cache"}
VALUES = (0.5, 2.0, 2.0, 0.5)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HERE, "SCALE", 1.0)
    monkeypatch.setattr(Holder, "shared", 1.0)
    monkeypatch.setattr(Holder, "times", Holder.times)
    monkeypatch.setenv("WHOLESTEP_TEST_SCALE", "1")


def weight_of(graph: rel.RelGraph) -> nn.Parameter:
    return nn.Parameter(torch.randn(graph.num_relations, 6, 4, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_eager_call_reads_what_is_there_now(way: Callable[[], Way]) -> None:
    graph, (message, change) = made("hubs"), way()
    x, params, layer = torch.randn(graph.num_nodes, 6), {"W": weight_of(graph)}, rel.layer(message)
    wanted = []
    for value in VALUES:
        change(value)
        wanted.append(layer.reference(graph, {"x": x}, params))
        if way in REFUSED:
            with pytest.raises(UnsupportedModel, match=REFUSED[way]):
                layer(graph, {"x": x}, params)
        else:
            torch.testing.assert_close(layer(graph, {"x": x}, params), wanted[-1])
    assert not torch.equal(wanted[0], wanted[1])  # the way does change something


class Net(nn.Module):
    def __init__(self, graph: rel.RelGraph, layer: Any) -> None:
        super().__init__()
        self.W, self.head, self.layer = weight_of(graph), nn.Linear(4, 3), layer

    def forward(self, graph: rel.RelGraph, x: Tensor) -> Tensor:
        return self.head(self.layer(graph, {"x": x}, {"W": self.W}))


def trained(
    layer: Any, graph: rel.RelGraph, change: Callable[[float], None], values: Any = VALUES, **options: Any
) -> tuple[Any, Any, Any]:
    """Losses, parameters, and the step where one is compiled."""
    torch.manual_seed(0)
    model = Net(graph, layer)
    batch = torch.randn(graph.num_nodes, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(graph, x).square().mean()

    change(1.0)
    step = wholestep.compile(model, loss, optimizer, batch, cache=False, **options) if options else None
    losses = []
    for value in values:
        change(value)
        if step is not None:
            losses.append(step(batch).clone())
            continue
        optimizer.zero_grad()
        now = loss(model, batch)
        now.backward()
        optimizer.step()
        losses.append(now.detach())
    return losses, [p.detach().clone() for p in model.parameters()], step


IN_EVERY_RUN = {closure, the_global, self_training, nested_config, dict_value, swapped_helper, a_tensor}
CAPTURED = [way if way in IN_EVERY_RUN else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]


@pytest.mark.parametrize("way", CAPTURED, ids=lambda way: way.__name__)
def test_a_captured_step_reads_what_is_there_now(way: Callable[[], Way]) -> None:
    graph, (message, change) = made("hubs"), way()
    layer = rel.layer(message)
    wanted = trained(layer.reference, graph, change)
    if way in REFUSED:
        with pytest.raises(UnsupportedModel, match=REFUSED[way]):
            trained(layer, graph, change, backend="interpret")
        return
    found = trained(layer, graph, change, backend="interpret")
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2].rung == "whole step" and not found[2].falls
    assert not torch.allclose(wanted[0][0], wanted[0][1])


def test_compiled_regions_too() -> None:
    graph, (message, change) = made("hubs"), child_training()
    layer = rel.layer(message)
    wanted, found = trained(layer.reference, graph, change), trained(layer, graph, change, backend="inductor")
    # each step begins where the one before it ended, so what compiled sums over a hub round otherwise adds up
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-5, atol=1e-5)
    assert found[2].rung == "whole step"


@pytest.mark.slow
def test_a_number_that_never_stays_is_told() -> None:
    """Annealing: every value is a program of its own, so the step is not captured for ever, and says why."""
    graph, (message, change), values = made("hubs"), closure(), [1 - 0.05 * i for i in range(9)]
    layer = rel.layer(message)
    wanted = trained(layer.reference, graph, change, values)
    with pytest.warns(wholestep.WholestepWarning, match="is another one again and again"):
        found = trained(layer, graph, change, values, backend="interpret")
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2].falls


def test_what_the_loss_has_changed_before() -> None:
    """Python's own objects change only after a captured step has run; the message function sees the new value all the same."""
    graph, holder = made("hubs"), Holder()
    layer = rel.layer(holder.by_attribute)

    def run(which: Any) -> Callable[..., Tensor]:
        def both(*args: Any) -> Tensor:
            holder.scale = 3.0
            first = which(*args)
            holder.scale = 0.25
            return first * which(*args)

        return both

    wanted = trained(run(layer.reference), graph, lambda value: None)
    found = trained(run(layer), graph, lambda value: None, backend="interpret")
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2].rung == "whole step" and holder.scale == 0.25


def test_several_shapes_in_one_step() -> None:
    """One layer, not called before: wide features first, narrow ones then, and again."""
    graph = made("hubs")

    def run(which: Any) -> Callable[..., Tensor]:
        def both(graph: rel.RelGraph, nodes: Any, params: Any) -> Tensor:
            wide = which(graph, nodes, params)
            return which(graph, {"x": wide[:, :2]}, {"W": params["W"][:, :2]}) + which(graph, nodes, params)

        return both

    layer = rel.layer(sent)
    wanted = trained(run(layer.reference), graph, lambda value: None)
    found = trained(run(layer), graph, lambda value: None, backend="interpret")
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2].rung == "whole step" and not found[2].falls


def test_inside_of_a_checkpoint() -> None:
    graph, (message, change) = made("hubs"), self_attribute()
    layer = rel.layer(message)

    def run(*args: Any) -> Tensor:
        return checkpoint(layer, *args, use_reentrant=False)

    wanted, found = trained(layer.reference, graph, change), trained(run, graph, change, backend="interpret")
    torch.testing.assert_close(found[:2], wanted[:2])
    assert found[2].rung == "whole step"


def test_torch_compile_guards_it_as_well() -> None:
    graph, (message, change) = made("hubs"), self_attribute()
    x, params, layer = torch.randn(graph.num_nodes, 6), {"W": weight_of(graph)}, rel.layer(message)
    compiled = torch.compile(lambda x: layer(graph, {"x": x}, params), backend="aot_eager", fullgraph=True)
    for value in VALUES:
        change(value)
        torch.testing.assert_close(compiled(x), layer.reference(graph, {"x": x}, params))


def counts() -> Callable[[Any, Any], Tensor]:
    calls = 0

    def message(e: Any, p: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sent(e, p)

    return message


def keeps() -> Callable[[Any, Any], Tensor]:
    kept: list[Tensor] = []

    def message(e: Any, p: Any) -> Tensor:
        kept.append(sent(e, p))
        return kept[-1]

    return message


def stores() -> Callable[[Any, Any], Tensor]:
    holder = Holder()

    def message(e: Any, p: Any) -> Tensor:
        holder.last = sent(e, p)
        return holder.last

    return message


def own_weights() -> Callable[[Any, Any], Tensor]:
    linear = nn.Linear(4, 4)
    return lambda e, p: linear(sent(e, p))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (counts, "changes something outside of it"), (keeps, "changes something outside of it"),
        (stores, "changes something outside of it"), (own_weights, "reads a tensor from outside: .*weight.*test_follow.py"),
        (lambda: lambda e, p: sent(e, p, np.random.rand()), "cannot be followed|from outside"),
        (lambda: lambda e, p: sent(e, p, len(open(__file__).read())), "cannot be followed.*test_follow.py"),  # noqa: SIM115
        (lambda: lambda e, p: (sent(e, p), sent(e, p)), "does not return a tensor with a row per edge"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_what_a_program_cannot_repeat_is_refused(make: Any, told: str, captured: bool) -> None:
    graph = made("hubs")
    layer = rel.layer(make())
    with pytest.raises(UnsupportedModel, match=told):
        if captured:
            trained(layer, graph, lambda value: None, backend="interpret")
        else:
            layer(graph, {"x": torch.randn(graph.num_nodes, 6)}, {"W": weight_of(graph)})


def test_programs_do_not_pile_up() -> None:
    graph, (message, change) = made("plain"), closure()
    x, params, layer = torch.randn(graph.num_nodes, 6), {"W": weight_of(graph)}, rel.layer(message)
    for number in range(MOST_PROGRAMS + 2):
        change(float(number))
        layer(graph, {"x": x}, params)
    assert [len(known) for known in layer.programs.values()] == [MOST_PROGRAMS]
