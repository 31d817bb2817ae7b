"""Shardings that nobody wrote: found by structure, trained as on one rank, refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.mesh_models import RECIPES, Made, gpt2
from torch import nn

import wholestep
from wholestep import Mesh, WholestepError
from wholestep.schedule import auto_shard

pytestmark = pytest.mark.filterwarnings("ignore:.*stays whole")  # two heads of keys for four ranks
WHOLE_RANGE = [(make, tp) for make in RECIPES for tp in (2, 4)]


def cut_by(sch: Any) -> dict[str, int]:
    return {f"{line.at}.{line.param}": line.axis for line in sch if line.name == "shard"}


def trained(make: Callable[[], Made], recipe: Callable[..., Any] | None, mesh: Mesh | None) -> list[float]:
    torch.manual_seed(0)
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    more = {} if recipe is None else {"recipe": recipe(model, mesh, example=batch), "mesh": mesh}
    step = wholestep.compile(
        model, None, optimizer, batch, backend="interpret", check="off", accumulate=2, clip_norm=0.5, seed=1, **more
    )
    return [float(step(batch)) for _ in range(5)]


@pytest.mark.parametrize(
    ("make", "tp"), [p if p == (gpt2, 2) else pytest.param(*p, marks=pytest.mark.slow) for p in WHOLE_RANGE]
)
def test_trained_as_on_one_rank(make: Callable[[], Made], tp: int) -> None:
    found = trained(make, wholestep.recipes.auto, Mesh(tp=tp))
    torch.testing.assert_close(found, trained(make, None, None), rtol=1e-5, atol=0)
    assert found[0] != found[4]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "tp"), WHOLE_RANGE)
def test_what_a_person_cuts_is_cut(make: Callable[[], Made], tp: int) -> None:
    """All matrices that the recipes of people cut; a key that has fewer heads than there are ranks stays whole in both."""
    model, batch = make()
    sch = wholestep.recipes.auto(model, Mesh(tp=tp), example=batch)
    ours = {
        id(sch.modules.parameter(path, line.param))
        for line in sch
        if line.name == "shard"
        for path in sch[line.at].modules
    }
    by_hand = wholestep.schedule(model, example=batch)
    for at, name, axis in RECIPES[make]:
        by_hand[at].shard(name, axis)
    found = by_hand.exchanges(Mesh(tp=tp))
    assert {id(p) for name, p in model.named_parameters() if name in found.cuts} <= ours


class Odd(nn.Module):
    """Names that say nothing, layers of one shape in a row, a norm of channels, a part that cannot be cut."""

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.two = nn.ParameterDict(
                {"a": torch.randn(8, 8) * 0.1, "b": torch.randn(8, 3) * 0.1, "c": torch.randn(3, 8)}
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.one(x)
            share = (x @ self.two["b"]).sort(-1)[0]  # of three, which two ranks do not divide
            return x + torch.sigmoid(x @ self.two["a"]).cumsum(-1) + share @ self.two["c"]

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList(Odd.Row() for _ in range(2))
        self.begin, self.middle, self.end = nn.Conv1d(4, 16, 1), nn.BatchNorm1d(16), nn.Conv1d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.end(F.relu(self.middle(self.begin(x)))).mean(-1)
        for row in self.rows:
            x = row(x)
        return x


def odd_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_by_structure_and_not_by_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Odd(), torch.randn(4, 4, 5)
    sch = wholestep.recipes.auto(model, Mesh(tp=2), example=batch, loss_fn=odd_loss)
    assert cut_by(sch) == {
        "rows.*.one.0.weight": 0, "rows.*.one.0.bias": 0, "rows.*.one.2.weight": 1,
        "begin.weight": 0, "begin.bias": 0, "middle.weight": 0, "middle.bias": 0, "end.weight": 1,
    }  # fmt: skip
    text = sch.text()
    assert '{ shard = "rows.*.one.2", axis = 1 },  # what ranks make of it is summed' in text
    assert (
        "# rows.*.two.a stays whole: cut along dimension 0, ranks would take apart" in text
        and "; rows.0, cumsum:" in text
    )
    assert "2 ranks do not divide dimension 1, of size 3" in sch.reasons["rows.*.two.b stays whole"]
    sch.save(tmp_path / "found.toml")
    assert wholestep.schedule(model, tmp_path / "found.toml").recipe == sch.recipe and sch.diff() == "no difference"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    report = sch.verify(odd_loss, optimizer, batch, mesh=Mesh(tp=2), steps=2)
    assert report.ok, report
    sch.undo("shard")
    assert "- shard end" in sch.diff()


def test_a_loss_gets_the_modules_as_they_were_given() -> None:
    models = {"one": nn.Linear(4, 8), "two": nn.Linear(8, 4)}
    loss = lambda models, x: models["two"](torch.relu(models["one"](x))).square().mean()  # noqa: E731
    sch = wholestep.recipes.auto(models, Mesh(tp=2), example=torch.randn(3, 4), loss_fn=loss)
    assert cut_by(sch) == {"one.weight": 0, "one.bias": 0, "two.weight": 1}


def test_what_is_frozen_is_cut_too() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model[2].requires_grad_(False)
    sch = wholestep.recipes.auto(model, Mesh(tp=2), example=torch.randn(3, 4))
    assert cut_by(sch) == {"0.weight": 0, "0.bias": 0, "2.weight": 1}


def test_equal_layers_are_one_group() -> None:
    found = {group.pattern: len(group.names) for group in auto_shard.groups_of(Odd())}
    assert found["rows.*.one.0.weight"] == 2 and found["rows.*.one.2.weight"] == 2 and found["begin.weight"] == 1


def test_what_cannot_be_is_one_line() -> None:
    model, batch, auto = nn.Linear(3, 3), torch.randn(2, 3), wholestep.recipes.auto
    with pytest.raises(WholestepError, match="needs an example batch"):
        auto(model, Mesh(tp=2))
    with pytest.raises(
        WholestepError, match=r"nothing of Linear can be cut for Mesh\(tp=2\). weight: 2 ranks do not divide"
    ):
        auto(model, Mesh(tp=2), example=batch)
    with pytest.raises(WholestepError, match=r"Mesh\(dp=2\): how ranks of dp share the work is not found"):
        auto(model, Mesh(dp=2), example=batch)
    with pytest.raises(WholestepError, match=r"mesh=2. give a wholestep.Mesh"):
        auto(model, 2, example=batch)
    assert not cut_by(auto(model, Mesh()))
