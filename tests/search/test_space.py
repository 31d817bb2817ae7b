"""Recipes with lists and ranges: which points they have, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from wholestep.errors import WholestepError
from wholestep.search.space import read_space

RECIPE = """format = 1
verbs = [{verbs}]
[search]
model = "gpt-1m"
{search}
[end]
"""


def write(folder: Path, search: str = "", verbs: str = "") -> Path:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(search=search, verbs=verbs))
    return path


def test_every_combination_is_a_point(tmp_path: Path) -> None:
    search = 'batch = [2, 4]\nseq = 8\nprecision = ["fp32", "bf16"]\nset = { layers = 2, lr = [1e-3, 1e-4] }'
    verbs = '{ recompute = "blocks.*", ratio = { from = 0, to = 1, step = 0.5 } }'
    space = read_space(write(tmp_path, search, verbs))
    assert [(axis.name, axis.values) for axis in space.axes] == [
        ("batch", (2, 4)), ("precision", ("fp32", "bf16")), ("lr", (1e-3, 1e-4)), ("recompute ratio", (0.0, 0.5, 1.0)),
    ]  # fmt: skip
    assert len(space.points) == 24 == len({point.key for point in space.points})
    last = space.points[-1]
    assert last.settings == {"batch": 4, "seq": 8, "precision": "bf16", "set": {"layers": 2, "lr": 1e-4}}
    assert last.sets == ("layers=2", "lr=0.0001") and last.places == (1, 1, 1, 2)
    assert str(last.recipe.lines[0]) == "recompute blocks.* ratio=1.0"


def test_places_of_one_name_say_where_they_stand(tmp_path: Path) -> None:
    search = 'precision = ["fp32", "bf16"]\nbatch = [4, 8]\nset = { batch = [1, 2] }'
    space = read_space(write(tmp_path, search, '{ precision = ["head", "blocks.0"], to = "fp32" }'))
    assert [axis.name for axis in space.axes] == ["batch", "precision", "set batch", "precision (line 1)"]
    assert len(space.points) == 16 == len({point.name for point in space.points})


@pytest.mark.parametrize(
    ("verbs", "text"),
    [
        ("{ recompute = [5, 6] }", "line 1: recompute = 5. name the place in quotes"),
        ('{ recompute = "blocks.*", ratio = [2020-01-01, 0.5] }', "2020-01-01 is a date. give a number, or a text"),
    ],
)
def test_a_line_that_is_none_is_refused(tmp_path: Path, verbs: str, text: str) -> None:
    with pytest.raises(WholestepError, match=text):
        read_space(write(tmp_path, "batch = 4", verbs))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{ from = 8, to = 64, times = 2 }", (8, 16, 32, 64)),
        ("{ from = 2, to = 9, step = 3 }", (2, 5, 8)),
        ("[4, 2, 4]", (4, 2)),
    ],
)
def test_ranges_and_lists(tmp_path: Path, text: str, values: tuple[int, ...]) -> None:
    assert read_space(write(tmp_path, f"batch = {text}")).axes[0].values == values


def test_tenths_are_tenths(tmp_path: Path) -> None:
    space = read_space(write(tmp_path, "", '{ recompute = "blocks.*", ratio = { from = 0, to = 1, step = 0.1 } }'))
    assert space.axes[0].values == (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def test_values_by_size(tmp_path: Path) -> None:
    search = 'batch = [8, 2, 4]\nmemory = ["2GiB", "900MiB"]\nprecision = ["fp32", "bf16"]'
    assert [axis.ranks for axis in read_space(write(tmp_path, search)).axes] == [[2, 0, 1], None, [1, 0]]


def test_a_point_of_two_recipes_has_one_key(tmp_path: Path) -> None:
    few = read_space(write(tmp_path, "batch = [2, 4]")).points
    more = read_space(write(tmp_path, "batch = [2, 3, 4]")).points
    assert {point.key for point in few} < {point.key for point in more}


@pytest.mark.parametrize(
    ("search", "verbs", "said"),
    [
        ("bach = 4", "", "did you mean batch?"),
        ("batch = []", "", "at least one value"),
        ("batch = [0, 4]", "", "1 or more"),
        ("batch = { from = 8, too = 64 }", "", "did you mean to?"),
        ("batch = { from = 8, to = 64 }", "", "times = 2"),
        ("batch = { from = 8, to = 4, step = 1 }", "", "does not rise"),
        ("batch = { from = 1, to = 10000, step = 1 }", "", "more than 512"),
        ('precision = ["bf61"]', "", "did you mean bf16?"),
        ('backend = "interpet"', "", "did you mean interpret?"),
        ('memory = "12GBs"', "", "12GBs"),
        ("", '{ recomptue = "blocks.*" }', "did you mean recompute?"),
        ("", '{ recompute = "blocks.*", ration = [0, 1] }', "did you mean ratio?"),
    ],
)
def test_what_is_refused(tmp_path: Path, search: str, verbs: str, said: str) -> None:
    with pytest.raises(WholestepError) as raised:
        read_space(write(tmp_path, search, verbs))
    assert said in str(raised.value) and "recipe.toml" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format = 1\n[end]\n", "[search]"),
        ('format = 1\n[serach]\nmodel = "gpt-1m"\n[end]\n', "did you mean search?"),
        ('format = 1\n[search]\nmodel = "gpt-1m"\n', "not whole"),
        ("format = ", "is no recipe"),
    ],
)
def test_what_is_no_recipe_to_search(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(WholestepError) as raised:
        read_space(path)
    assert said in str(raised.value)
