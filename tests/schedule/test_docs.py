"""The examples of docs/schedule.md run, each on its own."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import wholestep
from wholestep import Mesh
from wholestep.schedule.recipe_file import read_recipe
from wholestep.schedule.verb import VERBS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "schedule.md").read_text("utf-8")
SETUP, FIRST, MESH = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = re.findall(r"^\| `(.+?)`.*?\| .*? \| `(.+)` \|$", PAGE.partition("## Coming from Slapo")[2], re.MULTILINE)


def run(source: str) -> dict[str, Any]:
    module = types.ModuleType("docs_schedule")
    sys.modules[module.__name__] = module  # what the front end captures is looked up by name
    names = module.__dict__
    exec(compile(SETUP, "docs/schedule.md", "exec"), names)
    exec(compile(source.replace("recipe=sch)", "recipe=sch, backend='interpret')"), "docs/schedule.md", "exec"), names)
    return names


def test_the_first_example(capsys: pytest.CaptureFixture[str]) -> None:
    source = FIRST.replace("steps=1)", "steps=1, backend='interpret', edge_batches=(), eval_too=False)")
    names = run(source)
    assert names["report"].ok and names["step"].plan.recompute
    assert "recompute layers.* ratio=0.5  (4 modules)" in capsys.readouterr().out


def test_the_example_of_a_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(MESH.replace("steps=1)", "steps=1, edge_batches=(), eval_too=False)"))
    assert names["report"].ok and names["step"].graph.ranks.mesh == names["mesh"]
    assert "'embed.weight': '0 tp'" in capsys.readouterr().out


@pytest.mark.parametrize(("primitive", "example"), ROWS)
def test_every_primitive_of_slapos_has_a_counterpart_that_runs(primitive: str, example: str) -> None:
    names = run(example)
    lines = list(names["sch"])
    recorded = re.search(r"\.(\w+)\(", example.removeprefix("assert "))
    assert recorded is not None
    if recorded[1] in VERBS:
        assert lines and lines[-1].name == recorded[1]
    if recorded[1] in {*VERBS} - {"sync", "pipeline_cut"}:  # of these one follows from other lines, one has no engine
        mesh = Mesh(tp=4) if recorded[1] in ("shard", "fork_rng") else None
        step = wholestep.compile(
            names["model"], names["loss_fn"], names["optimizer"], names["batch"], recipe=names["sch"], mesh=mesh,
            backend="interpret", check="off", verbose=False,
        )  # fmt: skip
        assert step(names["batch"]).isfinite()


def test_the_table_is_complete() -> None:
    names = {re.sub(r"\W.*", "", primitive.lstrip(".").removeprefix("slapo.")) for primitive, _ in ROWS}
    ten = "replace replace_all shard sync fork_rng annotate checkpoint fuse decompose cut_pipeline_stage"
    assert names == {*ten.split(), "find", "trace", "Verify", "build"}
    assert all(f"`{verb}`" in PAGE for verb in VERBS)


def test_the_recipe_that_is_shown_can_be_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert [line.name for line in read_recipe(path)] == ["recompute", "precision"]
