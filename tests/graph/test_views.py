"""Which operators hand back memory of their arguments, asked of the operators themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from wholestep.graph.views import (
    UNDECLARED_VIEWS,
    WHOLE_VIEWS,
    declares_view,
    is_cheap_view,
    is_cheap_view_or_entry,
    is_partial_view,
    shares_memory,
)

aten = torch.ops.aten
X = torch.zeros(4, 6)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.view.default, (X, [24])),
    (aten._unsafe_view.default, (X, [24])),
    (aten.unsafe_split.Tensor, (X, 2)),
    (aten.unsafe_split_with_sizes.default, (X, [1, 3])),
    (aten.split.Tensor, (X, 2)),
    (aten.slice.Tensor, (X, 0, 1, 3)),
    (aten.add_.Tensor, (X, 0)),
    (aten.add.Tensor, (X, 0)),
    (aten.clone.default, (X,)),
    (aten.max.dim, (X, 0)),
]


@pytest.mark.parametrize(("target", "arguments"), CALLS, ids=[str(target) for target, _ in CALLS])
def test_what_is_said_is_so(target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    result = target(*arguments)
    results = result if isinstance(result, list | tuple) else [result]
    shared = [r.untyped_storage().data_ptr() == X.untyped_storage().data_ptr() for r in results]
    assert shares_memory(target) == all(shared) == any(shared)


def test_a_schema_may_keep_it_to_itself() -> None:
    assert shares_memory(aten._unsafe_view.default) and not declares_view(aten._unsafe_view.default)
    assert "aten::_unsafe_view" in UNDECLARED_VIEWS and declares_view(aten.split.Tensor)


def test_what_is_no_operator() -> None:
    assert shares_memory(operator.getitem) and not declares_view(operator.getitem)
    for other in ("x", None, operator.add, torch.add):
        assert not shares_memory(other) and not declares_view(other)


def test_narrower_questions() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cut = graph.call_function(aten.split.Tensor, (x, 2))
    entry = graph.call_function(operator.getitem, (cut, 0))
    turned = graph.call_function(aten.t.default, (entry,))
    added = graph.call_function(aten.add.Tensor, (turned, 1))
    nodes = [x, cut, entry, turned, added]
    assert [is_cheap_view(node) for node in nodes] == [False, True, False, True, False]
    assert [is_cheap_view_or_entry(node) for node in nodes] == [False, True, True, True, False]
    assert [is_partial_view(node) for node in nodes] == [False, True, False, False, False]


def test_views_of_the_whole_are_cheap_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in WHOLE_VIEWS:
        node = graph.call_function(target, (x,))  # type: ignore[arg-type]
        assert shares_memory(target) and is_cheap_view(node) and not is_partial_view(node)
