"""The command line: exit 0 on success, 1 when what it checks does not hold, 2 and one line on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import torch
from torch import nn

def setup():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    return model, lambda m, b: m(b).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, 4)

def wrong():
    return 3
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program")
    (made / "training.py").write_text(SETUP)
    return made


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "wholestep", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_verify_compares_and_prints_json(folder: Path) -> None:
    done = run(folder, "verify", "training:setup", "--backend", "interpret", "--steps", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] is True


@pytest.mark.parametrize(("stage", "text"), [("captured", "# ---- forward ----"), ("lowered", "def step(inputs)")])
def test_show_prints_the_graph(folder: Path, stage: str, text: str) -> None:
    done = run(folder, "show", "training:setup", "--stage", stage)
    assert done.returncode == 0 and text in done.stdout, done.stderr


def test_doctor_names_versions_and_the_cache(folder: Path) -> None:
    done = run(folder, "doctor")
    assert done.returncode == 0 and "torch" in done.stdout and "WHOLESTEP_CACHE_DIR" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify", "gpt-1m"), "not package.module:callable"),
        (("verify", "training:setpu"), "did you mean training:setup?"),
        (("verify", "nowhere:setup"), "No module named"),
        (("verify", "training:wrong"), "return (model, loss_fn, optimizer, example_batch)"),
        (("show", "training:setup", "--stage", "planned"), "use captured, prepared or lowered"),
        (("verify", "training:setup", "--backend", "fast"), "use one of"),
        (("train", "--steps", "0"), "--steps"),
        (("trian",), "trian"),
        (("verify",), "Missing argument"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(folder, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
