"""A schedule: addresses, recording, looking, files, building; nothing is applied before it is asked for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.small_models import CARRIED, WIDTH, FastMLP, Net, linear_clamp, linear_relu, loss, made
from torch import nn

import wholestep
from wholestep.errors import BadOption, NotBuiltYet
from wholestep.schedule.modules import fits
from wholestep.schedule.verb import VERBS, make


@pytest.mark.parametrize(
    ("path", "glob", "expected"),
    [
        ("layers.3.mlp", "layers.*.mlp", True),
        ("layers.3.x.mlp", "layers.*.mlp", False),
        ("layers.3.x.mlp", "layers.**.mlp", True),
        ("layers.mlp", "layers.**.mlp", True),
        ("layer12", "layer*", True),
        ("", "", True),
        ("head", "", False),
    ],
)
def test_globs_go_part_by_part(path: str, glob: str, expected: bool) -> None:
    assert fits(path, glob) is expected


def test_addresses() -> None:
    model, _, batch = made()
    sch = wholestep.schedule(model, example=(batch["ids"],))
    assert list(sch["layers.*.mlp"].modules) == ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
    assert sch["layers.0"]["mlp.fc1"].at == "layers.0.mlp.fc1"
    assert len(sch.find(nn.Linear)) == 7 and len(sch["layers.1"].find(nn.Linear)) == 2
    assert sch.find("layers.*.norm")[0].at == "layers.0.norm"
    wide = sch.find(where=lambda path, module: getattr(module, "out_features", 0) > WIDTH)
    assert [place.at for place in wide] == [f"layers.{i}.mlp.fc1" for i in range(3)] + ["head"]
    found = sch["layers.1"].find(lambda x, w, b: F.relu(F.linear(x, w, b)))
    assert [one.module for one in found] == ["layers.1.mlp"] and "small_models.py" in str(found[0])
    assert not sch.lines  # looking changes nothing


def test_what_there_is_not_is_named_with_the_nearest() -> None:
    sch = wholestep.schedule(made()[0])
    with pytest.raises(BadOption, match=r"no module 'layers.\*.mpl' in Net. did you mean layers.\*.mlp\?"):
        sch["layers.*.mpl"]
    with pytest.raises(BadOption, match=r"no verb 'recomptue'. did you mean recompute\?"):
        sch.recomptue()
    assert not hasattr(sch, "keys") and not hasattr(sch["head"], "__len__")
    with pytest.raises(BadOption, match=r"recompute has no argument 'ration'. did you mean ratio\?"):
        sch["layers.*"].recompute(ration=0.5)
    with pytest.raises(BadOption, match=r"no parameter 'wieght'. did you mean weight\?"):
        sch["head"].shard("wieght", 0)
    with pytest.raises(BadOption, match="needs an example batch"):
        sch.find(lambda x: F.relu(x))
    with pytest.raises(BadOption, match="missing"):
        sch["head"].precision()
    with pytest.raises(wholestep.WholestepError, match="model is a str"):
        wholestep.schedule("model")
    assert not sch.lines


def test_every_verb_explains_itself() -> None:
    sch = wholestep.schedule(made()[0])
    assert set(sch.help().split()) >= set(VERBS) and len(VERBS) == 15
    for name in VERBS:
        text = sch.help(name)
        assert text.startswith(f'sch["path"].{name}(') and "Example: sch" in text
    with pytest.raises(BadOption, match=r"did you mean shard\?"):
        sch.help("shrad")


def test_lines_are_recorded_undone_printed_and_compared() -> None:
    model, _, _ = made()
    before = copy.deepcopy(model.state_dict())
    sch = wholestep.schedule(model)
    sch["layers.*"].recompute(ratio=0.5)
    sch.find(nn.LayerNorm).replace("lean")
    sch["head"].precision("fp32")
    assert len(sch) == 3 and "1  recompute layers.* ratio=0.5  (3 modules)" in repr(sch)
    assert str(sch.undo()) == "precision head to='fp32'" and len(sch) == 2
    assert sch.undo("recompute").name == "recompute" and sch.diff() == "+ replace layers.*.norm by='lean'"
    sch.undo()
    sch.find(where=lambda path, module: path in ("layers.0.norm", "layers.2.norm")).recompute()
    assert [line.at for line in sch] == ["layers.0.norm", "layers.2.norm"]  # not all: each by its path
    assert all(type(m) is type(n) for m, n in zip(model.modules(), Net().modules()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(BadOption, match="nothing to undo of shard"):
        sch.undo("shard")


def test_an_argument_that_is_written_out_is_the_default_all_the_same() -> None:
    """A text from a file is equal to the default, and not the very object."""
    written = make("shard", "head", param="".join(["wei", "ght"]), axis=0)
    assert written == make("shard", "head") and written.to_table() == {"shard": "head"}


def test_what_is_found_is_of_the_model() -> None:
    """The loss that reads what a model returns, so that there is a graph, has additions and sums of its own."""
    model, _, batch = made()
    sch = wholestep.schedule(model, example=(batch["ids"],))
    assert not sch.find(lambda x: x.sum()) and sch.find(lambda x, w, b: F.linear(x, w, b))


def test_two_lines_that_contradict_each_other_are_both_named() -> None:
    sch = wholestep.schedule(made()[0])
    sch["layers.*"].precision("bf16")
    sch["layers.0"].precision("fp32")  # narrower: it counts
    said = r"line 3 of the schedule \(precision layers.\* to='fp16'\) contradicts line 1 of the schedule \(precision layers.\*"
    with pytest.raises(BadOption, match=said):
        sch["layers.*"].precision("fp16")
    sch["head"].shard("weight", 0)
    with pytest.raises(BadOption, match=r"head.weight is cut already"):
        sch["head"].shard("weight", 0)
    with pytest.raises(BadOption, match=r"head.weight is cut already"):
        sch["head"].shard("weight", 1)
    sch["layers.0.mlp"].replace(FastMLP(), params=CARRIED)
    with pytest.raises(BadOption, match=r"both change layers.0.mlp.fc1"):
        sch["layers.0.mlp.fc1"].decompose()
    assert len(sch) == 4


def test_a_recipe_is_written_and_read_back(tmp_path: Path) -> None:
    model, _, _ = made()
    sch = wholestep.schedule(model)
    sch["layers.*"].recompute(ratio=0.5)
    sch["layers.*.mlp"].replace(make="tests.schedule.small_models:make_fast", params=CARRIED)
    sch.replace_all(nn.LayerNorm, "lean")
    sch["head"].shard("weight", -1, parts=2)
    sch.replace_all(linear_relu, linear_clamp)
    sch.save(tmp_path / "recipe.toml")
    text = (tmp_path / "recipe.toml").read_text()
    assert '  { recompute = "layers.*", ratio = 0.5 },' in text and '"layers.*" = "3 x Block"' in text
    again = wholestep.schedule(made()[0], tmp_path / "recipe.toml")
    assert [line.to_table() for line in again] == [line.to_table() for line in sch]
    assert again.diff() == "no difference" and again.text() == text
    assert again.recipe == sch.recipe and sch.diff(tmp_path / "recipe.toml") == "no difference"
    sch.undo()
    sch.replace_all(lambda x, w, b: linear_relu(x, w, b), linear_clamp)  # of the same operators, and another function
    assert again.recipe != sch.recipe and "+ replace_all" in again.diff(sch).replace("- ", "+ ")
    sch.undo()
    sch.replace_all(linear_relu, linear_clamp)
    assert wholestep.schedule(model).diff(sch).count("- ") == 5


def test_what_no_longer_matches_is_said(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    sch = wholestep.schedule(made()[0])
    sch["layers.*.mlp"].recompute()
    sch.save(path)
    model, optimizer, batch = made(layers=2)
    said = r"layers.\*.mlp was 3 x MLP and is 2 x MLP"
    with pytest.warns(wholestep.WholestepWarning, match=said):
        wholestep.compile(model, loss, optimizer, batch, recipe=path, backend="interpret", verbose=False)
    other = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"mpl": nn.Linear(3, 3)})])})
    with pytest.raises(BadOption, match=r"line 1 of recipe.toml.*no module 'layers.\*.mlp'.*did you mean layers"):
        wholestep.schedule(other, path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = 1\n", "not whole"),
        ("format = 2\n[end]\n", "format 2"),
        ("format = 1\nverbs = [{ recomptue = 'layers.*' }]\n[end]\n", r"line 1: there is no verb 'recomptue'"),
        ("format = 1\nverbs = [{ recompute = 'x', ration = 1 }]\n[end]\n", r"did you mean ratio\?"),
        ("format = 1\nverbs = [{ recompute = 3 }]\n[end]\n", "name the place in quotes"),
        ("format = 1\nverb = []\n[end]\n", r"did you mean verbs\?"),
        ("format = 1\nrecompute = []\n[end]\n", "--plan"),
        ("format = ", "is no recipe"),
        ("format = 1\nverbs = [{ replace = 'head', by = 'no.such:thing' }]\n[end]\n", "cannot be imported"),
    ],
)
def test_a_bad_file_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(BadOption, match=said) as error:
        wholestep.schedule(made()[0], path)
    assert "\n" not in str(error.value)


def test_what_has_no_name_cannot_be_written(tmp_path: Path) -> None:
    sch = wholestep.schedule(made()[0])
    sch.replace_all(lambda x, w, b: F.relu(F.linear(x, w, b)), linear_clamp)
    with pytest.raises(BadOption, match=r"cannot be written to a file: .*<lambda> has no name"):
        sch.save(tmp_path / "recipe.toml")
    assert not (tmp_path / "recipe.toml").exists()


def test_a_module_with_two_names_is_changed_once() -> None:
    model, _, batch = made(2, dropout=0.0)
    model.layers[1].mlp = model.layers[0].mlp
    expected = loss(model, batch)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].replace(FastMLP(), params=CARRIED)
    sch.build()
    assert type(model.layers[0].mlp).__mro__[2] is type(Net().layers[0].mlp)
    assert torch.equal(loss(model, batch), expected)
    sch.restore()
    sch.undo()
    sch["layers.0.mlp"].replace(FastMLP(), params=CARRIED)
    with pytest.raises(BadOption, match=r"both change layers.\d.mlp"):
        sch["layers.1.mlp"].replace(FastMLP(), params=CARRIED)


# ---- building ----


def test_lines_about_one_module_by_two_names_and_by_two_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    model, _, batch = made(2, dropout=0.0)
    model.layers[1] = model.layers[0]
    optimizer = torch.optim.AdamW(model.parameters())
    expected, kinds = loss(model, batch), [type(module) for module in model.modules()]
    sch = wholestep.schedule(model)
    sch["layers"].decompose()
    sch["layers.*.mlp.fc1"].print_values()
    sch.build()
    torch.testing.assert_close(loss(model, batch), expected)
    assert capsys.readouterr().err.count("layers.0.mlp.fc1: ") == 2  # it is called twice
    sch.restore()
    assert [type(module) for module in model.modules()] == kinds
    sch["layers.*"].offload("state")
    step = wholestep.compile(model, loss, optimizer, batch, recipe=sch, backend="interpret", check="off")
    torch.testing.assert_close(step(batch), expected.detach())
    assert step.plan.state == {"layers.0.*": "host"}


def test_build_edits_the_same_model_and_restore_takes_it_back() -> None:
    model, _, batch = made(dropout=0.0)
    keys, parameters, expected = list(model.state_dict()), list(model.parameters()), loss(model, batch)
    seen: list[str] = []
    model.layers[0].mlp.register_forward_hook(lambda *_: seen.append("hook"))
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].replace(FastMLP(), params=CARRIED)
    sch.replace_all(nn.LayerNorm, "lean")
    sch["layers.*"].recompute(every=2)
    sch["embed"].annotate("lr_scale", 0.5, param="weight")
    assert sch.build() is model
    assert list(model.state_dict()) == keys and all(map(_is, model.parameters(), parameters))
    assert isinstance(model.layers[0], type(Net().layers[0])) and model.embed.weight.lr_scale == 0.5
    assert torch.equal(loss(model, batch), expected) and seen == ["hook"]
    model.eval()
    assert not model.layers[0].mlp.__dict__["_wholestep_in_place"].training
    loss(model, batch).backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(BadOption, match="built already"):
        sch.build()
    with pytest.raises(BadOption, match=r"changed by build\(\) already"):
        wholestep.schedule(model)["layers.0.mlp"].replace(FastMLP(), params=CARRIED)
    sch.restore()
    assert all(type(m) is type(n) for m, n in zip(model.modules(), Net().modules()))
    assert not hasattr(model.embed.weight, "lr_scale")


def _is(one: Any, other: Any) -> bool:
    return one is other


def test_what_eager_pytorch_cannot_do_is_not_built() -> None:
    model, _, _ = made()
    sch = wholestep.schedule(model)
    sch["layers.*"].kernel(forbid="flash")
    with pytest.raises(BadOption, match=r"build\(\) cannot carry out `kernel"):
        sch.build()
    sch.undo()
    sch["head"].shard("weight", 0)
    with pytest.raises(BadOption, match=r"build\(\) cannot carry out `shard"):
        sch.build()
    sch.undo()
    sch["head"].offload("values")
    with pytest.raises(BadOption, match=r"build\(\) cannot carry out `offload"):
        sch.build()
    assert all(type(m) is type(n) for m, n in zip(model.modules(), Net().modules()))


UNBUILT: dict[str, tuple[Any, ...]] = {"pipeline_cut": ()}
ON_A_MESH = {"shard": ("weight", 0), "sync": ("all_reduce",), "fork_rng": ()}


@pytest.mark.parametrize("verb", UNBUILT)
def test_a_verb_without_an_engine_is_recorded_and_named_by_compile(verb: str) -> None:
    model, optimizer, batch = made()
    sch = wholestep.schedule(model)
    getattr(sch["layers.0.mlp.fc1"], verb)(*UNBUILT[verb])
    assert len(sch) == 1 and sch.recipe.of(verb)
    with pytest.raises(NotBuiltYet, match=f"line 1 of the schedule .*the verb `{verb}`"):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, verbose=False)


@pytest.mark.parametrize("verb", ON_A_MESH)
def test_a_verb_about_ranks_needs_a_mesh(verb: str) -> None:
    model, optimizer, batch = made()
    sch = wholestep.schedule(model)
    getattr(sch["layers.0.mlp.fc1"], verb)(*ON_A_MESH[verb])
    with pytest.raises(BadOption, match=rf"line 1 of the schedule \({verb} .*there is no mesh"):
        wholestep.compile(model, loss, optimizer, batch, recipe=sch, verbose=False)


@pytest.mark.parametrize(
    ("verb", "arguments", "said"),
    [
        (
            "shard",
            {"param": "weight", "axis": 2},
            r"layers.0.mlp.fc1.weight has no dimension 2. its shape is \(16, 8\)",
        ),
        (
            "shard",
            {"param": "weight", "axis": 0, "parts": 3},
            "of size 16, cannot be cut into 3 equal parts. 2 ranks would do",
        ),
        ("sync", {"operation": "all_redcue"}, r"did you mean all_reduce\?"),
        ("sync", {"operation": "all_gather"}, "without a dimension"),
        ("offload", {"what": "valeus"}, r"did you mean values\?"),
        ("recompute", {"ratio": 1.5}, "from 0 to 1"),
        ("recompute", {"every": 0}, "1 or more"),
        ("recompute", {"every": 2, "ratio": 0.5}, "one of every="),
        ("precision", {"to": "fp8"}, "use one of fp32, bf16, fp16"),
        ("kernel", {"take": "flash", "forbid": "math"}, "one of take="),
        ("cudagraph", {}, "recorded as a whole"),
        ("annotate", {"key": "weight", "value": 1}, "has an attribute 'weight' already"),
        ("print_values", {"to": "file"}, "use stderr or stdout"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_recorded(verb: str, arguments: dict[str, Any], said: str) -> None:
    sch = wholestep.schedule(made()[0])
    with pytest.raises(BadOption, match=said):
        getattr(sch["layers.0.mlp.fc1"], verb)(**arguments)
    assert not sch.lines


def test_tied_weights_are_cut_once_under_both_names() -> None:
    model, _, _ = made()
    model.head.weight = model.embed.weight
    sch = wholestep.schedule(model)
    sch["embed"].shard("weight", 0)
    sch["head"].shard("weight", 0)
    assert len(sch.recipe.of("shard")) == 2
    with pytest.raises(BadOption, match="cut already"):
        wholestep.schedule(model, sch.recipe)["head"].shard("weight", 1)
