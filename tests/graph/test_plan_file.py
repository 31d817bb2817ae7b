"""Plans as files: what is written is read back, and what is no plan is one line."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from wholestep.errors import BadOption, WholestepError
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
        ("format = 1\nrecomputed = []", "unknown field 'recomputed'.*did you mean recompute"),
        ("format = 1\nrecompute = [3]", "not a name"),
        ("format = 1\nearly_update = 'yes'", "early_update"),
        ("format = 1\nbudget_bytes = true", "budget_bytes"),
        ("format = 1\nmade_for = 3", "made_for"),
        ("format = 1\nrecompute = 3", "recompute = 3"),
        ("format = 1\nrecompute = 'abc'", "recompute = 'abc'"),
        ("format = 1\n[precision]\nhead = 16", "precision.head = 16"),
        ("format = 1\n[reasons]\na = []", "reasons.a"),
        ("format = 1\nbudget_bytes = -5", "budget_bytes = -5"),
        ("format = 1\nchunked_loss = true\n[end.a1]", "not what the plan was written with"),
        ("format = 2\nchunked_loss = true", "not whole"),
    ],
)
def test_what_is_no_plan_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(content)
    with pytest.raises(BadOption, match=said) as raised:
        read_plan(path)
    assert "\n" not in str(raised.value)


def test_a_plan_written_by_hand_ends_in_a_line_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("format = 1\nchunked_loss = true\n[end]\n")
    assert read_plan(tmp_path / "p.toml") == Plan(chunked_loss=True)


def damaged(text: bytes, source: random.Random) -> bytes:
    """The file cut off, with a byte changed or lost, two lines or two keys exchanged, or a line gone."""
    kind, at = source.randrange(6), source.randrange(len(text))
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + bytes([text[at] ^ 1 << source.randrange(8)]) + text[at + 1 :]
    if kind == 2:
        return text[:at] + bytes([source.randrange(256)]) * source.randrange(3) + text[at + 1 :]
    lines = text.split(b"\n")
    a, b = source.randrange(len(lines)), source.randrange(len(lines))
    if kind == 3:
        lines[a], lines[b] = lines[b], lines[a]
    elif kind == 4:
        del lines[a]
    else:
        (one, _, first), (two, _, second) = lines[a].partition(b" = "), lines[b].partition(b" = ")
        lines[a], lines[b] = two + b" = " + first, one + b" = " + second
    return b"\n".join(lines)


def test_a_damaged_file_is_refused_or_decides_the_same_numbers(tmp_path: Path) -> None:
    """Losing a value that is recomputed costs memory; chunked_loss and precision change the training."""
    plan = dataclasses.replace(PLAN, precision={"lm_head": "fp32", "*.attn": "bf16"})
    path, source = tmp_path / "plan.toml", random.Random(0)
    write_plan(plan, path)
    text, refused, read = path.read_bytes(), 0, 0
    for _ in range(2000):
        path.write_bytes(damaged(text, source))
        try:
            found = read_plan(path)
        except WholestepError as error:
            assert "\n" not in str(error)
            refused += 1
            continue
        read += 1
        assert found.chunked_loss is True and list(found.precision.items()) == list(plan.precision.items())
    assert refused > 500 and read > 100


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="there is no plan"):
        read_plan(tmp_path / "nothing.toml")
    with pytest.raises(BadOption, match="nowhere"):
        write_plan(PLAN, tmp_path / "nowhere" / "p.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadOption, match="is no plan"):
        read_plan(tmp_path / "binary.toml")


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("format = 1\nchunked_loss = true\n")
    assert read_plan(tmp_path / "p.toml").chunked_loss is True


def test_tables_of_a_mesh_come_back_and_are_checked(tmp_path: Path) -> None:
    plan = Plan(
        mesh={"tp": 4}, shard={"layers.*.up.weight": "0 tp", "qkv": "0 tp, blocks of 16 16 16"}, stages={"a": "0"}
    )
    write_plan(plan, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == plan
    for wrong, text in (
        ('"ep" = 4', "axes are dp, tp, pp"),
        ('"tp" = 0', "whole number"),
        ('"tp" = "4"', "whole number"),
    ):
        (tmp_path / "wrong.toml").write_text(f"format = 2\n[mesh]\n{wrong}\n[end]\n")
        with pytest.raises(BadOption, match=text):
            read_plan(tmp_path / "wrong.toml")
