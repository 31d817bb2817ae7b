"""Awkward batches, and which beginnings of a recipe are looked at to find the wrong line."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import wholestep
from wholestep.errors import BadOption, WholestepWarning
from wholestep.schedule import Recipe
from wholestep.schedule.verb import make
from wholestep.verify.by_verb import awkward, verify_by_verb
from wholestep.verify.report import Report, TensorRow

MODEL = nn.ModuleDict({"embed": nn.Embedding(9, 4), **{name: nn.Linear(4, 4) for name in "abcdefg"}})
RECIPE = Recipe(tuple(make("recompute", name) for name in "abcdefg"))


def test_ids_padding_and_an_odd_number_of_rows() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0], [1, 1, 1]])
    batch = {
        "ids": ids,
        "labels": torch.where(ids > 6, -100, ids),
        "attention_mask": torch.ones(4, 3, dtype=torch.int64),
    }
    first, last, padded, odd = awkward(batch, MODEL)
    assert set(first["ids"].flatten().tolist()) == {0} and set(last["ids"].flatten().tolist()) == {8}
    assert set(last["labels"].flatten().tolist()) == {8, -100}
    assert padded["attention_mask"][-1].tolist() == [1, 0, 0] and torch.equal(padded["ids"], ids)
    assert len(odd["ids"]) == 3 and torch.equal(ids, batch["ids"])
    (rows,) = awkward(torch.randn(4, 2), nn.Linear(2, 2))
    assert rows.shape == (3, 2)
    assert awkward(torch.randn(1, 2), nn.Linear(2, 2)) == []
    (rows,) = awkward(torch.randn(8, 2), nn.Linear(2, 2), accumulate=2)  # every micro-batch has an odd number
    assert rows.shape == (6, 2)
    assert awkward(torch.randn(4, 2), nn.Linear(2, 2), accumulate=2) == []


def report_of(ok: bool) -> Report:
    return Report("whole step", "interpret", [TensorRow("0", "loss", "loss", 0.0 if ok else 1.0, 0.5, ok)])


@pytest.mark.parametrize("wrong", range(7))
def test_the_wrong_line_is_found_by_bisection(wrong: int) -> None:
    asked: list[int] = []

    def verify(recipe: Recipe, edges: Any) -> Report:
        asked.append(len(recipe))
        return report_of(len(recipe) <= wrong)

    found = verify_by_verb(verify, MODEL, torch.zeros(1), RECIPE, each=False, edge_batches=())
    assert not found.ok and f"line {wrong + 1} of the recipe" in found.notes[-1]
    assert len(asked) <= 5  # of eight beginnings
    asked.clear()
    verify_by_verb(verify, MODEL, torch.zeros(1), RECIPE, each=True, edge_batches=())
    assert asked == list(range(wrong + 2))


def test_what_is_said_of_a_part_of_the_recipe_is_not_told(recwarn: pytest.WarningsRecorder) -> None:
    """A mesh without the line that cuts is a recipe that nobody wrote."""

    def verify(recipe: Recipe, edges: Any) -> Report:
        warnings.warn(f"{len(recipe)} lines", WholestepWarning, stacklevel=2)
        return report_of(len(recipe) < 1)

    verify_by_verb(verify, MODEL, torch.zeros(1), RECIPE, each=False, edge_batches=())
    assert [str(one.message) for one in recwarn] == ["7 lines"]


def test_a_model_that_differs_by_itself_blames_no_line() -> None:
    for each in (False, True):
        found = verify_by_verb(
            lambda recipe, edges: report_of(False), MODEL, torch.zeros(1), RECIPE, each=each, edge_batches=()
        )
        assert not found.ok and not found.notes


def test_by_verb_needs_a_recipe() -> None:
    with pytest.raises(BadOption, match="together with recipe="):
        wholestep.verify(MODEL, None, None, torch.zeros(1), by_verb="blame")


class Lends(nn.Module):
    """Four equal layers that share one, each by a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"own": nn.Linear(4, 4), "shared": shared}) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer["own"](x)) + layer["shared"](x)
        return x


def _without_gradient(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight.detach(), module.bias)


def _off(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight, module.bias) * 1.01


@pytest.mark.parametrize(
    ("wrong", "kind", "name"),
    [(_without_gradient, "gradient", "layers.2.own.weight"), (_off, "output", "layers.2.own")],
)
def test_calls_of_a_shared_module_are_compared_each_with_its_own(wrong: Any, kind: str, name: str) -> None:
    torch.manual_seed(0)
    model, batch = Lends(), torch.randn(3, 4)
    sch = wholestep.schedule(model)
    sch["layers.2.own"].replace(wrong)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = sch.verify(
        lambda m, b: m(b).square().mean(), optimizer, batch, backend="interpret", steps=1, edge_batches=()
    )
    found = report.first_departure
    assert (
        found is not None and (found.kind, found.name) == (kind, name) and "replace layers.2.own" in found.guilty_verb
    )
