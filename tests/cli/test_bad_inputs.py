"""Bad inputs over all commands: exit code 2, one line that says what to do, quickly, and nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.calls import Call, program

SECONDS = 2.0
"""Of this process: what waits for another one to leave the CPU does not count."""
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
    ("train --nonfinite ignore", "Use stop or skip"),
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
]
FILES = {
    "broken.toml": "model = ",
    "unknown.toml": "setps = 3",
    "misplaced.toml": "lr = 0.1",
    "out.toml": 'out = "runs/mine"',
    "kind.toml": 'steps = "many"',
    "precision.toml": 'precision = "bf61"',
    "both.toml": 'memory = "8GiB"\nplan = "plan.toml"',
    "good.toml": 'model = "gpt-1m"',
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "\n")
    return program(tmp_path, monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """What a command imports is not what it takes to refuse."""
    import transformers  # noqa: F401

    import wholestep.bench.workloads
    import wholestep.commands
    import wholestep.search.space  # noqa: F401


@pytest.mark.parametrize(("words", "said"), BAD, ids=[words for words, _ in BAD])
def test_it_is_one_line_at_once_and_nothing_is_written(words: str, said: str, call: Call, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    began = time.process_time()
    done = call(*words.split())
    taken = time.process_time() - began
    lines = done.err.strip().splitlines()
    assert done.code == 2 and len(lines) == 1, (done.code, done.err)
    assert lines[0].startswith("wholestep: ") and said in lines[0], lines[0]
    assert not done.out and taken < SECONDS, (taken, done.out)
    left = [path for path in sorted(folder.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert not left, left


def test_there_are_sixty_over_all_commands() -> None:
    commands = {words.split()[0] for words, _ in BAD}
    assert len(BAD) >= 60
    assert commands >= {
        "train", "plan", "show", "verify", "explain", "profile", "bench", "compare", "search", "doctor",
    }  # fmt: skip


def test_options_are_refused_before_torch_is_loaded(folder: Path) -> None:
    words = [
        "train --lr 1", "train gpt-1", "train --config unknown.toml", "train --log tensorbord", "train --resume --out no",
        "plan gpt-1", "plan gpt-1m --device h2000", "plan gpt-1m --memory 200GiB", "plan gpt-1m --recipe no", "plan x:y --memory a",
    ]  # fmt: skip
    check = (
        "import json, sys\n"
        "from wholestep import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    sys.argv = ['wholestep', *words.split()]\n"
        "    try:\n"
        "        cli.main()\n"
        "    except SystemExit as left:\n"
        "        assert left.code == 2 and 'torch' not in sys.modules, words\n"
    )
    command = [sys.executable, "-c", check, json.dumps(words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and len(done.stderr.splitlines()) == len(words), done.stderr


def test_what_a_cpu_cannot_hold_is_told_before_the_first_step(call: Call, folder: Path) -> None:
    done = call("train", "--batch", "200000", "--backend", "interpret", "--set", "tokenizer=bytes", "--quiet")
    if done.code == 0:
        pytest.skip("this machine has the memory")
    assert done.code == 2 and "use a smaller batch" in done.err.strip().splitlines()[-1], done.err
    assert not list(folder.glob("runs/*")), "no run is left behind"
