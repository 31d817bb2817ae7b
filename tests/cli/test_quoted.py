"""Every command that README and tutorial show runs, as it stands there, with options behind it that make it small."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from scripts import quoted
from tests.cli.calls import Call
from tests.forked import TRANSFORMERS, run_in_fork

from wholestep.bench import child, smoke
from wholestep.bench.process import Answer
from wholestep.bench.protocol import SMOKE
from wholestep.cost.measure import this_device
from wholestep.data import texts
from wholestep.profile import profile as profiling
from wholestep.profile.measure import timing
from wholestep.search import measure
from wholestep.train import sampling

TINY = "--steps 2 --batch 2 --seq 16 --backend interpret --set layers=1 --set width=32 --set heads=2"
TINY_PROFILE = "--batch 2 --seq 16 --backend interpret --no-verify --no-memory"
RECIPE = """format = 1
verbs = [{ recompute = "blocks.*", ratio = 1 }]
[end]
"""
SEARCH = """[search]
model = "gpt-1m"
backend = "interpret"
batch = [2, 4]
seq = 16
set = { layers = 1, width = 32, heads = 2 }
[end]"""
README_RUN = {
    "wholestep train": TINY,
    "wholestep train --resume --steps 2400": "--steps 3",
    'wholestep sample runs/gpt-1m-shakespeare --prompt "To be"': "--tokens 4",
    "wholestep eval runs/gpt-1m-shakespeare": "--batches 2",
    "wholestep export runs/gpt-1m-shakespeare my_gpt": "",
    "wholestep train --init runs/gpt-1m-shakespeare --data my_texts": "--steps 2 --backend interpret --out runs/fine",
    "wholestep explain runs/gpt-1m-shakespeare": "",
}
"""Command -> what goes behind it: of an option that is given twice the last one counts. These go on with one run."""
README = {
    "wholestep profile gpt-1m": TINY + " --no-verify --no-memory",
    "wholestep show gpt-1m": TINY.replace("--steps 2 ", "").replace("--backend interpret ", ""),
    "wholestep verify gpt-1m --steps 2": TINY + " --steps 1",
    "wholestep train gpt-1m --data my_texts": TINY,
    "wholestep train gpt-1m --data stdlib": TINY,
    "wholestep train gpt-1m --recipe recipe.toml": TINY,
    "wholestep train resnet-18 --set width=16 --set image_size=16": "--steps 2 --batch 4 --backend interpret",
    "wholestep train hf:llama --set hidden_size=128 --set intermediate_size=256 --set num_hidden_layers=2 "
    "--set vocab_size=2048 --steps 50": "--steps 2 --batch 2 --seq 16 --backend interpret",
    "wholestep plan llama-1b --device h200 --memory 26GiB": "--set num_hidden_layers=2",
    "wholestep bench --smoke": "neumf",
    "wholestep bench gpt2-medium --against compile": "--smoke",
    "wholestep search choices.toml": "--measure 1",
    "wholestep doctor": "",
}
TUTORIAL = {
    "wholestep train gpt-1m --data my_texts --steps 300 --out runs/mine": TINY,
    "wholestep explain runs/mine": "",
    'wholestep sample runs/mine --prompt "The step" --tokens 40 --seed 1': "--tokens 4",
    'wholestep sample runs/mine --prompt "The step" --tokens 16 --temperature 0': "",
    "wholestep eval runs/mine": "--batches 2",
    "wholestep eval runs/mine --data my_texts/plan.md --json": "--batches 2",
    "wholestep export runs/mine my_gpt": "",
    "wholestep train --init runs/mine --data other_texts": "--steps 2 --backend interpret --out runs/fine",
    "wholestep profile runs/mine": TINY_PROFILE,
}
TUTORIAL_ROWS = {
    "wholestep train gpt-1m --data rows.parquet --steps 60 --out runs/rows --quiet": TINY,
    'wholestep sample runs/rows --prompt "The step" --tokens 20 --seed 1': "--tokens 4",
    "wholestep eval runs/rows": "--batches 2",
    "wholestep export runs/rows my_rows": "",
}
TUTORIAL_IMAGES = {
    "wholestep train resnet-18 --data my_images --set width=16 --set image_size=32 --set stem=large "
    "--steps 60 --out runs/digits --quiet": "--steps 2 --batch 4 --backend interpret",
    "wholestep eval runs/digits": "--batches 2",
    "wholestep export runs/digits my_resnet": "",
}


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "choices.toml").write_text(RECIPE.replace("[end]", SEARCH))
    for name in ("my_texts", "other_texts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text("To be, or not to be, that is the question. " * 400)
    monkeypatch.setattr(timing, "LEAST_WARM_UP", 2)
    monkeypatch.setattr(timing, "MOST_WARM_UP", 3)
    monkeypatch.setattr(profiling, "measure_device", lambda kind, fresh: this_device(kind))
    monkeypatch.setattr(texts, "STDLIB_BYTES", 200_000)
    monkeypatch.setattr(sampling, "CHARACTERS", 20)
    # a peer's code generation is not ours to test, and takes half a minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for module in (smoke, measure):
        monkeypatch.setattr(module, "ask_child", asked_here)
    monkeypatch.setitem(measure.measure_in_child.__kwdefaults__, "protocol", SMOKE)


def asked_here(request: str, limit: float, *, program: str = "wholestep.bench.child", **how: object) -> Answer:
    """What a child would answer, without its seconds to import torch."""
    return Answer(list(child.answers(request) if program == "wholestep.bench.child" else [measure.answered(request)]))


def run_command(call: Call, command: str, small: str) -> str:
    done = call(*shlex.split(f"{command} {small}")[1:])
    assert done.code == 0, f"{command} {small}: {done.err[-2000:]}"
    return done.out


def follow(call: Call, table: dict[str, str], text: str, folder: Path) -> list[str]:
    """A part of a page, command by command, small. What its programs printed: those that use transformers run by themselves,
    the others here."""
    printed = []
    for command in quoted.commands_of(text):
        plain = " ".join(command.replace("\\\n", " ").split())
        program = re.fullmatch(r"python - <<'END'\n(.*)\nEND", command, re.DOTALL)
        if plain in table:
            run_command(call, plain, table[plain])
        elif program and "transformers" not in command:
            exec(compile(program[1], "of a page", "exec"), {})
        elif program:
            printed.append(run_in_fork(program[1], imports=TRANSFORMERS, folder=folder))
        else:
            assert not command.startswith("wholestep "), f"nobody runs {command}"
            printed.append(quoted.run(command, folder)[0])
    return printed


def page_of(name: str) -> str:
    return (quoted.ROOT / name).read_text("utf-8")


def listed(page: str) -> list[str]:
    """The commands of wholestep on a page; what comes behind a pipe belongs to the shell."""
    found = [command.partition(" |")[0].replace("\\\n", " ") for command in quoted.commands_of(page_of(page))]
    return [" ".join(command.split()) for command in found if command.startswith("wholestep ")]


def test_every_command_of_the_readme_is_run() -> None:
    assert sorted(set(listed("README.md"))) == sorted(README_RUN | README)


def test_the_readme_goes_on_with_its_run(call: Call) -> None:
    """In the order of the page: later commands read what earlier ones wrote."""
    for command, small in README_RUN.items():
        run_command(call, command, small)


@pytest.mark.parametrize("command", README)
def test_a_command_of_the_readme(command: str, call: Call) -> None:
    run_command(call, command, README[command])


def tutorial(number: int) -> str:
    """From own text, with a parquet file, with images."""
    return page_of("docs/tutorial.md").split("\n## The same with ")[number]


def test_every_command_of_the_tutorial_is_run() -> None:
    assert set(listed("docs/tutorial.md")) == set(TUTORIAL | TUTORIAL_ROWS | TUTORIAL_IMAGES)


def test_the_tutorial_adds_up_its_seconds() -> None:
    page = page_of("docs/tutorial.md")
    assert re.search(quoted.TOOK, page) and quoted.added_up(page) == page
    other = re.sub(quoted.TOOK, "Sections 1 to 5 took 999 seconds", page)
    assert other != page and quoted.added_up(other) == page


def opened(printed: str) -> str:
    """What a program of transformers printed before it told that it has the logits of the run, and has them without us."""
    found = re.fullmatch(r"(.*)logits differ by (\S+) at most\nwholestep was imported: False\n", printed, re.DOTALL)
    assert found and float(found[2]) <= 1e-5, printed
    return found[1].strip()


def test_the_tutorial_from_own_text_to_transformers(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shutil.rmtree(tmp_path / "my_texts")  # the page makes its own
    written = opened(follow(call, TUTORIAL, tutorial(0), tmp_path)[-1])
    again = call("sample", "runs/mine", "--prompt", "The step", "--tokens", "16", "--temperature", "0")
    assert len(written) > 10 and again.out.strip() == written, "the same text from the same logits"


def test_the_tutorial_from_a_parquet_file_to_transformers(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("pyarrow")
    for page in (quoted.ROOT / "docs").glob("a*.md"):
        shutil.copy(page, tmp_path / "my_texts")
    opened(follow(call, TUTORIAL_ROWS, tutorial(1), tmp_path)[-1])


def test_the_tutorial_from_images_to_transformers(call: Call, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("PIL")
    assert "digit-9" in opened(follow(call, TUTORIAL_IMAGES, tutorial(2), tmp_path)[-1])


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
