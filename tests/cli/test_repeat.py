"""Two equal runs of `wholestep train` end on equal bits, on any number of threads, whether their code was compiled or found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.calls import Call

SETUP = """
import torch
from torch import nn

class Words(nn.Module):
    def __init__(self, recurrent):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 32), nn.Embedding(2, 32)
        self.middle = nn.LSTM(32, 32, batch_first=True) if recurrent else nn.Linear(32, 32)
        self.out = nn.Linear(32, 20)

    def forward(self, x):
        x = self.middle(self.words(x) + self.places(x % 2))
        return self.out(x[0] if isinstance(x, tuple) else x)

def loss(model, x):
    return nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

def setup(recurrent=False):
    torch.manual_seed(0)
    model = Words(recurrent)
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randint(20, (400 if recurrent else 4000, 6))

def lstm():
    return setup(recurrent=True)
"""
MODELS = {
    "gpt-1m": ("gpt-1m",),
    "resnet-18": ("resnet-18", "--set=width=16", "--set=image_size=16"),
    "hf:llama": (
        "hf:llama", "--set=hidden_size=64", "--set=intermediate_size=128", "--set=num_hidden_layers=2", "--set=vocab_size=512",
    ),
    "lstm": ("repeated_training:lstm",),
}  # fmt: skip


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repeated_training.py").write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def different(a: Path, b: Path) -> list[str]:
    """The names of weights and optimizer states that are not equal in two runs."""
    found = []
    for name in ("model", "optimizer"):
        first, second = (
            load_file(next((run / "checkpoints").glob("step-*")) / f"{name}.safetensors") for run in (a, b)
        )
        assert first and first.keys() == second.keys()
        found += [f"{name}/{key}" for key in first if not torch.equal(first[key], second[key])]
    return found


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_with_embeddings_repeats_itself_on_two_threads(call: Call, tmp_path: Path) -> None:
    for run in ("a", "b"):
        done = call("train", "repeated_training:setup", "--steps", "5", "--out", str(tmp_path / run), "--quiet")
        assert done.code == 0, done.err
    assert different(tmp_path / "a", tmp_path / "b") == []


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_processes_repeat_each_other(model: str, threads: int, tmp_path: Path) -> None:
    """The first compiles and measures, the second finds code and choices on disk."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "WHOLESTEP_CACHE_DIR": str(tmp_path / "wholestep"),
    }  # fmt: skip
    for run in ("a", "b"):
        command = [sys.executable, "-m", "wholestep", "train", *MODELS[model], "--steps", "10", "--out", run, "--quiet"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert different(tmp_path / "a", tmp_path / "b") == []
