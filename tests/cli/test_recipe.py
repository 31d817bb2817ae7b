"""`--recipe` on the commands that take it, and `wholestep compare` of two recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.calls import Call, program

RECIPE = """format = 1
verbs = [
  {{ recompute = "{place}"{more} }},
]
[expects]
"" = "Sequential"
[end]
"""
TINY = [
    "gpt-1m", "--set", "layers=2", "--set", "width=32", "--set", "heads=2", "--batch", "3", "--seq", "17", "--precision", "fp32",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program(tmp_path, monkeypatch)
    (tmp_path / "one.toml").write_text(RECIPE.format(place="0", more=""))
    (tmp_path / "other.toml").write_text(RECIPE.format(place="*", more=", ratio = 0.5").replace("Sequential", "GPT"))
    (tmp_path / "blocks.toml").write_text(RECIPE.format(place="blocks.*", more="").replace("Sequential", "GPT"))
    return tmp_path


def test_recipes_are_compared(call: Call, folder: Path) -> None:
    done = call("compare", "one.toml", "other.toml")
    lines = ["- recompute 0", "+ recompute * ratio=0.5", "~ the model: Sequential, then GPT"]
    assert done.code == 0 and done.out.splitlines() == lines
    assert call("compare", "one.toml", "one.toml").out.strip() == "no difference"
    rows = json.loads(call("compare", "one.toml", "other.toml", "--json").out)
    assert [row["what"] for row in rows] == ["gone", "new", "expected"]


def test_a_step_is_verified_and_trained_with_a_recipe(call: Call, folder: Path) -> None:
    run = ["own_training:setup", "--recipe", "one.toml", "--steps", "2", "--backend", "interpret"]
    done = call("verify", *run)
    assert done.code == 0 and "equal to eager" in done.out, done.err
    done = call("train", *run, "--out", "run", "--quiet")
    assert done.code == 0, done.err
    facts = json.loads((folder / "run" / "run.json").read_text())
    assert facts["request"]["recipe"] == str(folder / "one.toml")


def test_a_plan_is_made_with_what_the_recipe_says(call: Call, folder: Path) -> None:
    asked = [
        "plan",
        *TINY,
        "--set",
        "tokenizer=bytes",
        "--device",
        "24GiB",
        "--no-check-batch",
        "--recipe",
        "blocks.toml",
    ]
    done = call(*asked, "--out", "plan.toml")
    assert done.code == 0, done.err
    text = (folder / "plan.toml").read_text()
    assert '"blocks.*.' in text and "# line 1 of blocks.toml (recompute blocks.*)" in text


def test_the_graph_is_shown_with_what_the_recipe_says(call: Call, folder: Path) -> None:
    (folder / "apart.toml").write_text(RECIPE.format(place="2", more="").replace("recompute", "decompose"))
    asked = ["show", "own_training:setup", "--stage", "planned"]
    plain, apart = call(*asked).out, call(*asked, "--recipe", "apart.toml").out
    calls = "aten.addmm.default("
    assert plain.count(calls) == 2 and apart.count(calls) == 1
