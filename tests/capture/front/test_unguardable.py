"""Dictionaries whose attributes Dynamo does not look at while they are empty; what a function that nobody traces reads."""

from __future__ import annotations

import itertools
import types
import warnings
from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, class_batches, classify, interpreted, small_mlp
from torch import nn

from wholestep.capture.front.unguardable import is_users_class, what_it_reads
from wholestep.errors import WholestepWarning

BATCH = class_batches(1)[0]


class Options(dict):
    scale = 1.0

    def weight(self) -> float:
        return self.get("weight", 1.0)


def side(options: Any, read: Any) -> Side:
    model = small_mlp()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return classify(model, batch) * read(options)

    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)


def test_attributes_of_an_empty_dictionary_are_refused_by_name() -> None:
    with pytest.warns(WholestepWarning, match="an empty dictionary of class Options .* give it a key"):
        step = interpreted(side(Options(), lambda o: o.scale), BATCH)
        step(BATCH)
    assert step.rung != "whole step"


@pytest.mark.parametrize("read", [lambda o: o.weight(), lambda o: len(o) + 1.0])
def test_keys_and_methods_of_one_are_not(read: Any) -> None:
    assert interpreted(side(Options(), read), BATCH, check="off").rung == "whole step"
    assert interpreted(side(Options(other=1), lambda o: o.scale), BATCH, check="off").rung == "whole step"


t = [1.0]
"""A name that tensors have a method of."""


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.t()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * t[0]


def scaled_inside(x: torch.Tensor) -> Any:
    return (lambda y: y * t[0])(x)


def scaled_in_a_list(x: torch.Tensor) -> Any:
    return [row * t[0] for row in x]


def scaled_by_another(x: torch.Tensor) -> Any:
    return [scaled(row) for row in x]


def test_variables_are_found_wherever_they_are_read() -> None:
    assert what_it_reads(turned) is None
    for function in (scaled, scaled_inside, scaled_in_a_list, scaled_by_another):
        assert what_it_reads(function) == "t", function


def test_classes_of_python_are_not_the_users() -> None:
    """Those of builtin modules have no file, as classes have none that were typed at a prompt."""
    typed: dict[str, Any] = {"__name__": "typed"}
    exec("class Typed: pass", typed)
    assert is_users_class(Options) and is_users_class(typed["Typed"])
    for cls in (types.MethodType, dict, itertools.count, types.SimpleNamespace, torch.Tensor, nn.Linear):
        assert not is_users_class(cls), cls


def test_filters_of_warnings_are_refused_by_name() -> None:
    with pytest.warns(WholestepWarning, match="reads warnings.filters"):
        step = interpreted(side(None, lambda _: 1.0 + len(warnings.filters)), BATCH)
        step(BATCH)
    assert step.rung == "eager"
