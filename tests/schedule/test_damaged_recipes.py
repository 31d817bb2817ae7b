"""A recipe file that is no longer what was written: one clear line, or the same training; never another one in silence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import nn

import wholestep
from wholestep.errors import BadOption
from wholestep.schedule.recipe import Recipe
from wholestep.schedule.recipe_file import read_recipe


def written(path: Path, to: str = "bf16") -> str:
    sch = wholestep.schedule(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)))
    sch["0"].precision(to)
    sch["1"].recompute()
    sch["2"].precision("auto")
    sch.save(path)
    return path.read_text(encoding="utf-8")


def numbers_of(recipe: Recipe) -> list[str]:
    return [line.full() for line in recipe if line.numbers and "auto" not in line.full()]


def test_a_flipped_bit_trains_the_same_or_is_an_error(tmp_path: Path) -> None:
    file, source = tmp_path / "recipe.toml", random.Random(3)
    text = written(file).encode()
    expected, refused = numbers_of(read_recipe(file)), 0
    for place in range(text.index(b"format ="), len(text)):
        flipped = bytearray(text)
        flipped[place] ^= 1 << source.randrange(8)
        file.write_bytes(flipped)
        try:
            assert numbers_of(read_recipe(file)) == expected, bytes(flipped).decode()
        except BadOption as error:
            refused += 1
            assert "\n" not in error.what
    assert refused


@pytest.mark.parametrize(
    "before, after",
    [('"bf16"', '"fp16"'), ('precision = "0"', 'precision = "1"'), ('  { precision = "0", to = "bf16" },\n', "")],
)
def test_an_edited_line_is_one_when_the_end_says_so(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "recipe.toml"
    text = written(file)
    assert before in text
    file.write_text(text.replace(before, after))
    with pytest.raises(BadOption, match=r"not what the recipe was written with") as told:
        read_recipe(file)
    assert told.value.hint is not None and "[end]" in told.value.hint
    end = next(line for line in text.splitlines() if line.startswith("[end."))
    file.write_text(text.replace(before, after).replace(end, "[end]"))
    read_recipe(file)


def test_what_measurement_decides_may_be_edited(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    text = written(file, to="auto")
    assert "\n[end]\n" in text
    file.write_text(text.replace('precision = "2", to = "auto"', 'precision = "2", to = "fp32"'))
    assert any("fp32" in line.full() for line in read_recipe(file))
