"""The verb `offload`: what a recipe moves is moved, over what the planner decides, and trains to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.passes.stacks import Stack, id_batches, next_token

import wholestep
from wholestep.errors import BadOption, NotBuiltYet


def trained(lines: Any = None, **options: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = Stack()
    sch = wholestep.schedule(model)
    if lines is not None:
        lines(sch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = id_batches(3)
    step = wholestep.compile(
        model,
        next_token,
        optimizer,
        given[0],
        recipe=sch if lines else None,
        backend="interpret",
        check="off",
        **options,
    )
    return [float(step(batch)) for batch in given], step


def test_values_and_state_of_modules() -> None:
    def lines(sch: Any) -> None:
        sch["blocks.*"].offload("values")
        sch["blocks.1"].offload("state")

    losses, step = trained(lines)
    assert losses == trained()[0]
    assert any(key.startswith("blocks.*/tanh") for key in step.plan.host) and step.plan.state == {"blocks.1.*": "host"}
    assert "offload" in step.explain() and "line 1 of the schedule" in step.explain()


def test_one_value_in_files_over_a_line_that_recomputes(tmp_path: Path) -> None:
    def lines(sch: Any) -> None:
        sch["blocks.*"].recompute()
        sch["blocks.*/tanh@2"].offload("values", to="file")

    losses, step = trained(lines, offload_path=tmp_path)
    assert losses == trained()[0]
    assert step.plan.file == ("blocks.*/tanh@2",) and not any("tanh" in key for key in step.plan.recompute)
    with pytest.raises(BadOption, match=r"wait in a file.*offload_path"):
        trained(lines)


def test_what_is_not_carried_out_is_named() -> None:
    with pytest.raises(NotBuiltYet, match="parameters outside of the card"):
        trained(lambda sch: sch["blocks.0"].offload("parameters"))
    with pytest.raises(BadOption, match="offload of state to files"):
        trained(lambda sch: sch["blocks.0"].offload("state", to="file"))
    with pytest.raises(BadOption, match=r"'blocks.\*/tnah'.*did you mean"):
        trained(lambda sch: sch["blocks.*/tnah"].offload())
