"""Rewrites keep what a graph computes: every match replaced by the pattern itself, on random graphs that write in place."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx

from wholestep.schedule.match import apart, matches
from wholestep.schedule.pattern import trace_pattern
from wholestep.schedule.rewrite import Found, replacer

PATTERNS: list[Any] = [
    lambda x: torch.tanh(torch.relu(x)),
    lambda x, y: torch.relu(x + y),
    lambda x, y: (torch.relu(x), x * y),
    lambda x: torch.relu(x.view(-1)).view(2, 3),
    lambda x, y: (x + y) * x,
    lambda x, y: (torch.tanh(x), torch.tanh(x + y)),
    lambda x: x.view(3, 2),
]


def random_graph(choose: random.Random) -> fx.GraphModule:
    """Values of six numbers; a third of the calls write to one of them, or look at one."""
    graph = fx.Graph()
    values = [graph.placeholder(name) for name in "abc"]
    for _ in range(choose.randint(6, 14)):
        x, y = choose.choice(values), choose.choice(values)
        kind = choose.randint(0, 9)
        if kind <= 1:
            made = graph.call_function(torch.relu, (x,))
        elif kind == 2:
            made = graph.call_function(torch.tanh, (x,))
        elif kind <= 4:
            made = graph.call_function(torch.add, (x, y))
        elif kind == 5:
            made = graph.call_function(torch.mul, (x, y))
        elif kind == 6:
            flat = graph.call_method("view", (x, -1))
            made = graph.call_method("view", (graph.call_function(torch.relu, (flat,)), 2, 3))
        elif kind == 7:
            made = graph.call_method("view", (x, 2, 3))  # shares memory with x
        elif kind == 8:
            made = graph.call_method("add_", (x, 1.0))
        else:
            made = graph.call_method("mul_", (x, 0.5))
        values.append(made)
    graph.output(tuple(value for value in values[3:] if not value.users))
    return fx.GraphModule({}, graph)


def results(module: fx.GraphModule) -> list[torch.Tensor]:
    """What it returns, and what it leaves in its inputs."""
    given = [torch.arange(6.0, dtype=torch.float64).view(2, 3) * s - 1.0 for s in (0.3, -0.7, 1.1)]
    found = module(*given)
    return [*(value.clone() for value in found), *given]


def test_a_match_replaced_by_the_pattern_changes_nothing() -> None:
    choose = random.Random(5)
    replaced = refused = 0
    patterns = [(function, trace_pattern(function)) for function in PATTERNS]
    for _ in range(500):
        module = random_graph(choose)
        function, pattern = choose.choice(patterns)
        before = results(module)
        renamed: dict[fx.Node, fx.Node] = {}
        for match in apart(matches(module.graph, pattern)):
            replacer("line 1", pattern, function)(module, Found("", None, match), renamed)
            replaced += 1
        refused += not matches(module.graph, pattern)
        module.graph.lint()
        module.recompile()
        after = results(module)
        assert len(before) == len(after) and all(map(torch.equal, before, after)), str(module.graph)
    assert replaced > 60 and refused > 200
