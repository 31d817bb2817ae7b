"""docs/add-a-kernel.md, followed to the letter: its operator is registered, tried against its record, and trains."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.ops import test_records as records

from wholestep.ops.record import FACTS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-kernel.md"
NAMES = ("ws::squared_relu", "ws::squared_relu_backward")


@pytest.fixture(scope="module")
def blocks() -> Iterator[list[types.ModuleType]]:
    """The page's code blocks as modules."""
    made = []
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        made.append(types.ModuleType(f"walkthrough_{number}"))
        exec(compile(code, f"{PAGE.name}, block {number}", "exec"), made[-1].__dict__)
    yield made
    made[0].LIBRARY._destroy()  # type: ignore[attr-defined]
    for name in NAMES:
        FACTS.pop(name)


@pytest.mark.parametrize("name", NAMES)
def test_its_record_holds(blocks: list[types.ModuleType], name: str) -> None:
    assert len(blocks) == 2 and name in FACTS
    records.test_it_computes_what_its_reference_does(name)
    records.test_without_data_it_has_the_same_shape_and_strides(name)
    records.test_it_costs_something_known(name)


@pytest.mark.parametrize("backend", ["interpret", "inductor"])
def test_it_trains(blocks: list[types.ModuleType], backend: str) -> None:
    blocks[1].test_it_trains_as_plain_pytorch_does(backend)


def test_the_row_is_where_the_page_says(blocks: list[types.ModuleType]) -> None:
    assert "from wholestep.ops import squared_relu" in PAGE.read_text() and hasattr(torch.ops.ws, "squared_relu")
