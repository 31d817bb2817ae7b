"""Every command that README and tutorial show runs, as it stands there, with options behind it that make it small."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from scripts import quoted
from tests.cli.calls import Call

from wholestep.cost.measure import this_device
from wholestep.profile import profile as profiling
from wholestep.profile.measure import timing

TINY = "--steps 2 --batch 2 --seq 16 --backend interpret --set layers=1 --set width=32 --set heads=2"
TINY_PROFILE = "--batch 2 --seq 16 --backend interpret --no-verify --no-memory"
RECIPE = """format = 1
verbs = [{ recompute = "blocks.*", ratio = 1 }]
[end]
"""
CHOICES = RECIPE.replace("[end]", '[search]\nmodel = "gpt-1m"\nbatch = [2, 4]\n[end]')
README = {
    "wholestep train": TINY,
    "wholestep train --resume --steps 2400": "--steps 3",
    'wholestep sample runs/gpt-1m-shakespeare --prompt "To be"': "--tokens 4",
    "wholestep explain runs/gpt-1m-shakespeare": "",
    "wholestep show gpt-1m": TINY.replace("--steps 2 ", "").replace("--backend interpret ", ""),
    "wholestep doctor": "",
}
"""Command -> what goes behind it: of an option that is given twice the last one counts."""
README_SLOW = {
    "wholestep profile gpt-1m": TINY + " --no-verify --no-memory",
    "wholestep eval runs/gpt-1m-shakespeare": "--batches 2",
    "wholestep export runs/gpt-1m-shakespeare my_gpt": "",
    "wholestep verify gpt-1m --steps 2": TINY + " --steps 1",
    "wholestep train gpt-1m --data my_texts": TINY,
    "wholestep train --init runs/gpt-1m-shakespeare --data my_texts": "--steps 2 --backend interpret --out runs/fine",
    "wholestep train gpt-1m --data stdlib": TINY,
    "wholestep train resnet-18 --set width=16 --set image_size=16": "--steps 2 --batch 4 --backend interpret",
    "wholestep train hf:llama --set hidden_size=128 --set intermediate_size=256 --set num_hidden_layers=2 "
    "--set vocab_size=2048 --steps 50": "--steps 2 --batch 2 --seq 16 --backend interpret",
    "wholestep train gpt-1m --recipe recipe.toml": TINY + " --out runs/recipe",
    "wholestep plan llama-1b --device h200 --memory 26GiB": "",
    "wholestep bench --smoke": "neumf",
    "wholestep bench gpt2-medium --against compile": "--smoke",
    "wholestep search choices.toml": "--measure 1",
}
TUTORIAL = {
    "wholestep train gpt-1m --data my_texts --steps 300 --out runs/mine": TINY,
    "wholestep explain runs/mine": "",
    'wholestep sample runs/mine --prompt "The step" --tokens 40 --seed 1': "--tokens 4",
    'wholestep sample runs/mine --prompt "The step" --tokens 16 --temperature 0': "",
    "wholestep eval runs/mine": "--batches 2",
    "wholestep eval runs/mine --data my_texts/plan.md --json": "--batches 2",
    "wholestep export runs/mine my_gpt": "",
}
TUTORIAL_SLOW = {
    "wholestep train --init runs/mine --data other_texts": "--steps 2 --backend interpret --out runs/fine",
    "wholestep profile runs/mine": TINY_PROFILE,
    "wholestep train gpt-1m --data rows.parquet --steps 60 --out runs/rows --quiet": TINY,
    'wholestep sample runs/rows --prompt "The step" --tokens 20 --seed 1': "--tokens 4",
    "wholestep eval runs/rows": "--batches 2",
    "wholestep export runs/rows my_rows": "",
    "wholestep train resnet-18 --data my_images --set width=16 --set image_size=32 --set stem=large "
    "--steps 60 --out runs/digits --quiet": "--steps 2 --batch 4 --backend interpret",
    "wholestep eval runs/digits": "--batches 2",
    "wholestep export runs/digits my_resnet": "",
}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "choices.toml").write_text(CHOICES)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "one.txt").write_text("To be, or not to be, that is the question. " * 400)
    monkeypatch.setattr(timing, "LEAST_WARM_UP", 2)
    monkeypatch.setattr(timing, "MOST_WARM_UP", 3)
    monkeypatch.setattr(profiling, "measure_device", lambda kind, fresh: this_device(kind))


def run_all(call: Call, table: dict[str, str]) -> None:
    """In the order of the page: later commands read what earlier ones wrote."""
    for command, small in table.items():
        done = call(*shlex.split(f"{command} {small}")[1:])
        assert done.code == 0, f"{command} {small}: {done.err[-2000:]}"


def follow(call: Call, table: dict[str, str], page: str, folder: Path, *, among: set[str]) -> str:
    """The console blocks of a page one after the other, small; what the last command that is not ours printed."""
    printed = ""
    for command in quoted.commands_of(page):
        plain = " ".join(command.replace("\\\n", " ").split())
        if plain in table:
            done = call(*shlex.split(f"{plain} {table[plain]}")[1:])
            assert done.code == 0, f"{command}: {done.err[-2000:]}"
        elif not command.startswith("wholestep ") and any(word in command for word in among):
            printed, _ = quoted.run(command, folder)
    return printed


def listed(page: str) -> list[str]:
    """The commands of wholestep on a page; what comes behind a pipe belongs to the shell."""
    found = [command.partition(" |")[0].replace("\\\n", " ") for command in quoted.commands_of(page)]
    return [" ".join(command.split()) for command in found if command.startswith("wholestep ")]


def test_every_command_of_the_readme_is_run() -> None:
    assert sorted(set(listed("README.md"))) == sorted(README | README_SLOW)


def test_the_quick_commands_of_the_readme(call: Call) -> None:
    run_all(call, README)


@pytest.mark.slow
def test_the_other_commands_of_the_readme(call: Call) -> None:
    run_all(call, README | README_SLOW)


def test_every_command_of_the_tutorial_is_run() -> None:
    assert set(listed("docs/tutorial.md")) == set(TUTORIAL | TUTORIAL_SLOW)


def test_the_tutorial_adds_up_its_seconds() -> None:
    page = (quoted.ROOT / "docs" / "tutorial.md").read_text("utf-8")
    text, found = page.partition("## 6.")[0], re.search(r"took (\d+) minutes (\d+) seconds", page)
    assert found is not None
    assert 60 * int(found[1]) + int(found[2]) == sum(map(int, re.findall(r"^# (\d+) s$", text, re.MULTILINE)))


def test_the_tutorial_from_own_text_to_transformers(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shutil.rmtree(tmp_path / "my_texts")  # the page makes its own
    printed = follow(call, TUTORIAL, "docs/tutorial.md", tmp_path, among={"mkdir my_texts", "AutoTokenizer"})
    written, _, imported = printed.rpartition("wholestep was imported: ")
    assert imported.strip() == "False"
    again = call("sample", "runs/mine", "--prompt", "The step", "--tokens", "16", "--temperature", "0")
    assert len(written.strip()) > 10 and again.out.strip() == written.strip(), "the same text from the same logits"


def test_the_rest_of_the_tutorial(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "my_texts").rename(tmp_path / "other_texts")
    rest = {"mkdir my_texts", "pyarrow", "PIL", "AutoModelForImageClassification"}
    assert "resnet" in follow(call, TUTORIAL | TUTORIAL_SLOW, "docs/tutorial.md", tmp_path, among=rest)


@pytest.mark.slow
@pytest.mark.parametrize("page", quoted.PAGES)
def test_what_pages_quote_is_what_commands_print(page: str) -> None:
    assert not quoted.check_page(page, write=False), "make quoted ARGS=--write rewrites the pages"


# ---- the script itself ----


def test_commands_and_their_output_are_found() -> None:
    one, two = quoted.quotes_of("$ wholestep train \\\n    --steps 2\nloss 1\n$ wholestep doctor\n")
    assert one == quoted.Quote("wholestep train \\\n    --steps 2", "loss 1\n") and two.output == ""


def test_what_is_compared() -> None:
    printed = "trained in 2:01 (13 tokens/s)\npeak 23.7 GiB\n\n"
    assert quoted.comparable(printed, []) == ["trained in #:# (# tokens/s)", "peak 23.7 GiB"]
    assert quoted.comparable(printed, ["shape"]) == ["trained", "peak"]
    assert quoted.comparable(printed, ["head=1"]) == ["trained in #:# (# tokens/s)"]
    assert quoted.comparable("...\npeak 23.7 GiB\n# 12 s\n", ["tail=1"]) == ["peak 23.7 GiB"]
    assert quoted.cut(["a  1", "   2", "b  3"], ["only=a|c"]) == ["a  1", "   2"]
    assert quoted.shown(quoted.Quote("x", ""), printed, 3.2, ["tail=1", "timed"]) == "$ x\n...\npeak 23.7 GiB\n# 3 s\n"


def test_a_page_is_compared_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quoted, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```console\n$ echo 12\n13\n```\n\n```console\n$ cat left; touch left\n```\n")
    assert "-13\n+12" in quoted.check_page("page.md", write=False)[0]
    quoted.check_page("page.md", write=True)
    assert "$ echo 12\n12\n```" in page.read_text() and not quoted.check_page("page.md", write=False)
