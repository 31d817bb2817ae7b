"""Plans as files: what is written is read back, and what is no plan is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholestep.errors import BadOption
from wholestep.graph.plan import Plan
from wholestep.graph.plan_file import plan_text, read_plan, write_plan

PLAN = Plan(
    recompute=("model.layers.*.mlp.act_fn/silu", 'odd "name"\\ with\ttab/é'),
    reasons={"model.layers.*.mlp.act_fn/silu": "frees 4.0 GiB\nmade from gate_proj"},
    early_update=True, chunked_loss=True, budget_bytes=26 * 2**30, predicted_bytes=20 * 2**30, predicted_seconds=0.4121,
    made_for={"model": "llama-1b", "batch": 8, "config.tied": True, "config.eps": 1e-5, "sizes": [1, 2], "none": None},
)  # fmt: skip


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(PLAN, path)
    read = read_plan(path)
    assert read.recompute == PLAN.recompute and dict(read.reasons) == dict(PLAN.reasons)
    assert (read.early_update, read.chunked_loss, read.budget_bytes) == (True, True, PLAN.budget_bytes)
    assert read.predicted_seconds == PLAN.predicted_seconds
    assert read.made_for == {k: v for k, v in PLAN.made_for.items() if v is not None}
    assert read.changed_field(dict(PLAN.made_for)) is None


def test_every_decision_has_its_reason_beside_it() -> None:
    line = next(line for line in plan_text(PLAN).splitlines() if "act_fn/silu" in line)
    assert line.endswith("# frees 4.0 GiB made from gate_proj")
    assert "26.0 GiB of the card" in plan_text(PLAN)


def test_an_empty_plan_survives_too(tmp_path: Path) -> None:
    write_plan(Plan(), tmp_path / "p.toml")
    assert read_plan(tmp_path / "p.toml") == Plan()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("this is no toml", "is no plan"),
        ("format = 99", "format 99"),
        ("", "format None"),
        ("format = 1\nrecomputed = []", "unknown field 'recomputed'"),
        ("format = 1\nrecompute = [3]", "not a name"),
        ("format = 1\nearly_update = 'yes'", "early_update"),
        ("format = 1\nbudget_bytes = true", "budget_bytes"),
        ("format = 1\nmade_for = 3", "made_for"),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(BadOption, match=said) as raised:
        read_plan(path)
    assert "\n" not in str(raised.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="there is no plan"):
        read_plan(tmp_path / "nothing.toml")
    with pytest.raises(BadOption, match="nowhere"):
        write_plan(PLAN, tmp_path / "nowhere" / "p.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadOption, match="is no plan"):
        read_plan(tmp_path / "binary.toml")
