"""The page docs/add-an-optimizer.md is run as it is written; its row is put into the tables for that long."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from wholestep.ops import IN_PLACE, updates
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
