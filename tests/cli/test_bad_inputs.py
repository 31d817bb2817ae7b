"""Bad inputs over all commands: exit code 2, one line that says what to do, quickly, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cli import bad_files
from tests.cli.calls import SETUP, Call, program

SECONDS = 2.0
"""Of the processor: what waits for another process to leave it does not count."""
BAD: list[tuple[str, str]] = [
    # ---- the parser ----
    ("plna gpt-1m", "plan"),
    ("plan", "MODEL"),
    ("train --lr 0.1", "--set lr=VALUE"),
    ("train --weight-decay 0.1", "--set weight_decay=VALUE"),
    ("train --step 3", "did you mean --steps?"),
    ("plan gpt-1m --learning-rate 3", "wholestep plan --help"),
    ("bench --lr 3", "wholestep bench --help"),
    ("train --set", "--set"),
    ("train --steps many", "--steps"),
    ("train --steps 0", "--steps"),
    ("train --batch -1", "--batch"),
    ("train --seed -1", "--seed"),
    ("tune", "not part of this version"),
    # ---- MODEL ----
    ("train gpt-1", "did you mean gpt-1m?"),
    ("plan llama-1", "did you mean llama-1b?"),
    ("profile nothing-like-it", "presets:"),
    ("verify ./nowhere", "there is no such folder"),
    ("show nowhere:setup", "No module named"),
    ("show own_training:setpu", "did you mean own_training:setup?"),
    ("plan hf:llam", "did you mean hf:llama?"),
    # ---- train ----
    ("train --config nowhere.toml", "No such file"),
    ("train --config broken.toml", "is no TOML"),
    ("train --config unknown.toml", "did you mean steps?"),
    ("train --config misplaced.toml", "stands under [set]"),
    ("train --config out.toml", "--out on the command line"),
    ("train --config kind.toml", "give a whole number"),
    ("train --config precision.toml", "did you mean bf16?"),
    ("train --config both.toml", "give one of them"),
    ("train --config good.toml --resume", "a run has its own settings"),
    ("train --log tensorbord", "did you mean tensorboard?"),
    ("train --log csv,nothing", "use csv, tensorboard, wandb"),
    ("train --resume --out nowhere", "there is nothing to resume"),
    ("train --resume", "there is no run"),
    ("train --out own_training.py/run", "is not a folder"),
    ("train --memory 12", "did you mean 12GiB?"),
    ("train --memory lots", "12GiB"),
    ("train --memory 8GiB --plan plan.toml", "give one of them"),
    ("train --plan nowhere.toml", "there is no plan"),
    ("train --recipe nowhere.toml", "there is no recipe"),
    ("train --nonfinite ignore", "Use stop or skip or allow"),
    ("train --set lr=fast", "a number"),
    ("train --set lr", "key=value"),
    ("train --set lr=-1", "more than 0"),
    ("train --set steps=3", "use --steps VALUE"),
    ("train --set optimizer=adam", "did you mean adamw?"),
    ("train --seq 100000", "use --seq 64 or less"),
    ("train --data nowhere.txt", "neither a known data set nor a file"),
    ("train resnet-18 --seq 8", "sees images"),
    # ---- plan ----
    ("plan gpt-1m --device h2000", "h200"),
    ("plan gpt-1m --device 0GiB", "less than one byte"),
    ("plan gpt-1m --memory 200GiB", "has 140 GiB"),
    ("plan gpt-1m --memory much", "12GiB"),
    ("plan gpt-1m --memory 3", "did you mean 3GiB?"),
    ("plan gpt-1m --precision fp8", "Use fp32 or bf16 or fp16"),
    ("plan gpt-1m --gpus 2", "use --gpus 1"),
    ("plan gpt-1m --out nowhere/plan.toml", "there is no folder nowhere"),
    ("plan gpt-1m --peers good.toml", "give JSON"),
    ("plan gpt-1m --device t4 --precision bf16", "has no units for bf16"),
    # ---- verify, show, profile, explain ----
    ("verify gpt-1m --backend inducter", "did you mean inductor?"),
    ("verify gpt-1m --disable fold_cast", "did you mean fold_casts?"),
    ("show gpt-1m --stage capture", "did you mean captured?"),
    ("show gpt-1m --memory 1GiB", "use --stage planned or lowered"),
    ("profile gpt-1m --system egaer", "did you mean eager?"),
    ("profile gpt-1m --out report.pdf", ".html"),
    ("profile gpt-1m --system eager --memory 1GiB", "only Wholestep's own step"),
    ("explain nowhere", "does not exist"),
    ("explain own_training.py", "is not a run"),
    # ---- bench, compare, search, doctor ----
    ("bench bert-larg", "did you mean bert-large?"),
    ("bench --smoke --steps 3", "leave --smoke out"),
    ("bench neumf --against nothing", "nothing"),
    ("bench --suite paper", "did you mean papers?"),
    ("compare a.json b.json", "No such file"),
    ("search nowhere.toml", "there is no recipe"),
    ("doctor everything", "unexpected extra argument"),
    # ---- empty, twice, contradictory, not a number, too large ----
    ("train ''", "MODEL is an empty text"),
    ("train --data ''", "--data is an empty text"),
    ("train --config ''", "--config is an empty text"),
    ("sample ''", "RUN is an empty text"),
    ("train --seed 99999999999999999999999", "use less than"),
    ("train --batch 99999999999999", "use a smaller batch"),
    ("train --batch 20000000", "a step keeps more than 19.1 TiB"),
    ("verify resnet-18 --batch 2000000", "use a smaller batch"),
    ("profile hf:gpt2 --batch 2000000", "or a budget (--memory)"),
    ("train --set lr=nan", "a number"),
    ("train --set lr=1e400", "a number"),
    ("train --set layers=1e30", "use fewer layers"),
    ("train --set layers=0", "1 or more"),
    ("train --set width=100000000", "a smaller width"),
    ("train --set vocabulary=99999999999", "use less than 10,000,000"),
    ("train --set heads=3", "use a multiple"),
    ("train --set dropout=2", "less than 1"),
    ("train --memory -1GiB", "12GiB"),
    ("train --memory nanGiB", "12GiB"),
    ("train --memory 0", "less than one byte"),
    ("train --host-memory lots", "12GiB"),
    ("train --offload-path own_training.py", "is no folder"),
    ("train --disable nothing", "there are recognise_masks"),
    ("train --precision FP32", "Use fp32"),
    # ---- places to write to ----
    ("train --out loop", "leads nowhere"),
    ("train --out taken", "a folder that is new or empty"),
    ("train --out half", "add --resume"),
    ("train --out own_training.py", "is a file"),
    ("train --dump own_training.py", "a folder that can be written"),
    ("export half taken", "name a folder or file that is new"),
    ("export half good.txt", "name a folder or file that is new"),
    ("export half own_training.py/x", "is not a folder"),
    ("export half loop", "leads nowhere"),
    ("profile gpt-1m --out taken", ".html"),
    ("profile gpt-1m --out nowhere/x.html", "there is no folder nowhere"),
    ("plan gpt-1m --svg taken", "is a folder"),
    ("bench neumf --out taken", "is a folder"),
    ("search verb.toml --out taken", "is a folder"),
    # ---- runs, checkpoints, folders of others ----
    ("train --init nowhere", "name a run, a checkpoint"),
    ("train --init taken", "no .safetensors weights"),
    ("train --init config_only", "no .safetensors weights"),
    ("train --init half", "settings is missing"),
    ("train --resume --out taken", "is not a run"),
    ("train --resume --out half", "settings is missing"),
    ("train --resume --out foreign", "does not describe a run"),
    ("train --resume --out newer", "update Wholestep"),
    ("train --resume --out cut", "cannot be read"),
    ("train taken", "without a config.json"),
    ("train strange", "which transformers does not know"),
    ("sample", "Missing argument"),
    ("sample nowhere", "there is no such folder"),
    ("sample taken", "neither a run nor a folder"),
    ("sample config_only", "neither a run nor a folder"),
    ("sample gpt-1m", "has no weights"),
    ("sample half --temperature -1", "greater than or equal to 0"),
    ("sample half --temperature inf", "give a number"),
    ("sample half --top-p 0", "more than 0"),
    ("sample half --tokens 0", "greater than or equal to 1"),
    ("eval nowhere", "there is no such folder"),
    ("eval half", "settings is missing"),
    ("eval foreign", "does not describe a run"),
    ("eval half --batches 0", "greater than or equal to 1"),
    ("export half", "Missing argument"),
    ("export nowhere out", "there is no such folder"),
    ("export half out --precision fp8", "Use fp32"),
    ("explain loop", "symbolic links"),
    ("explain foreign", "does not describe a run"),
    ("explain half/run.json/x", "does not exist"),
    ("explain broken.toml", "is no plan"),
    # ---- data ----
    ("train --data utf16.txt", "convert it to UTF-8"),
    ("train --data latin1.txt", "convert it to UTF-8"),
    ("train --data binary.bin", "is no text"),
    ("train --data empty.txt", "is an empty file"),
    ("train --data short.txt", "use a longer text"),
    ("train --data mixed", "b.txt is no text: byte 0 is 0. leave it out with --glob"),
    ("train --data nothing", "holds no file"),
    ("train --data \u6587\u5b57/\U0001f600.txt", "is an empty file"),
    ("train --data loop", "neither a known data set nor a file"),
    ("train --data missing.jsonl", "line 3 has no field 'text'"),
    ("train --data nested.jsonl", "no text"),
    ("train --data broken.jsonl", "line 1 is not JSON"),
    ("train --data float.npy", "one row of whole numbers"),
    ("train --data two-d.npy", "one row of whole numbers"),
    ("train --data negative.npy", "ids are 0 or more"),
    ("train --data two.safetensors", "choose one with --field: a, b"),
    ("train --data bad.safetensors", "cannot be read as .safetensors"),
    ("train --data good.txt --glob *.md", "is one file"),
    ("train --data good.txt --field text", "without fields"),
    ("train --data mixed --glob **[", "is no pattern"),
    ("train --glob *.txt", "is one text"),
    ("train --data stdlib --field text", "is one text"),
    ("train resnet-18 --glob *.png", "has no files to choose from"),
    ("train --data own_training:setup --glob *.txt", "has no files to choose from"),
    ("train resnet-18 --data nothing", "put files into it"),
    ("train --data nowhere:batches", "No module named"),
    ("train --data own_training:nothing", "has no function"),
    ("train --data digits", "reads text"),
    ("train --data good.txt --tokenizer tok", "is not a tokenizer"),
    ("train --data good.txt --tokenizer nowhere", "name a folder that holds one"),
    ("train resnet-18 --data good.txt", "one folder of images per class"),
    ("train resnet-18 --data one", "nothing to tell apart"),
    ("train resnet-18 --tokenizer bytes", "sees images"),
    ("verify gpt-1m --data latin1.txt", "convert it to UTF-8"),
    ("show gpt-1m --data nothing", "holds no file"),
    ("profile gpt-1m --data nowhere.txt", "neither a known data set nor a file"),
    # ---- settings of transformers ----
    ("train hf:bert --set hidden_sise=3", "did you mean hidden_size?"),
    ("train hf:bert --set num_hidden_layers=two", "a whole number"),
    ("train hf:bert --set vocab_size=-1", "use 1 or more"),
    ("train hf:bert --set num_attention_heads=5", "hidden_size=768 does not divide into num_attention_heads=5"),
    ("plan hf:gpt2 --set n_head=7", "n_embd=768 does not divide into n_head=7"),
    ("train hf:llama --set num_attention_heads=0", "use 1 or more"),
    ("train hf:bert --seq 100000", "use --seq 512 or less"),
    ("train hf:bert --set accumulate=3", "use a multiple"),
    ("train hf:bert --data digits", "reads text"),
    ("plan hf:", "for example hf:bert"),
    ("plan config_only --set hidden_sise=3", "did you mean hidden_size?"),
    # ---- other files ----
    ("train --config half-step.toml", "give a whole number"),
    ("train --config no-table.toml", "write a table [set]"),
    ("train --config latin1.txt", "is no TOML"),
    ("train --config taken", "every run holds one"),
    ("train --recipe own_training.py", "is no recipe"),
    ("train --recipe verb.toml", "did you mean recompute?"),
    ("train --plan verb.toml", "unknown field"),
    ("plan gpt-1m --peers nowhere.json", "give JSON"),
    ("plan gpt-1m --host-memory -3", "12GiB"),
    ("plan gpt-1m --recipe verb.toml", "did you mean recompute?"),
    ("verify gpt-1m --mesh tp", "write it as tp=4"),
    ("verify gpt-1m --mesh tp=0", "at least 1"),
    ("bench neumf --with nowhere.py", "there is no such file"),
    ("bench neumf --with good.txt --recipe verb.toml", "give one of them"),
    ("bench neumf --recipe nowhere.toml", "there is no recipe"),
    ("bench --limit nan", "greater than or equal to 1"),
    ("compare good.txt good.txt", "is not JSON"),
    ("compare verb.toml verb.toml", "did you mean recompute?"),
    ("compare a.json", "Missing argument"),
    ("compare a.json b.json --fail-on slow", "did you mean slower?"),
    ("search good.toml", "unknown field"),
    ("search verb.toml --measure -1", "greater than or equal to 0"),
    ("search verb.toml --clock sun", "Use wall or cpu"),
    ("search verb.toml --device h200", "give --measure 0"),
    ("doctor --jason", "did you mean --json?"),
]


CHECK = """
import contextlib, io, json, resource, shlex, sys
from wholestep import cli
found = []
for words in json.loads(sys.stdin.read()):
    sys.argv = ["wholestep", *shlex.split(words)]
    out, err, code, began = io.StringIO(), io.StringIO(), None, resource.getrusage(resource.RUSAGE_SELF)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
    ended = resource.getrusage(resource.RUSAGE_SELF)
    taken = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    found.append([code, out.getvalue(), err.getvalue(), taken, "torch" in sys.modules])
