"""The page docs/add-an-optimizer.md is run as it is written; its row is put into the tables for that long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ops.updates.settings import SETTINGS, mean_square

import wholestep
from wholestep.ops import IN_PLACE, updates
from wholestep.ops.flops import flops
from wholestep.ops.record import FACTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add-an-optimizer.md"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What adding a row does: all other tables are made from it."""

    def add(update: Any) -> None:
        monkeypatch.setitem(updates.UPDATES, update.kind, update)
        for cls in update.classes:
            monkeypatch.setitem(updates.BY_CLASS, cls, update)
        monkeypatch.setitem(updates.BY_IN_PLACE, update.in_place, update)
        monkeypatch.setitem(IN_PLACE, update.operator, update.in_place)

    return add


def test_the_page_runs(tables: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    *definitions, test = (compile(block, str(PAGE), "exec") for block in blocks)
    namespace: dict[str, Any] = {"__name__": "walkthrough"}
    for block in definitions:
        exec(block, namespace)
    tables(namespace["SIGNED_MOMENTUM"])
    exec(test, namespace)


def test_every_record_has_a_formula() -> None:
    assert all("flops" in FACTS[f"ws::{kind}"] for kind in updates.UPDATES)


@pytest.mark.parametrize(("name", "each"), [("adagrad", 9), ("rmsprop, foreach", 18), ("nadam", 17), ("lion", 10)])
def test_flops_are_counted_per_element(name: str, each: int) -> None:
    """With clipping one more, for the factor."""
    model = torch.nn.Linear(3, 4)
    optimizer = SETTINGS[name](model.parameters())
    step = wholestep.compile(
        model, mean_square, optimizer, torch.ones(2, 3), clip_norm=1.0, backend="interpret", cache=False, check="off"
    )
    node = next(node for node in step.graph.operations() if node.target in IN_PLACE)
    assert flops(node).count == (each + 1) * 16
