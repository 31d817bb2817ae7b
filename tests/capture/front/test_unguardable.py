"""Dictionaries whose attributes Dynamo does not look at while they are empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.twins import Side, class_batches, classify, interpreted, small_mlp
from torch import nn

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