print(json.dumps(found))
"""
"""One process that takes all of them in turn, and never loads torch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bad")
    bad_files.make(made)
    (made / "own_training.py").write_text(SETUP)
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """Words -> what came of them; and under an empty text what was left in the folder."""
    before = sorted(folder.rglob("*"))
    asked = json.dumps([words for words, _ in BAD])
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=folder, input=asked, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    left = [path for path in sorted(folder.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    return dict(zip([words for words, _ in BAD], json.loads(done.stdout), strict=True)) | {"": left}


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words for words, _ in BAD])
def test_it_is_one_line_at_once_and_torch_is_not_loaded(words: str, said: str, answers: dict[str, Any]) -> None:
    code, out, err, taken, loaded = answers[words]
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1, (code, err)
    assert lines[0].startswith("wholestep: ") and said in lines[0], lines[0]
    assert not out and taken < SECONDS and not loaded, (taken, out, loaded)
    assert "Traceback" not in err and "an error of Wholestep's own" not in err


def test_nothing_is_left_behind(answers: dict[str, Any]) -> None:
    assert not answers[""], answers[""]


def test_there_are_many_over_all_commands() -> None:
    from wholestep.cli import COMMANDS

    assert len(BAD) >= 160 and len({words for words, _ in BAD}) == len(BAD)
    assert {words.split()[0] for words, _ in BAD} >= set(COMMANDS)


