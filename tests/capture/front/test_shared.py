"""Results that are views of arguments: what an operator wrote to by `out=` is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, small_mlp
from torch import nn

from wholestep.errors import WholestepWarning

BATCHES = class_batches(3)


def test_a_buffer_that_is_written_by_out() -> None:
    def make() -> Side:
        model = small_mlp()
        model.register_buffer("direction", torch.ones(6))

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                model.direction = F.normalize(model[0].weight.sum(1), dim=0, out=model.direction)
            return classify(model, batch) + (model[0].bias * model.direction.clone()).sum()

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)

    twins = Twins(make, BATCHES[0], check="off")
    twins.train(BATCHES)
    assert torch.equal(twins.ours.model.direction, twins.theirs.model.direction)
    assert twins.step.rung == "whole step", twins.step.explain()


class Averaged(nn.Module):
    """Memory that is given to a tensor whose old memory somebody still reads: `old = table.data`, a view of it, the tensor."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        old, self.kept = self.read(self, hidden), self.table.data
        self.table.data = 0.9 * self.table.data + 0.1 * hidden.detach().mean(0)
        norm = self.table.norm()
        self.table.data = self.table.data * 2
        return (hidden * old * norm).square().mean() + (hidden * self.table).sum()


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize(
    "read",
    [
        lambda net, hidden: net.table.data,
        lambda net, hidden: net.table.detach().view(2, 2).flatten(),
        lambda net, hidden: net.table.view(2, 2).flatten(),
        lambda net, hidden: net.table + 1,
    ],
)
def test_who_read_a_tensor_before_it_is_given_other_memory_keeps_what_it_read(read: Any, check: str) -> None:
    def make() -> Side:
        model = Averaged(read)
        return Side(model, torch.optim.SGD(model.layer.parameters(), lr=0.01), lambda model, batch: model(batch[0]))

    twins = Twins(make, BATCHES[0], check=check)
    twins.train(BATCHES)
    assert torch.equal(twins.ours.model.table, twins.theirs.model.table)
    assert torch.equal(twins.ours.model.kept, twins.theirs.model.kept)
    assert twins.step.rung == "whole step", twins.step.explain()


def test_what_autograd_keeps_of_a_tensor_that_is_given_other_memory_is_eagers() -> None:
    """Its backward reads the new one."""

    def make() -> Side:
        model = Averaged(lambda net, hidden: hidden * net.table)
        return Side(model, torch.optim.SGD(model.layer.parameters(), lr=0.01), lambda model, batch: model(batch[0]))

    with pytest.warns(WholestepWarning, match="given other memory inside of the loss"):
        twins = Twins(make, BATCHES[0], check="off")
        twins.train(BATCHES)
