"""Every argument of every verb with values that make no sense: recorded and written to a file, or one line; never a traceback."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.schedule.small_models import made
from torch import nn

import wholestep
from wholestep.errors import BadOption, WholestepError
from wholestep.graph.mesh import Mesh
from wholestep.schedule.verb import VERBS

NONSENSE: tuple[Any, ...] = (
    3,
    -1,
    1.5,
    float("nan"),
    "x",
    "",
    "a.b:c",
    True,
    None,
    [],
    ["x"],
    {},
    {"a": 1},
    object(),
    len,
)
GIVEN: dict[str, dict[str, Any]] = {
    "replace": {"by": "lean"},
    "replace_all": {"what": "torch.nn:LayerNorm", "by": "lean"},
    "kernel": {"take": "math"},
    "precision": {"to": "fp32"},
    "sync": {"axis": 0},
    "annotate": {"key": "remark", "value": 1},
}
"""What else a line needs."""
FIELDS = [(name, field.name) for name, kind in VERBS.items() for field in dataclasses.fields(kind)[1:]]


@pytest.mark.parametrize(("verb", "field"), FIELDS)
def test_an_argument_is_taken_or_refused_in_one_line(verb: str, field: str, tmp_path: Path) -> None:
    model = made()[0]
    for value in NONSENSE:
        sch = wholestep.schedule(model)
        try:
            getattr(sch["" if verb == "cudagraph" else "layers.*.norm"], verb)(**GIVEN.get(verb, {}) | {field: value})
            sch.save(tmp_path / "recipe.toml")
        except WholestepError as error:
            assert "\n" not in str(error), error
            continue
        again = wholestep.schedule(model, tmp_path / "recipe.toml")
        assert str(again) == str(sch) or value != value, (value, again)


def test_what_is_written_wrong_is_named_as_it_was_written() -> None:
    place = wholestep.schedule(made()[0])["layers.0.norm"]
    with pytest.raises(BadOption, match=r"by=.leen.\. did you mean lean"):
        place.replace("leen")
    with pytest.raises(BadOption, match="pipeline_cut takes 0 arguments, 1 were given"):
        place.pipeline_cut("here")
    with pytest.raises(BadOption, match="kernel takes 2 arguments, 3 were given"):
        place.kernel("math", None, "flash")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path, old: 1 // 0, "layers.0.norm: make fails: ZeroDivisionError"),
        (lambda path: path, "layers.0.norm: make fails: TypeError"),
        (lambda path, old: old, "holds the module that it replaces. build a new module"),
        (lambda path, old: nn.Sequential(old), "holds the module that it replaces"),
        (lambda path, old: None, "make returned a NoneType"),
    ],
)
def test_what_a_users_function_makes_is_a_module_of_its_own(make: Any, words: str) -> None:
    sch = wholestep.schedule(made()[0])
    with pytest.raises(BadOption, match=words):
        sch["layers.0.norm"].replace(make=make)
    with pytest.raises(BadOption, match=words):
        sch.replace_all(nn.LayerNorm, make=make)


@pytest.mark.parametrize("value", [value for value in NONSENSE if not isinstance(value, str) and value != {}])
def test_what_is_no_text_is_refused_wherever_a_name_is_asked_for(value: Any) -> None:
    sch = wholestep.schedule(made()[0])
    calls: list[Any] = [sch.save, sch.diff, sch.find, lambda v: wholestep.schedule(v), lambda v: sch["layers"][v]]
    calls += [sch.help, sch.undo, lambda v: wholestep.schedule(sch.model, v)]
    for call in calls:
        optional = value is None and call in (sch.diff, sch.help, sch.undo, calls[-1])
        if not optional and not (value is len and call == sch.find):
            with pytest.raises(WholestepError):
                call(value)


def test_the_number_of_a_layer_is_an_address() -> None:
    sch = wholestep.schedule(made()[0])
    assert sch["layers"][1]["mlp"].at == "layers.1.mlp"
    with pytest.raises(BadOption, match=r"slice\(0, 2, None\) is no address of modules. give a path or a glob"):
        sch["layers"][0:2]  # type: ignore[index]
    with pytest.raises(BadOption, match=r"no module 'layers.3' in Net. did you mean layers.2\?"):
        sch["layers"][3]


@pytest.mark.parametrize("verb", ["shard", "sync", "fork_rng"])
def test_a_mesh_has_three_axes(verb: str) -> None:
    with pytest.raises(BadOption, match=rf"{verb} over='tq'. did you mean tp\?"):
        getattr(wholestep.schedule(made()[0])["head"], verb)(over="tq")


def test_a_sync_is_about_the_axis_that_is_cut() -> None:
    model, _, batch = made()
    sch = wholestep.schedule(model, example=(batch["ids"],))
    sch["layers.*.mlp.fc1"].shard("weight", 0)
    sch["layers.*.mlp.fc2"].shard("weight", 1)
    sch["layers.*.mlp.fc2"].sync("all_reduce", over="dp")
    with pytest.raises(BadOption, match=r"over='dp', and parameters are cut over 'tp'"):
        sch.exchanges(Mesh(tp=2))