@pytest.mark.parametrize(
    "words",
    ["train --data mixed", "train hf:bert --set hidden_sise=3", "sample taken", "bench neumf --recipe verb.toml"],
)
def test_from_the_shell_it_takes_less_than_two_seconds_of_processor_time(words: str, folder: Path) -> None:
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "wholestep", *words.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout, done.stderr
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < SECONDS


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --data {}/closed.txt", "cannot be read"),
        ("train --config {}/closed.txt", "Permission denied"),
        ("train --out {}/shut/run", "no permission"),
        ("export half {}/shut/out", "no permission"),
    ],
)
def test_what_may_not_be_read_or_written_is_one_line(
    words: str, said: str, call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (tmp_path / "closed.txt").touch(0o000)
    (tmp_path / "shut").mkdir(0o500)
    done = call(*words.format(tmp_path).split())
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1, done.err


def test_what_a_cpu_cannot_hold_is_told_before_the_first_step(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = program(tmp_path, monkeypatch)
    has = psutil.virtual_memory().total + psutil.swap_memory().total
    batch = has // (64 * 128 * 4 * 4 * 9)  # less than what is refused without looking at the graph
    done = call("train", "--batch", str(batch), "--backend", "interpret", "--set", "tokenizer=bytes", "--quiet")
    assert done.code == 2 and "the step needs about" in done.err.strip().splitlines()[-1], done.err
    assert not (folder / "runs").exists(), "no run is left behind"
