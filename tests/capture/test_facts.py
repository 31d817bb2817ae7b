"""Sizes that are read from tensors: `int(batch.max()) + 1` graphs, a place in a queue, lengths of a split. One graph for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wholestep

LossFn = Callable[[nn.Module, Any], Tensor]
GRAPHS = {2: [0, 0, 1, 1, 1], 3: [0, 0, 1, 2, 2], 4: [0, 1, 2, 3, 3]}
"""Number of graphs -> the graph of each of five nodes."""
LENGTHS = ([1, 2, 2], [2, 1, 2], [1, 1, 3], [3, 1, 1], [2, 2, 1])


def batches() -> Iterator[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(0)
    for i, graphs in enumerate((3, 3, 2, 4, 3)):
        yield {
            "x": torch.randn(5, 3, generator=source), "graph": torch.tensor(GRAPHS[graphs]), "y": torch.arange(graphs) % 3,
            "place": torch.tensor([i % 4]), "lengths": torch.tensor(LENGTHS[i]),
        }  # fmt: skip


def pooled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    graphs = int(batch["graph"].max()) + 1
    return batch["x"].new_zeros(graphs, 3).index_add_(0, batch["graph"], model(batch["x"]))


def pooled_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    sums = pooled(model, batch)
    return sums / torch.bincount(batch["graph"], minlength=len(sums)).clamp(min=1)[:, None]


def written_to_a_place(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    queue, place = batch["x"].clone(), int(batch["place"])
    queue[place : place + 2] = 2 * batch["x"][:2]
    return model(queue)


def masked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    longest = int(batch["lengths"].max())
    return model(batch["x"]).mean() * (torch.arange(longest) < batch["lengths"][:, None])


LOSSES: dict[str, LossFn] = {
    "pooled": lambda m, b: pooled(m, b).square().mean(),
    "one label a graph": lambda m, b: F.cross_entropy(pooled(m, b), b["y"]),
    "means": lambda m, b: F.cross_entropy(pooled_mean(m, b), b["y"]),
    "written to a place": lambda m, b: written_to_a_place(m, b).square().mean(),
    "read from a place": lambda m, b: m(b["x"])[int(b["place"]) :].square().sum(),
    "narrowed": lambda m, b: m(b["x"]).narrow(0, int(b["place"]), 2).square().mean(),
    "split": lambda m, b: sum((t.square().mean() for t in m(b["x"]).split(b["lengths"].tolist())), torch.zeros(())),
    "masked": lambda m, b: masked(m, b).sum(),
}


ASKED_BY_OLDER_TORCH = ("one label a graph", "means", "written to a place")
"""Where torch 2.11 asks at once whether two sizes are equal, 2.13 notes that they have to be."""
OLDER = torch.__version__.startswith("2.11.")


@pytest.mark.parametrize("name", LOSSES)
def test_sizes_that_are_read_from_tensors_train_as_in_eager(name: str) -> None:
    loss_fn = LOSSES[name]
    torch.manual_seed(0)
    ours = nn.Linear(3, 3)
    eager = copy.deepcopy(ours)
    first = next(batches())
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    step = wholestep.compile(ours, loss_fn, optimizer, first, backend="interpret", check="off", cache=False)
    for batch in batches():
        loss = step(batch)
        other.zero_grad()
        expected = loss_fn(eager, batch)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
    assert step.rung == ("eager" if OLDER and name in ASKED_BY_OLDER_TORCH else "whole step"), step.explain()
    assert all(map(torch.equal, ours.parameters(), eager.parameters()))


def test_where_a_fact_does_not_hold_eager_says_so_and_nothing_changes() -> None:
    """Three graphs and two labels: looked at before anything is computed with them."""
    torch.manual_seed(0)
    model, first = nn.Linear(3, 3), next(batches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wholestep.compile(
        model, LOSSES["one label a graph"], optimizer, first, backend="interpret", check="off", cache=False
    )
    step(first)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"Expected input batch_size \(4\) to match target batch_size \(3\)"):
        step(first | {"graph": torch.tensor(GRAPHS[4])})
    assert all(map(torch.equal, before, model.parameters()))
    step(first)
    assert OLDER or (step.rung == "whole step" and step.captures == 1)


class Widened(nn.Module):
    """Counts of as many kinds as the data has, which `expand` takes for three; the buffer asks for a second tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 2, 12).reshape(3, 4))
        self.steps = nn.Buffer(torch.zeros(()))

    def forward(self, kinds: Tensor) -> Tensor:
        self.steps += 1
        return (self.weight.sum() * torch.bincount(kinds).float().expand(3)).sum()


@pytest.mark.parametrize("options", [{}, {"guards": "off"}], ids=["dynamo", "plain"])
def test_a_second_tracing_takes_no_fact_for_granted(options: dict[str, Any]) -> None:
    """One kind is widened to three by eager, and is no three kinds."""
    ours, eager = Widened(), Widened()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    kinds = [torch.tensor(listed) for listed in ([0, 2], [0, 0], [1, 2], [0, 0])]
    step = wholestep.compile(
        ours, lambda m, b: m(b), optimizer, kinds[0], backend="interpret", check="off", cache=False, **options
    )
    for batch in kinds:
        loss = step(batch)
        other.zero_grad()
        expected = eager(batch)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
    assert all(map(torch.equal, ours.state_dict().values(), eager.state_dict().values()))


class Squeezed(nn.Module):
    """Traced as if `squeeze` kept its dimension, which the layer behind it then takes for one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(1, 1, 1)), nn.Linear(1, 1)

    def forward(self, kinds: Tensor) -> Tensor:
        counted = self.weight * 1.5 * torch.bincount(kinds).float()
        return self.out(counted.squeeze(2).movedim(0, 1)).square().sum()


def test_a_size_of_one_that_squeeze_takes_away_is_looked_at_first() -> None:
    ours, eager = Squeezed(), Squeezed()
    eager.load_state_dict(ours.state_dict())
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager))
    kinds = torch.zeros(1, dtype=torch.int64)
    options = {"backend": "interpret", "check": "off", "cache": False, "guards": "off"}
    step = wholestep.compile(ours, lambda m, b: m(b), optimizer, kinds, **options)
    for _ in range(2):
        loss = step(kinds)
        other.zero_grad()
        expected = eager(kinds)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach())
    assert "RuntimeError" not in step.explain()
