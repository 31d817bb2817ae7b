"""One hash for what is printed once and for what is compiled once; what else it has to tell apart stands in test_structure.py."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from wholestep.graph.equality import describe_call, describe_value, equality_hash
from wholestep.graph.structure import external_inputs, structural_key


def traced(rows: int = 2) -> list[fx.Node]:
    def twice(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            x = (x * 2.0 + y).relu()
        return x

    module = make_fx(twice, tracing_mode="fake")(torch.zeros(rows, 3), torch.zeros(rows, 3))
    return [node for node in module.graph.nodes if node.op == "call_function"]


def test_equal_runs_are_equal_unless_they_return_other_values() -> None:
    first, second = traced()[:3], traced()[3:]
    whole = [equality_hash(external_inputs(run), run, run[-1:]) for run in (first, second)]
    assert whole[0] == whole[1] != equality_hash(external_inputs(first), first, first[1:])
    assert structural_key(first) == structural_key(second) == equality_hash(external_inputs(first), first)


def test_one_call_by_the_kinds_of_its_arguments() -> None:
    mul, add, _, again, _, _ = traced()
    assert describe_call(mul) == describe_call(again) != describe_call(add)
    assert describe_call(mul) != describe_call(traced(rows=5)[0])


def test_values_in_plain_text() -> None:
    kind = (("2", "3"), ("3", "1"), "torch.float32", "cpu")
    assert describe_value([torch.zeros(2, 3), None, 7]) == (kind, "None", "7")
