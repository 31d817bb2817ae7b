"""The generated driver frees values at their last use and leaves nothing behind."""

from __future__ import annotations

import weakref

import torch
from torch import fx

from wholestep.lower.driver import Statement, build_driver


class Thing:
    """Can be weakly referenced, which a tensor's storage cannot."""


def chain():
    """a -> b -> c -> d as graph nodes."""
    graph = fx.Graph()
    return [graph.placeholder(name) for name in "abcd"]


def test_values_die_at_their_last_use():
    a, b, c, d = chain()
    alive: dict[str, weakref.ref] = {}

    def make(name):
        def call(*args):
            thing = Thing()
            alive[name] = weakref.ref(thing)
            return thing

        return call

    def last(thing_c):
        assert alive["b"]() is None
        assert alive["c"]() is not None
        return 7

    statements = [
        Statement(make("b"), (a,), {}, (b,)),
        Statement(make("c"), (b,), {}, (c,)),
        Statement(last, (c,), {}, (d,)),
    ]
    driver = build_driver([a], statements, [d], {})
    assert driver.function([1]) == (7,)
    assert alive["c"]() is None


def test_a_boxed_call_owns_its_arguments():
    a, b, c, _ = chain()
    alive: list[weakref.ref] = []

    def make(_):
        thing = Thing()
        alive.append(weakref.ref(thing))
        return thing

    def region(args):
        args.clear()
        assert alive[0]() is None
        return (1,)

    statements = [Statement(make, (a,), {}, (b,)), Statement(region, (b,), {}, (c,), unpack=True, boxed=True)]
    assert build_driver([a], statements, [c], {}).function([0]) == (1,)


def test_every_local_is_deleted_but_what_is_returned(traced):
    from wholestep.lower import lower_interpret

    source = lower_interpret(traced("mlp").graph).describe()["driver"]
    lines = [line.strip() for line in source.splitlines()]
    bound: set[str] = set()
    for line in lines:
        if line.startswith("del "):
            bound -= set(line[4:].split(", "))
        elif " = " in line and not line.startswith(("return", "def")):
            bound |= {name.strip() for name in line.split(" = ")[0].split(",")} - {"", "_", "args"}
    returned = lines[-1].removeprefix("return (").rstrip(", )")
    assert bound == {returned}


def test_literals_survive(traced):
    a, b, *_ = chain()
    got = []
    values = (float("inf"), -0.0, torch.float32, [a, None, True], {"k": a}, slice(a, None, 2), (a,), "it's")
    build_driver([a], [Statement(lambda *x, **k: got.append((x, k)), values, {"w": (1, a)}, (b,))], [], {}).function(
        [5]
    )
    expected = (float("inf"), -0.0, torch.float32, [5, None, True], {"k": 5}, slice(5, None, 2), (5,), "it's")
    assert got == [(expected, {"w": (1, 5)})]


def test_consuming_driver_empties_its_list():
    a, b, *_ = chain()
    inputs = [3]
    driver = build_driver([a], [Statement(lambda x: x + 1, (a,), {}, (b,))], [b], {}, consume=True)
    assert driver.function(inputs) == (4,)
    assert inputs == []
